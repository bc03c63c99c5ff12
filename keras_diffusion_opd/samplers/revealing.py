"""One step of filling in: which masked positions are revealed, and what is drawn there."""

from typing import Any

from keras import ops

from keras_diffusion_opd.data.inference import exclude_id
from keras_diffusion_opd.data.log_space import gather_ids, log_probabilities
from keras_diffusion_opd.data.targets import no_distribution
from keras_diffusion_opd.samplers.row_noise import gumbel

ORDERS = ("random", "confidence", "margin")
# Below this length comparing all pairs is several times faster than sorting twice.
PAIRWISE_LENGTH = 256


def reveal(
    state: dict[str, Any],
    logits: Any,
    open_positions: Any,
    left: Any,
    temperature: Any,
    order_noise: Any,
    *,
    mask_id: int,
    order: str,
) -> dict[str, Any]:
    """The next state; see `MaskedSampler.advance` for the arguments.

    Args:
        open_positions: bool (B, L): masked positions that may be revealed at this step.
    """
    tokens = state["tokens"]
    logits = exclude_id(ops.cast(logits, "float32"), mask_id)
    vocabulary = logits.shape[-1]
    broken = ops.logical_and(open_positions, no_distribution(logits))
    # 1. Draw a token everywhere, with this row's noise. The last column of the noise is for the order.
    noise = gumbel(state["keys"], state["step"], tokens.shape[1], vocabulary + 1)
    warm = ops.reshape(temperature, (-1, 1, 1))
    drawn = ops.cast(ops.argmax(logits + warm * noise[..., :vocabulary], axis=-1), "int32")
    # 2. Order the open positions.
    score = _score(order, logits, drawn, noise[..., vocabulary], ops.expand_dims(order_noise, -1))
    score = ops.where(open_positions, score, ops.full_like(score, -float("inf")))
    # 3. Reveal the first of them, until `left` stay masked.
    masked = ops.sum(ops.cast(ops.equal(tokens, mask_id), "int32"), axis=-1, keepdims=True)
    revealed = ops.logical_and(open_positions, _ranks(score) < masked - ops.expand_dims(left, -1))
    following = {
        "tokens": ops.where(revealed, drawn, tokens),
        "keys": state["keys"],
        "step": state["step"] + 1,
        "sound": ops.logical_and(state["sound"], ops.logical_not(ops.any(broken, axis=-1))),
    }
    # 4. Note what was revealed, with its log-probability, where that is wanted.
    if "log_probs" in state:
        # Where nothing is revealed the logits may be anything; temperatures are above 0.
        safe = ops.where(ops.expand_dims(revealed, -1), logits / warm, ops.zeros_like(logits))
        chosen = gather_ids(log_probabilities(safe), drawn)
        following["log_probs"] = ops.where(revealed, chosen, state["log_probs"])
        following["revealed_at"] = ops.where(revealed, ops.expand_dims(state["step"], -1), state["revealed_at"])
    return following


def _score(order: str, logits: Any, drawn: Any, noise: Any, amount: Any) -> Any:
    if order == "random":
        return noise
    if order == "confidence":
        return gather_ids(logits, drawn) - ops.logsumexp(logits, axis=-1) + amount * noise
    best = ops.top_k(ops.softmax(logits, axis=-1), 2)[0]
    margin = best[..., 0] - best[..., 1]
    return ops.log(ops.maximum(margin, 1e-30)) + amount * noise


def _ranks(score: Any) -> Any:
    """int32 (B, L): 0 for the highest score of its row; equal scores in order of position."""
    length = score.shape[1]
    if length > PAIRWISE_LENGTH:
        return ops.argsort(ops.argsort(-score, axis=-1), axis=-1)
    ours, other = ops.expand_dims(score, 2), ops.expand_dims(score, 1)
    place = ops.arange(length)
    earlier = ops.expand_dims(place, 0) < ops.expand_dims(place, 1)
    ahead = ops.logical_or(other > ours, ops.logical_and(ops.equal(other, ours), earlier))
    return ops.sum(ops.cast(ahead, "int32"), axis=2)
