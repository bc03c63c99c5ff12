"""Distribution matching distillation: move samples of a student to where the teacher finds them likely."""

from typing import Any

from keras import ops

from keras_diffusion_opd.losses.sample_rows import SampleRows, column, row_mean
from keras_diffusion_opd.losses.weighted_sum import LossOutput, WeightedSum

# Kept from 0: a teacher that answers with the sample itself has no error to divide by.
_SMALLEST_ERROR = 1e-8


def dmd_gradient(x0: Any, real_x0: Any, fake_x0: Any, *, normalize: bool = True, sample_weight: Any = None) -> Any:
    """The direction in which a student's samples have to be moved: `(fake - real) / mean|x0 - real|`.

    Both models are asked at `x_s = (1 - s) x0 + s e`. For Gaussians the expectation of `fake - real` over x_s is
    `s^2 / (1 - s)^2 dKL/dmean`: 0 where student and teacher are the same distribution.

    Args:
        x0: float (B, ...), samples of the student.
        real_x0: float (B, ...), what the teacher makes of their noised versions: its x0, with guidance.
        fake_x0: float (B, ...), what the critic makes of them, which knows the student's distribution.
        normalize: whether to divide by the mean absolute error of the teacher in each sample, at least 1e-8, so
            that all times count alike.
        sample_weight: None, or real (B,): rows of weight 0 are 0, whatever they hold.

    Returns:
        (B, ...), float32 (float64 where an input is), through which no gradient flows.

    Raises:
        ValueError: shapes that do not fit.

    Source: Yin et al., "One-step Diffusion with Distribution Matching Distillation", 2023, arXiv:2311.18828.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import dmd_gradient

    x0, real, fake = np.array([[1.0, 1.0]]), np.array([[0.0, -1.0]]), np.array([[3.0, -1.0]])
    assert np.array(dmd_gradient(x0, real, fake)).tolist() == [[2.0, 0.0]]
    ```
    """
    rows = SampleRows({"x0": x0, "real_x0": real_x0, "fake_x0": fake_x0}, sample_weight)
    difference = rows["fake_x0"] - rows["real_x0"]
    if normalize:
        size = row_mean(ops.abs(rows["x0"] - rows["real_x0"]))
        size = ops.where(size > _SMALLEST_ERROR, size, ops.full_like(size, _SMALLEST_ERROR))
        difference = difference / column(size, difference)
    return ops.stop_gradient(difference)


def dmd_loss(x0: Any, gradient: Any, *, sample_weight: Any = None) -> LossOutput:
    """A loss whose gradient with respect to a sample is `gradient`, over the number of elements.

    Its value, `mean(gradient^2) / 2`, is no measure of progress: it says how far the critic and the teacher are
    apart.

    Args:
        x0: float (B, ...), samples of the student, with their gradient.
        gradient: float (B, ...), from `dmd_gradient`.
        sample_weight: None, or real (B,), at least 0. A row of weight 0 does not enter, whatever it holds.

    Returns:
        `LossOutput` with the metric `"dmd/gradient_square"`, the mean square of `gradient`.

    Raises:
        ValueError: shapes that do not fit.

    Source: Yin et al., "Improved Distribution Matching Distillation for Fast Image Synthesis", 2024,
    arXiv:2405.14867.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import dmd_loss

    output = dmd_loss(np.array([[1.0, 1.0]]), np.array([[2.0, 0.0]]))
    assert float(output.primary.mean()) == 1.0
    ```
    """
    rows = SampleRows({"x0": x0, "gradient": gradient}, sample_weight)
    d = ops.stop_gradient(rows["gradient"])
    # The samples enter as an exact 0 that has a gradient: x0 - (x0 - d) would lose digits of d.
    residual = d + (rows["x0"] - ops.stop_gradient(rows["x0"]))
    values = row_mean(ops.square(residual)) / 2
    return LossOutput(rows.sum(values), {"dmd/gradient_square": _silent(rows.sum(row_mean(ops.square(d))))})


def gan_generator_loss(fake_logits: Any, *, sample_weight: Any = None) -> LossOutput:
    """`softplus(-fake)`: what a student pays for samples that the discriminator finds out.

    Args:
        fake_logits: float (B, ...), of the discriminator for the student's samples: high means real. Averaged
            over all axes but the first.
        sample_weight: None, or real (B,), at least 0. A row of weight 0 does not enter, whatever it holds.

    Returns:
        `LossOutput` without metrics.

    Raises:
        ValueError: shapes that do not fit.

    Source: Goodfellow et al., "Generative Adversarial Nets", 2014, arXiv:1406.2661; in DMD2, arXiv:2405.14867.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import gan_generator_loss

    assert abs(float(gan_generator_loss(np.zeros((3, 1))).primary.mean()) - np.log(2)) < 1e-6
    ```
    """
    rows = SampleRows({"fake_logits": fake_logits}, sample_weight)
    return LossOutput(rows.sum(row_mean(ops.softplus(-rows["fake_logits"]))), {})


def gan_critic_loss(real_logits: Any, fake_logits: Any, *, sample_weight: Any = None) -> LossOutput:
    """`softplus(-real) + softplus(fake)`: what a discriminator pays.

    Args:
        real_logits: float (B, ...), for real data. Averaged over all axes but the first.
        fake_logits: float (B, ...), for samples of the student, of the same shape.
        sample_weight: None, or real (B,), at least 0. A row of weight 0 does not enter, whatever it holds.

    Returns:
        `LossOutput` with the metric `"gan/accuracy"`: how often a logit has the right sign, 1/2 where it is 0.

    Raises:
        ValueError: shapes that do not fit.

    Source: Goodfellow et al., "Generative Adversarial Nets", 2014, arXiv:1406.2661; in DMD2, arXiv:2405.14867.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import gan_critic_loss

    output = gan_critic_loss(np.full((2, 1), 3.0), np.full((2, 1), -3.0))
    assert float(output.metrics["gan/accuracy"].mean()) == 1.0
    ```
    """
    rows = SampleRows({"real_logits": real_logits, "fake_logits": fake_logits}, sample_weight)
    real, fake = rows["real_logits"], rows["fake_logits"]
    right = row_mean((ops.sign(real) - ops.sign(fake)) / 4 + 0.5)
    values = row_mean(ops.softplus(-real)) + row_mean(ops.softplus(fake))
    return LossOutput(rows.sum(values), {"gan/accuracy": _silent(rows.sum(right))})


def _silent(metric: WeightedSum) -> WeightedSum:
    return WeightedSum(ops.stop_gradient(metric.total), metric.weight)
