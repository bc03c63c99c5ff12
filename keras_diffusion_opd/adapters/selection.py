"""Which slots the samples of a batch read, as arrays: an argument of compiled functions."""

from typing import Any, NamedTuple


class Selection(NamedTuple):
    """What `AdapterBank.select` gives and `AdapterBank.scope` takes. A tree of two arrays on every backend.

    Args:
        slots: int32 (batch, stack), in the order of the adapters' names; 0 is no adapter.
        weights: float32 (batch, stack); 0 leaves the slot unread.

    Example:

    ```python
    import keras
    import keras_diffusion_opd as kdo

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    bank = kdo.adapters.AdapterBank(model, ".*", slots=2, max_stack=1)
    slots, weights = bank.select([kdo.adapters.Stack()] * 4)
    assert tuple(slots.shape) == tuple(weights.shape) == (4, 1)
    ```
    """

    slots: Any
    weights: Any
