"""Two sizes of one vocabulary: padding is masked or cut, a real overflow is refused."""

import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.data import DenseTargets, PreparedBatch, fit_vocabulary
from keras_diffusion_opd.losses import DistillationLoss, token_divergence
from tests.oracles import numpy, tensor

TEACHER = np.array([[[1.0, 0.0, -1.0, -30.0]]], "float32")
STUDENT = np.array([[[1.0, 0.0, -1.0]]], "float32")


@pytest.mark.parametrize("kind", ["numpy", "tensor"])
def test_padding_of_the_teacher_is_cut_and_the_loss_is_zero(kind):
    teacher = TEACHER if kind == "numpy" else tensor(TEACHER)
    cut = fit_vocabulary(teacher, 3)
    assert float(numpy(token_divergence(tensor(STUDENT), ops.convert_to_tensor(cut)))[0, 0]) == 0.0
    assert isinstance(cut, np.ndarray) == (kind == "numpy")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_added_has_probability_zero_and_gradient_zero(dtype):
    wide = fit_vocabulary(tensor(STUDENT, dtype), 5)
    assert tuple(wide.shape) == (1, 1, 5) and np.all(numpy(wide)[..., 3:] == -np.inf)
    # Padding with zeros gives 0.218917 here: the padding would take 0.1966 of the student's mass.
    padded = tensor(np.concatenate([STUDENT, np.zeros((1, 1, 1))], -1))
    assert float(numpy(token_divergence(padded, tensor(TEACHER)))[0, 0]) == pytest.approx(0.218917, abs=1e-6)
    masked = fit_vocabulary(tensor(STUDENT), 4)
    assert float(numpy(token_divergence(masked, fit_vocabulary(tensor(STUDENT), 4)))[0, 0]) == 0.0


def test_same_size_is_the_same_object():
    assert fit_vocabulary(TEACHER, 4) is TEACHER


def test_mass_on_what_would_be_cut_is_refused_with_its_place():
    teacher = np.tile(TEACHER, (2, 3, 1))
    teacher[1, 2, 3] = 0.0
    with pytest.raises(ValueError, match=r"padding from id 3 on.*Received 0.197 at \(1, 2\), and 0 more.*tokenizers"):
        fit_vocabulary(teacher, 3)
    weights = np.ones((2, 3), "float32")
    weights[1, 2] = 0.0
    assert fit_vocabulary(teacher, 3, loss_weights=weights).shape == (2, 3, 3)
    assert fit_vocabulary(teacher, 3, tolerance=0.2).shape == (2, 3, 3)
    assert fit_vocabulary(teacher, 3, tolerance=None).shape == (2, 3, 3)


def test_151936_and_152064_columns_meet():
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(1, 1, 152_064)).astype("float32")
    teacher[..., 151_936:] = -40.0
    student = teacher[..., :151_936].copy()
    assert float(numpy(token_divergence(tensor(student), tensor(fit_vocabulary(teacher, 151_936))))[0, 0]) == 0.0


def test_loss_names_the_function_that_mends_it():
    ids = np.zeros((1, 1), "int32")
    weights = np.ones((1, 1), "float32")
    batch = PreparedBatch.create(model_inputs=ids, target_ids=ids, loss_weights=weights, teacher=DenseTargets(TEACHER))
    with pytest.raises(ValueError, match="identical shapes.*fit_vocabulary"):
        DistillationLoss()(tensor(STUDENT), batch)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((np.zeros((1, 3), "int32"), 2), TypeError, "floating-point dtype. Received int32"),
        ((TEACHER, 0), ValueError, "`vocabulary_size` must be a whole number"),
        (([[0.0]], 1), TypeError, "NumPy array"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        fit_vocabulary(*arguments)
    with pytest.raises(ValueError, match=r"`tolerance` must be None or lie in \[0, 1\)"):
        fit_vocabulary(TEACHER, 3, tolerance=1.0)
