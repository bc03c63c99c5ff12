"""`TokenRollout`: samples with what is needed to score them again."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.corruption import MaskedCorruption
from keras_diffusion_opd.data.inference import build_for, for_inference
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.losses.token_scores import token_log_probs
from keras_diffusion_opd.validation import whole_number


@dataclass(frozen=True)
class TokenRollout:
    """Sampled tokens, with the log-probability and the step at which each was revealed.

    The log-probability of a token is that of drawing it, given what was revealed before and given that its
    place was chosen; the choice of the place has none. Places in random order do not depend on the policy;
    those by confidence or margin do.

    Args:
        tokens: int32 (B, L).
        log_probs: float32 (B, L), at the temperature of the row; 0 where a token was given.
        revealed_at: int32 (B, L), the step, from 0, at which the row's token was revealed, counted within its
            block where there are blocks; -1 where it was given.
        steps: int, steps of the sequence, or of every block.
        temperature: float32 (B,).
        layout: the corruption whose inputs the denoiser is trained with.
        conditions: other inputs of the denoiser, each (B, ...).
        token_key: str, name of the tokens among the inputs, or None where they are the only one.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import token_log_probs
    from keras_diffusion_opd.samplers import MaskedSampler

    def denoiser(inputs):
        return np.tile(np.array([0.0, 1.0, 2.0], "float32"), (*inputs["token_ids"].shape, 1))

    rollout = MaskedSampler(mask_id=3).rollout(denoiser, shape=(2, 4), steps=2, seed=0)
    again = sum(np.array(token_log_probs(denoiser, rollout.prepare(step))) for step in range(rollout.steps))
    assert np.allclose(again, rollout.log_probs, atol=1e-5)
    assert np.allclose(rollout.rescore(denoiser), rollout.log_probs, atol=1e-5)    # the same, in one call
    ```
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    revealed_at: np.ndarray
    steps: int
    temperature: np.ndarray
    layout: MaskedCorruption
    conditions: dict[str, np.ndarray] = field(default_factory=dict)
    token_key: str | None = "token_ids"

    def state(self, step: int) -> np.ndarray:
        """The tokens before `step`, int32 (B, L), the mask id where nothing was yet; of every block at once.

        Raises:
            ValueError: `step` is not in [0, steps).
        """
        if whole_number("step", step) >= self.steps:
            raise ValueError(f"`step` must be below the {self.steps} steps of this rollout. Received {step}.")
        return np.where(self.revealed_at < step, self.tokens, np.int32(self.layout.mask_id))

    def prepare(self, step: int, *, stamp: Stamp | None = None) -> PreparedBatch:
        """What was revealed at `step`, as a batch: the inputs at that step, the tokens as targets, weight 1.

        The inputs are those that training uses; with blocks all of them are scored in one pass.
        `token_log_probs(model, rollout.prepare(step), temperature=...)` gives the sampler's log-probabilities
        where `revealed_at == step`, and 0 elsewhere.

        Args:
            step: int in [0, steps).
            stamp: None, or where the samples came from.
        """
        state = self.state(step)
        inputs: Any = state
        if self.token_key is not None:
            inputs = self.layout.model_inputs(state, self.tokens, conditions=self.conditions, token_key=self.token_key)
        return PreparedBatch.create(
            model_inputs=inputs,
            target_ids=self.tokens,
            loss_weights=(self.revealed_at == step).astype("float32"),
            stamp=stamp,
        )

    def rescore(self, model: Any) -> np.ndarray:
        """The log-probabilities of the tokens by the trainer's way, float32 (B, L), to hold against `log_probs`.

        Of the model that sampled they are the same to about 1e-5; of a later one, their difference is the log
        of the importance ratio. A gap where there should be none is a mask, a temperature or a dropout that
        sampling and scoring do not share.

        Args:
            model: Keras model or layer, called with `training=False`, or a function that holds no variables.
        """
        call, models = for_inference("model", model)
        build_for(model, self.prepare(0).model_inputs)
        logits_of = backend.compiled(call, models)
        total = np.zeros(self.tokens.shape, "float32")
        for step in range(self.steps):
            batch = self.prepare(step)
            logits = logits_of(batch.model_inputs)
            for temperature in np.unique(self.temperature):
                rows = self.temperature == temperature
                scores = token_log_probs(logits, batch, temperature=float(temperature), excluded_id=self.layout.mask_id)
                total[rows] += ops.convert_to_numpy(scores)[rows]
        return total
