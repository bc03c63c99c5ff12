"""Upper bounds on the negative log-likelihood of masked and of block diffusion models."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data import TokenCorruption
from keras_diffusion_opd.data.inference import batch_conditions, build_for, exclude_id, for_inference, require_logits
from keras_diffusion_opd.losses import token_cross_entropy
from keras_diffusion_opd.metrics.every_subset import every_subset
from keras_diffusion_opd.validation import positive_int


@dataclass(frozen=True)
class LikelihoodBound:
    """An upper bound on the negative log-likelihood of a set of sequences.

    Args:
        nats: float64 (N,), of every sequence, averaged over what was drawn for it.
        tokens: int (N,), how many tokens of each were scored.
        draws: float64 (M,), nats per token over all sequences, of every independent draw; an antithetic pair
            is one. A single value where the bound is exact.
        exact: whether nothing was drawn.
        byte_counts: None, or (N,): bytes of text behind each sequence.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.metrics import LikelihoodBound

    bound = LikelihoodBound(np.array([4.0, 2.0]), np.array([2, 2]), np.array([1.4, 1.6]), byte_counts=np.array([6, 6]))
    assert bound.nats_per_token == 1.5
    assert abs(bound.bits_per_byte - 0.5 / np.log(2)) < 1e-12
    ```
    """

    nats: np.ndarray
    tokens: np.ndarray
    draws: np.ndarray
    exact: bool = False
    byte_counts: np.ndarray | None = None

    @property
    def nats_per_token(self) -> float:
        """Of all sequences together."""
        return float(np.sum(self.nats) / np.sum(self.tokens))

    @property
    def bits_per_dimension(self) -> float:
        """Bits per token: a token is a dimension."""
        return self.nats_per_token / math.log(2)

    @property
    def standard_error(self) -> float:
        """Of `nats_per_token`, over sequences and over what was drawn for each; NaN for a single sequence.

        Sequences are taken as independent. Low-discrepancy times make the true error a little smaller.
        """
        return _ratio_error(self.nats, self.tokens)

    @property
    def sampling_error(self) -> float:
        """The part of it that more draws would take away, for these very sequences; NaN for a single draw."""
        if self.exact:
            return 0.0
        if len(self.draws) < 2:
            return math.nan
        return float(np.std(self.draws, ddof=1) / math.sqrt(len(self.draws)))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text, comparable between tokenizers. ValueError without `byte_counts`."""
        return float(np.sum(self.nats) / (math.log(2) * np.sum(self._bytes())))

    @property
    def bits_per_byte_error(self) -> float:
        """Standard error of `bits_per_byte`, as `standard_error`."""
        return _ratio_error(self.nats / math.log(2), self._bytes())

    def _bytes(self) -> np.ndarray:
        if self.byte_counts is None:
            raise ValueError("Bits per byte need `byte_counts`: the bytes of text of every sequence.")
        return self.byte_counts


def _ratio_error(totals: np.ndarray, weights: np.ndarray) -> float:
    """Standard error of sum(totals) / sum(weights) over independent rows."""
    if len(totals) < 2:
        return math.nan
    residual = totals - np.sum(totals) / np.sum(weights) * weights
    return float(np.std(residual, ddof=1) / (np.mean(weights) * math.sqrt(len(totals))))


def masked_likelihood_bound(
    denoiser: Any,
    ids: Any,
    corruption: TokenCorruption,
    *,
    samples: int | None = 64,
    seed: int = 0,
    batch_size: int | None = None,
    conditions: dict[str, Any] | None = None,
    frozen: Any = None,
    sample_ids: Any = None,
    byte_counts: Any = None,
    token_key: str = "token_ids",
    progress: Callable[[int, int], None] | None = None,
) -> LikelihoodBound:
    """Bound the negative log-likelihood of sequences under a masked or a block diffusion model.

    With `MaskedCorruption` the bound is that of masked diffusion, over all orders of all tokens; with
    `BlockCorruption` that of block diffusion, over the orders within each block given the blocks before it,
    which for `block_size=1` is the autoregressive likelihood itself. It does not depend on the schedule; what
    is drawn does. For a model whose answers do not depend on the other tokens it is the likelihood itself.
    Every call compiles the denoiser once.

    Args:
        denoiser: Keras model or layer, called with `training=False`, or a function that holds no variables,
            from the inputs of the corruption to logits (B, L, V).
        ids: int (N, L), clean tokens.
        corruption: `MaskedCorruption`, `BlockCorruption`, or `UniformCorruption(weights="replaced")`. Its
            schedule must mask everything at t = 1.
        samples: int >= 1, corruptions drawn of every sequence (even for antithetic times); or None, which
            draws nothing and adds up all 2^n - 1 subsets of the n tokens of a block, of all blocks at once:
            for blocks of at most 12 tokens. One pass where blocks have one token.
        seed: int. The same seed gives the same corruptions for every model: differences are paired.
        batch_size: None for all rows at once, or rows per call of the denoiser. It changes nothing but
            memory; the last batch is filled up, so that one program serves.
        conditions: other inputs of the denoiser by name, each (N, ...).
        frozen: None, or bool (N, L): True where a token is given (a prompt, padding) and not scored.
        sample_ids: None for 0 to N - 1, or int (N,): see the corruption.
        byte_counts: None, or int (N,): bytes of text of each sequence, for bits per byte.
        token_key: str, name of the tokens among the denoiser's inputs.
        progress: None, or a function (done, total) called after every corruption.

    Returns:
        `LikelihoodBound`, in float64 sums of float32 cross-entropies.

    Raises:
        TypeError, ValueError: an argument does not fit; the corruption gives no bound; a sequence has no
            token to score.

    Source: Sahoo et al., "Simple and Effective Masked Diffusion Language Models", 2024, arXiv:2406.07524;
    Arriola et al., "Block Diffusion", 2025, arXiv:2503.09573.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import BlockCorruption
    from keras_diffusion_opd.metrics import masked_likelihood_bound

    def denoiser(inputs):                                    # a fair coin, whatever it sees
        rows, length = inputs["token_ids"].shape             # noised and clean tokens side by side
        return np.zeros((rows, length // 2, 2), "float32")

    coins = np.array([[0, 1, 1, 0], [1, 1, 0, 0]])
    bound = masked_likelihood_bound(denoiser, coins, BlockCorruption(2, block_size=2), samples=None)
    assert abs(bound.bits_per_dimension - 1) < 1e-6 and bound.sampling_error == 0
    ```
    """
    # 1. Check everything before anything runs.
    ids = np.asarray(ids)
    scale = _weight_scale(corruption)
    if samples is not None and positive_int("samples", samples) % 2 and corruption.times == "antithetic":
        raise ValueError(
            f"`samples` must be even where times are antithetic: a pair counts as one. Received {samples}."
        )
    if progress is not None and not callable(progress):
        raise TypeError(f"`progress` must be None or a function (done, total). Received {progress!r}.")
    sample_ids = np.arange(len(ids)) if sample_ids is None else sample_ids
    first = corruption(seed, 0, sample_ids, ids, frozen=frozen)
    frozen = np.zeros(ids.shape, bool) if frozen is None else np.asarray(frozen)
    tokens = _counts("frozen", np.sum(~frozen, axis=1), len(ids))
    if byte_counts is not None:
        byte_counts = _counts("byte_counts", np.asarray(byte_counts), len(ids))
    conditions = batch_conditions(conditions, len(ids), corruption.input_keys(token_key))
    size = len(ids) if batch_size is None else min(positive_int("batch_size", batch_size), len(ids))

    def inputs(corrupted: np.ndarray, rows: np.ndarray) -> dict[str, Any]:
        part = {name: value[rows] for name, value in conditions.items()}
        return corruption.model_inputs(corrupted[rows], ids[rows], conditions=part, token_key=token_key)

    score = _program(denoiser, getattr(corruption, "mask_id", None), inputs(first.token_ids, np.zeros(size, int)))

    def entropies(corrupted: np.ndarray, rows: np.ndarray) -> Any:
        return score(inputs(corrupted, rows), ids[rows].astype("int32"))

    # 2. Score one corruption of everything after the other.
    if samples is None:
        passes, total = every_subset(corruption, ids, frozen)
    else:
        passes, total = _drawn(corruption, samples, seed, sample_ids, ids, frozen, scale), samples
    nats, draws = np.zeros(len(ids)), []
    for done, (corrupted, weights, factor) in enumerate(passes, 1):
        found = _weighted(functools.partial(entropies, corrupted), weights, size)
        nats += factor * found
        draws.append(factor * np.sum(found) / np.sum(tokens))
        if progress is not None:
            progress(done, total)
    # 3. Average.
    if samples is None:
        return LikelihoodBound(nats, tokens, np.array([np.sum(draws)]), True, byte_counts)
    pairs = 2 if corruption.times == "antithetic" else 1
    independent = np.mean(np.reshape(draws, (-1, pairs)), axis=1)
    return LikelihoodBound(nats / samples, tokens, independent, False, byte_counts)


def _weighted(entropies_of: Callable[[np.ndarray], Any], weights: np.ndarray, size: int) -> np.ndarray:
    """float64 (N,): of every row the sum of its entropies times `weights` (N, L), scored `size` rows at a time."""
    count = len(weights)
    found = np.zeros(count)
    for start in range(0, count, size):
        taken = np.minimum(np.arange(start, start + size), count - 1)  # the last row fills up the batch
        chosen = taken[: count - start]
        entropies, part = ops.convert_to_numpy(entropies_of(taken)), weights[chosen]
        # A value of weight 0 does not enter, even infinite.
        found[chosen] = np.sum(part * np.where(part != 0, entropies[: len(chosen)].astype("float64"), 0.0), axis=1)
    return found


def _drawn(
    corruption: TokenCorruption, samples: int, seed: int, sample_ids: Any, ids: Any, frozen: Any, scale: float
) -> Iterator[tuple[np.ndarray, np.ndarray, float]]:
    """Corrupted tokens and weights (N, L), and a factor of the latter."""
    for draw in range(samples):
        out = corruption(seed, draw, sample_ids, ids, frozen=frozen)
        yield out.token_ids, out.weights, scale


def _weight_scale(corruption: Any) -> float:
    """What makes the expected weight of a token 1, so that no time below `eps` is missing."""
    if not isinstance(corruption, TokenCorruption):
        raise TypeError(
            "`corruption` must be a MaskedCorruption, BlockCorruption or UniformCorruption. Received "
            f"{type(corruption).__name__}."
        )
    if not corruption.gives_bound:
        raise ValueError(
            "`corruption` must have the weights of a bound. Received UniformCorruption(weights='denoising'), whose "
            "mean is none. Use weights='replaced'."
        )
    schedule = corruption.schedule
    start, end = float(schedule.alpha(schedule.eps)), float(schedule.alpha(1.0))
    if end > 1e-6:
        raise ValueError(
            "`corruption.schedule` must mask everything at t = 1: what survives would not be paid for. Received "
            f"alpha(1) = {end:g}. The bound does not depend on the schedule: use 'linear'."
        )
    return (1.0 - schedule.eps) / (start - end)


def _counts(name: str, counts: np.ndarray, rows: int) -> np.ndarray:
    if counts.shape != (rows,) or np.any(counts < 1):
        wrong = f"shape {counts.shape}" if counts.shape != (rows,) else f"0 in row {np.argmin(counts)}"
        raise ValueError(
            f"`{name}` must leave at least one in each of the {rows} rows. Received {wrong}. Leave it out."
        )
    return counts


def _program(denoiser: Any, mask_id: int | None, inputs: Any) -> Callable[..., Any]:
    """The compiled cross-entropy (B, L) of a denoiser, which never predicts the mask."""
    call, models = for_inference("denoiser", denoiser)
    build_for(denoiser, inputs)

    def score(inputs: Any, targets: Any) -> Any:
        logits = call(inputs)
        require_logits("denoiser", logits, *targets.shape)
        return token_cross_entropy(exclude_id(logits, mask_id), targets)

    return backend.compiled(score, models)
