"""Half precision: scaled, summed in float32, or refused where it could not move."""

import keras
import numpy as np
import pytest

from tests.students import (
    fit,
    largest_difference,
    make_batches,
    make_student,
    make_trainer,
    optimizer_state,
    weights_of,
)


def moved(trainer, batches, **arguments):
    start = weights_of(trainer.student)
    fit(trainer, batches, **arguments)
    return [new - old for new, old in zip(weights_of(trainer.student), start, strict=True)]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("k", [1, 4])
def test_mixed_precision_moves_as_float32_does(policy, k):
    batches = make_batches([(2, 6)] * 4)
    exact = moved(make_trainer(accumulation_steps=k), batches)
    trainer = make_trainer(make_student(dtype=policy), accumulation_steps=k)
    mixed = moved(trainer, batches)
    flat = [np.concatenate([x.ravel() for x in part]) for part in (exact, mixed)]
    # bfloat16 has 8 bits: a relative error of about 1 % in the direction is its rounding.
    assert np.linalg.norm(flat[1] - flat[0]) < 0.03 * np.linalg.norm(flat[0])
    assert trainer.policy_version == 4 // k
    scaled = isinstance(trainer.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")


def test_float16_window_of_large_weights_is_not_skipped():
    batches = [
        b.map(lambda a: a * 100 if a.dtype == np.float32 and a.ndim == 2 else a) for b in make_batches([(4, 32)])
    ]
    trainer = make_trainer(make_student(dtype="mixed_float16"), optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    step = moved(trainer, batches)
    assert max(np.abs(s).max() for s in step) > 0


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Nadam", "Adamax", "Lamb"])
def test_bfloat16_variables_with_a_decay_that_rounds_to_one_are_refused_with_the_mend(name):
    trainer = make_trainer(make_student(dtype="bfloat16"), optimizer=getattr(keras.optimizers, name)(1e-2))
    before = weights_of(trainer.student)
    with pytest.raises(ValueError, match=r"beta_2=0\.999.*rounds to 1.*mixed_bfloat16"):
        fit(trainer, make_batches([(2, 6)]))
    assert largest_difference(before, weights_of(trainer.student)) == 0


@pytest.mark.parametrize("k", [1, 2])
def test_bfloat16_variables_move_with_a_decay_that_bfloat16_can_hold_and_moments_stay_bfloat16(k):
    trainer = make_trainer(
        make_student(dtype="bfloat16"), optimizer=keras.optimizers.Adam(1e-2, beta_2=0.99), accumulation_steps=k
    )
    step = moved(trainer, make_batches([(2, 6)] * 2))
    assert all(np.abs(s).max() > 1e-3 for s in step)
    dtypes = {v.path.rsplit("/", 1)[-1]: keras.backend.standardize_dtype(v.dtype) for v in trainer.optimizer.variables}
    moments = [d for name, d in dtypes.items() if "momentum" in name or "velocity" in name]
    assert moments and set(moments) == {"bfloat16"}
    assert {keras.backend.standardize_dtype(v.dtype) for v in trainer.student.variables} == {"bfloat16"}


def test_float32_optimizer_state_stays_float32():
    trainer = make_trainer(optimizer=keras.optimizers.AdamW(1e-2), accumulation_steps=2)
    fit(trainer, make_batches([(2, 6)] * 2))
    floats = {keras.backend.standardize_dtype(v.dtype) for v in trainer.optimizer.variables} - {"int32", "int64"}
    assert floats == {"float32"}
    assert all(np.all(np.isfinite(s)) for s in optimizer_state(trainer))


def test_bfloat16_gradients_are_summed_in_float32():
    # 256 equal micro-batches: summed in bfloat16 the sum would stop growing at 256 times one step's last bit.
    one = make_batches([(2, 6)])
    k = 64
    single = moved(make_trainer(make_student(dtype="mixed_bfloat16")), one)
    many = moved(make_trainer(make_student(dtype="mixed_bfloat16"), accumulation_steps=k), one * k)
    assert largest_difference(single, many) < 1e-6 * max(np.abs(s).max() for s in single) + 1e-7
