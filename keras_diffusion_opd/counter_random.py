"""Random bits as a pure function of a key and a counter, the same on every backend and on the host.

A stateful generator gives a sample other noise when the batch is split otherwise, when a run resumes, or
when another row joins the batch. Here the bits belong to the key and the counter alone. The functions take
a namespace: NumPy on the host, `keras.ops` on a device; both give the same 32 bits, as int32.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Threefry-2x32, 20 rounds);
Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (SplitMix).
"""

from typing import Any

import numpy as np

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA
_BELOW_2_32 = 2.0**-32


def threefry2x32(xp: Any, key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds.

    Args:
        xp: `numpy` or `keras.ops`.
        key: two int32 arrays, broadcast against the counter.
        counter: two int32 arrays. Every pair gives other bits.

    Returns:
        Two int32 arrays of the broadcast shape, each 32 uniform bits.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.counter_random import threefry2x32

    zero = np.zeros((1,), "int32")
    first, second = threefry2x32(np, (zero, zero), (zero, zero))
    assert [hex(int(w) % 2**32) for w in (first[0], second[0])] == ["0x6b200159", "0x99ba4efe"]
    ```
    """
    keys = (key[0], key[1], xp.bitwise_xor(xp.bitwise_xor(key[0], key[1]), _PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[4 * (group % 2) : 4 * (group % 2) + 4]:
            x = x + y
            y = xp.bitwise_xor(_rotate(xp, y, rotation), x)
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + (group + 1)
    return x, y


def splitmix(xp: Any, start: Any, stride: Any, index: Any) -> Any:
    """Element `index` of the sequence that `(start, stride)` seeds: many bits from one Threefry pair.

    Args:
        xp: `numpy` or `keras.ops`.
        start: int32 array, uniform bits.
        stride: int32 array, uniform bits; made odd here, so that the sequence has period 2^32.
        index: int32 array.

    Returns:
        int32 array of the broadcast shape, 32 uniform bits each.
    """
    x = start + index * xp.bitwise_or(stride, 1)
    x = xp.bitwise_xor(x, _shift(xp, x, 16)) * 0x7FEB352D
    x = xp.bitwise_xor(x, _shift(xp, x, 15)) * -2073254261  # 0x846CA68B
    return xp.bitwise_xor(x, _shift(xp, x, 16))


def uniform32(xp: Any, bits: Any) -> Any:
    """float32 in (0, 1] from 32 bits, without losing the small values.

    A float32 has 24 bits. The low eight still count where the high ones are small, so that the smallest
    value is 2^-33 and not 2^-24: a Gumbel draw can be as rare as its probability says.
    """
    high = xp.cast(_shift(xp, bits, 8), "float32") if xp is not np else _shift(np, bits, 8).astype("float32")
    low = xp.bitwise_and(bits, 0xFF)
    low = low.astype("float32") if xp is np else xp.cast(low, "float32")
    return high * np.float32(2.0**-24) + (low + np.float32(0.5)) * np.float32(_BELOW_2_32)


def uniform64(bits: np.ndarray, more: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) from 53 of the bits of two int32 arrays, on the host."""
    high = bits.astype("uint32").astype("uint64") >> np.uint64(5)
    low = more.astype("uint32").astype("uint64") >> np.uint64(6)
    return (high * np.uint64(2**26) + low).astype("float64") * 2.0**-53


def split_words(value: Any) -> tuple[np.ndarray, np.ndarray]:
    """Low and high 32 bits of int64 values, as two int32 arrays."""
    wide = np.asarray(value, "int64").view("uint64")
    low = (wide & np.uint64(0xFFFFFFFF)).astype("uint32").view("int32")
    high = (wide >> np.uint64(32)).astype("uint32").view("int32")
    return low, high


def _rotate(xp: Any, x: Any, bits: int) -> Any:
    return xp.bitwise_or(xp.left_shift(x, bits), _shift(xp, x, 32 - bits))


def _shift(xp: Any, x: Any, bits: int) -> Any:
    """Logical right shift of int32: the sign bit does not spread."""
    return xp.bitwise_and(xp.right_shift(x, bits), (1 << (32 - bits)) - 1)
