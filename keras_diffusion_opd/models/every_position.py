"""The positions 0..L-1 of every row: what a masked-LM head is given so that it scores the whole sequence."""

from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class EveryPosition(keras.layers.Layer):
    """`token_ids: int (B, L)` -> `positions: int32 (B, L)`, each row `0, 1, ..., L - 1`.

    KerasHub's masked-LM heads gather the hidden states at `mask_positions` before they score them. Given
    these positions, the output at `i` is the score of position `i`: nothing shifts.

    Example:

    ```python
    import keras
    from keras_diffusion_opd.models import EveryPosition

    positions = EveryPosition()(keras.ops.zeros((2, 3), dtype="int32"))
    assert keras.ops.convert_to_numpy(positions).tolist() == [[0, 1, 2], [0, 1, 2]]
    ```
    """

    def call(self, token_ids: Any) -> Any:
        """Positions of the shape of `token_ids`, int32."""
        shape = ops.shape(token_ids)
        return ops.broadcast_to(ops.expand_dims(ops.arange(shape[1], dtype="int32"), 0), shape)

    def compute_output_spec(self, token_ids: Any) -> Any:
        """int32 of the shape of `token_ids`, whatever the dtype policy."""
        return keras.KerasTensor(token_ids.shape, "int32")
