"""What a policy says about the tokens of a batch: log-probabilities and entropies, token by token."""

from typing import Any, NamedTuple

from keras import ops

from keras_diffusion_opd.data.arrays import is_array, shape_of
from keras_diffusion_opd.data.inference import exclude_id, for_inference, require_logits
from keras_diffusion_opd.data.log_space import computation_dtype, log_probabilities
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.losses.distillation import active_only, prepare
from keras_diffusion_opd.losses.divergences import token_cross_entropy
from keras_diffusion_opd.validation import positive_temperature


class TokenScores(NamedTuple):
    """Scores of the target ids of a batch; exactly 0 at inactive positions.

    Args:
        log_probs: float (B, L), natural logarithms, at most 0; -inf for an id of logit -inf.
        entropy: float (B, L), of the whole distribution, in nats; at least 0.

    Example:

    ```python
    from keras_diffusion_opd.losses import TokenScores

    log_probs, entropy = TokenScores([[-0.5]], [[0.7]])
    ```
    """

    log_probs: Any
    entropy: Any


def token_entropy(logits: Any, *, temperature: float = 1.0) -> Any:
    """Entropy of `softmax(logits / temperature)` over the last axis, in nats; ids of logit -inf count nothing.

    Args:
        logits: float (..., V), any float dtype.
        temperature: > 0.

    Returns:
        float32 or float64 (...), finite where some logit is.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import token_entropy

    assert abs(float(token_entropy(np.array([0.0, 0.0, -np.inf], "float32"))) - np.log(2)) < 1e-6
    ```
    """
    log_p = log_probabilities(ops.convert_to_tensor(logits), positive_temperature(temperature))
    return -ops.sum(ops.exp(log_p) * log_p, axis=-1)


def token_log_probs(
    model_or_logits: Any,
    batch: PreparedBatch,
    *,
    temperature: float = 1.0,
    stop_gradient: bool = True,
    return_entropy: bool = False,
    excluded_id: int | None = None,
) -> Any:
    """Score the target ids of a batch under a policy: `log softmax(logits / temperature)[target]`.

    Position i of the logits scores target i; nothing is shifted. Where the batch's weight is 0 the score is
    exactly 0, whatever ids and logits are there (NaN included). Weights do not enter otherwise. Given
    `TokenRollout.prepare(step)` and the sampler's temperature, it gives the sampler's log-probabilities.

    Args:
        model_or_logits: float (B, L, V); or a Keras model or layer, called with `training=False`, or a
            function, from `batch.model_inputs` to such logits.
        batch: `PreparedBatch` of B rows and L positions.
        temperature: finite, > 0.
        stop_gradient: whether the scores are constants (an old or a reference policy); False to train on
            them.
        return_entropy: whether to give `TokenScores`, with the entropy at that temperature.
        excluded_id: None, or an id that cannot be drawn: the mask token, where the model scores it. Samplers
            exclude theirs.

    Returns:
        float32 (B, L) (float64 where the logits are); or `TokenScores` of two such arrays.

    Raises:
        ValueError: `temperature` is not a finite positive real scalar; the logits do not fit the batch.
        TypeError: there are no logits, and nothing that gives some; `batch` is not a PreparedBatch.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import PreparedBatch
    from keras_diffusion_opd.losses import token_log_probs

    batch = PreparedBatch.create(
        model_inputs={"token_ids": np.zeros((1, 2), "int32")},
        target_ids=np.array([[0, -1]]),
        loss_weights=np.array([[1.0, 0.0]], "float32"),
    )
    logits = np.array([[[2.0, -1.0], [np.nan, np.inf]]], "float32")
    log_probs, entropy = token_log_probs(logits, batch, return_entropy=True)
    assert abs(float(log_probs[0, 0]) + 0.04858735) < 1e-6 and float(log_probs[0, 1]) == 0.0
    ```
    """
    temperature = positive_temperature(temperature)
    # 1. Logits, with nothing in them where the batch is inactive.
    logits, ids, active, _ = prepare(_logits(model_or_logits, batch), batch)
    logits = exclude_id(ops.cast(logits, computation_dtype(logits)), excluded_id) / temperature
    # 2. Score.
    log_probs = active_only(active, -token_cross_entropy(logits, ids))
    found = TokenScores(log_probs, active_only(active, token_entropy(logits)) if return_entropy else None)
    # 3. Detach.
    if stop_gradient:
        found = TokenScores(*(None if x is None else ops.stop_gradient(x) for x in found))
    return found if return_entropy else found.log_probs


def _logits(model_or_logits: Any, batch: Any) -> Any:
    if is_array(model_or_logits):
        return model_or_logits
    call, _ = for_inference("model_or_logits", model_or_logits)
    if not isinstance(batch, PreparedBatch):
        raise TypeError(f"`batch` must be a PreparedBatch. Received {type(batch).__name__}.")
    logits = call(batch.model_inputs)
    rows, length = shape_of(batch.target_ids)
    require_logits("model_or_logits", logits, rows, length)
    return logits
