"""What a store's targets belong to: teacher, tokenizer, vocabulary, mask, temperature."""

from collections.abc import Mapping
from typing import Any

from keras_diffusion_opd.data.store.packing import TargetPacking
from keras_diffusion_opd.provenance import check_digest, digest
from keras_diffusion_opd.provenance.row_shard import StoreError
from keras_diffusion_opd.validation import positive_temperature

GIVEN = ("teacher", "tokenizer", "mask_id")
KNOWN = (*GIVEN, "vocabulary_size", "temperature")


def checked_fingerprints(value: Any, packing: TargetPacking) -> dict[str, Any]:
    """All fingerprints of a store that is to be written, as JSON values; the teacher's has to be there."""
    given = stated_fingerprints(value, "fingerprints", GIVEN)
    if given.get("teacher") is None:
        raise ValueError(
            "`fingerprints` must name the teacher, as fingerprints={'teacher': model} or its digest: without it nobody "
            "can tell later whose targets these are."
        )
    return {**dict.fromkeys(GIVEN), **given, **packing.fingerprints()}


def stated_fingerprints(value: Any, name: str, known: tuple[str, ...] = KNOWN) -> dict[str, Any]:
    """Those fingerprints that a caller states; a model or arrays become their digest."""
    if not isinstance(value, Mapping) or set(value) - set(known):
        got = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
        raise ValueError(f"`{name}` must be a mapping with some of the keys {list(known)}. Received {got}.")
    return {key: _checked(f"{name}[{key!r}]", key, item) for key, item in value.items()}


def _checked(name: str, key: str, value: Any) -> Any:
    if value is None:
        return None
    if key in ("teacher", "tokenizer"):
        return check_digest(value if isinstance(value, str) else digest(value), name)
    if key == "temperature":
        return positive_temperature(value)
    if type(value) is not int or value < 0:
        raise ValueError(f"`{name}` must be a whole number of at least 0. Received {value!r}.")
    return value


def refuse_other_fingerprints(expected: Any, found: Mapping[str, Any], where: str) -> None:
    """StoreError that names every stated fingerprint that a store does not have."""
    wrong = [
        f"`{key}` is {found.get(key)!r} there, not {item!r}"
        for key, item in stated_fingerprints(expected, "expect").items()
        if found.get(key) != item
    ]
    if wrong:
        raise StoreError(f"{where} is not the store that is expected: {'; '.join(wrong)}.")
