"""How slowly the old policy follows: the two schedules of the paper."""

import numpy as np
import pytest

from keras_diffusion_opd.schedules import OldPolicyDecay, get_old_policy_decay


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("on_policy", lambda step: 0.0),
        ("type1", lambda step: min(0.001 * step, 0.5)),
        ("type2", lambda step: 0.0 if step < 75 else min(0.0075 * (step - 75), 0.999)),
    ],
)
def test_decay_by_name_is_that_of_the_paper(name: str, formula) -> None:
    decay = get_old_policy_decay(name)
    steps = [0, 1, 74, 75, 76, 208, 209, 500, 501, 10_000]
    np.testing.assert_allclose([decay(step) for step in steps], [formula(step) for step in steps], rtol=1e-15)


def test_config_round_trip_and_objects_as_they_are() -> None:
    decay = OldPolicyDecay(0.01, 0.9, start=5)
    assert OldPolicyDecay.from_config(decay.get_config())(20) == decay(20) == pytest.approx(0.15)
    assert get_old_policy_decay(decay) is decay


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OldPolicyDecay(-0.1, 0.5), "`slope` must be at least 0"),
        (lambda: OldPolicyDecay(0.1, 1.0), r"`limit` must lie in \[0, 1\)"),
        (lambda: OldPolicyDecay(0.1, 0.5, start=-1), "`start` must be at least 0"),
        (lambda: get_old_policy_decay("type3"), r"`decay` must be one of \['on_policy', 'type1', 'type2'\]"),
        (lambda: OldPolicyDecay(0.1, 0.5)(-1), "`step` must be at least 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
