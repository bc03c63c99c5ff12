"""Token ids in as few bits as the vocabulary needs: 17 for 128,256 ids, in place of 32."""

import numpy as np


def id_bits(vocabulary_size: int) -> int:
    """Bits of the largest id of a vocabulary, at least 1."""
    return max(1, (vocabulary_size - 1).bit_length())


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` ids of `bits` bits take."""
    return -(-count * bits // 8)


def pack_ids(ids: np.ndarray, bits: int) -> np.ndarray:
    """Integers (..., K) in [0, 2**bits) as uint8 (..., packed_bytes(K, bits)); the first id has the lowest bits."""
    shape, count = ids.shape[:-1], ids.shape[-1]
    if bits % 8 == 0:
        wide = np.ascontiguousarray(ids, "<u4").view("uint8").reshape(*shape, count, 4)
        return np.ascontiguousarray(wide[..., : bits // 8]).reshape(*shape, count * bits // 8)
    spread = (ids.astype("uint32")[..., None] >> np.arange(bits, dtype="uint32")) & np.uint32(1)
    flat = spread.astype("uint8").reshape(*shape, count * bits)
    return np.packbits(flat, axis=-1, bitorder="little")


def unpack_ids(packed: np.ndarray, count: int, bits: int) -> np.ndarray:
    """int32 (..., count): the inverse of `pack_ids`."""
    shape = packed.shape[:-1]
    spread = np.unpackbits(packed, axis=-1, count=count * bits, bitorder="little").reshape(*shape, count, bits)
    whole = np.packbits(spread, axis=-1, bitorder="little")
    wide = np.zeros((*shape, count, 4), "uint8")
    wide[..., : whole.shape[-1]] = whole
    return wide.view("<u4").reshape(*shape, count).astype("int32")
