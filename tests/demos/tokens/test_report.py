"""Table, words and picture, for results of any kind."""

import pytest

from keras_diffusion_opd.demos.tokens.report import Results, reading, table
from keras_diffusion_opd.demos.tokens.settings import Settings, quick

NAMES = ("hard labels", "distilled", "on-policy", "mixture")


def results(bits):
    rows = [{"model": "real scans", "sample_distance": 0.5, "read": 1.0}]
    for name, value in zip(NAMES, bits, strict=True):
        rows.append({"model": name, "bits_per_pixel": value, "bits_error": 0.01, "kl_own_samples": value / 10})
    gains = {name: (bits[0] - value, 0.002) for name, value in zip(NAMES, bits, strict=True)}
    return Results(rows, {}, {}, gains)


def test_the_table_is_aligned_and_leaves_unknown_cells_empty():
    lines = table(results([2.0, 1.9, 1.95, 1.92]).rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 7
    assert "2.0000 ± 0.0100" in lines[3]
    assert lines[2].split() == ["real", "scans", "0.500", "1.000"]


def test_the_words_say_what_the_numbers_say():
    text = reading(results([2.0, 1.9, 1.95, 1.92]))
    assert "0.1000 bits per pixel better than the one trained on hard labels (50.0 standard errors" in text
    assert "the on-policy student is 0.0500 bits per pixel worse" in text
    assert "on-policy training adds nothing to the bound" in text
    text = reading(results([2.0, 2.1, 1.95, 1.90]))
    assert "0.1000 bits per pixel worse than the one trained on hard labels" in text
    assert "The lowest bound is that of the mixture student." in text


def test_the_small_size_is_small_and_says_so():
    small = quick(Settings(seed=3))
    assert small.quick
    assert small.seed == 3
    assert small.teacher.updates * 10 < Settings().teacher.updates


def test_settings_are_checked_before_anything_is_done():
    with pytest.raises(ValueError, match="`seed` must be a whole number"):
        Settings(seed=-1)
    with pytest.raises(ValueError, match="`epochs`"):
        Settings(epochs=0)
    with pytest.raises(ValueError, match=r"`teacher\.updates` must be a multiple of the 7 epochs"):
        Settings(epochs=7)
