"""Table, words and picture, for results of any kind."""

import numpy as np
import pytest

from keras_diffusion_opd.demos.tokens.evaluation import Scores
from keras_diffusion_opd.demos.tokens.report import Results, reading, table
from keras_diffusion_opd.demos.tokens.settings import Settings, quick

NAMES = ("hard labels", "distilled", "on-policy", "mixture")


def results(bits, kl=(0.1, 0.1, 0.1, 0.1)):
    """Students whose mean bound and KL are as given; the errors of differences are known."""
    found = Results([{"model": "real scans", "sample_distance": 0.5, "read": 1.0}], {})
    wiggle = np.array([-1.0, 1.0] * 50)
    for i, (name, value, nats) in enumerate(zip(NAMES, bits, kl, strict=True)):
        masks = np.full(100, 32.0)
        found.rows.append({"model": name, "bits_per_pixel": value, "bits_error": 0.01})
        found.bits[name] = value + 0.01 * i * wiggle
        found.own[name] = Scores(masks * (nats + 0.01 * wiggle), masks / 2, masks)
    return found


def test_errors_are_those_of_paired_differences_and_of_ratios():
    found = results([2.0, 1.9, 1.95, 1.92])
    gain, error = found.gain("mixture", "distilled")
    assert gain == pytest.approx(-0.02)
    assert error == pytest.approx(0.02 / np.sqrt(99))  # scans differ by 0.02 either way
    scores = found.own["distilled"]
    assert scores.kl == pytest.approx(0.1)
    assert scores.kl_error == pytest.approx(0.01 / np.sqrt(99))
    assert scores.agreement == 0.5
    assert found.closer("mixture", "distilled")[1] == pytest.approx(np.sqrt(2) * 0.01 / np.sqrt(99))


def test_the_table_is_aligned_and_leaves_unknown_cells_empty():
    lines = table(results([2.0, 1.9, 1.95, 1.92]).rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 7
    assert "2.0000 ± 0.0100" in lines[3]
    assert lines[2].split() == ["real", "scans", "0.500", "1.000"]


def test_the_words_say_what_the_numbers_say():
    text = reading(results([2.0, 1.9, 1.95, 1.9005], kl=(0.1, 0.1, 0.08, 0.1)))
    assert "Against hard labels, the distilled student is 0.1000 bits per pixel better (99.5 standard errors)" in text
    assert "the on-policy student is 0.0500 bits per pixel worse" in text
    assert "0.0200 nats closer to the teacher (14.1 standard errors) on its own samples" in text
    assert "the mixture student is no better or worse within the error (-0.0005 ± 0.0020 bits per pixel)" in text
    assert "on-policy batches do not lower the bound here" in text
    text = reading(results([2.0, 2.1, 1.95, 1.90]))
    assert "the distilled student is 0.1000 bits per pixel worse" in text
    assert "do not lower the bound" not in text


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
