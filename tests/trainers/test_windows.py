"""k micro-batches of any size, length and weight are one batch."""

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from tests.students import (
    fit,
    largest_difference,
    make_batches,
    make_student,
    make_trainer,
    optimizer_state,
    same_bits,
    train_reference,
    weights_of,
)

# One shape, so that eager JAX compiles its operations once; the weights span four decades.
UNEVEN = [(2, 6)] * 8
# Up to eight updates in float32 from sums taken in another order; AdamW divides by small moments, which
# turns a last bit of a gradient into some 1e-6 of a step of 1e-2.
CLOSE = 5e-6


# Many shapes: JAX is faster compiled, the others eager.
JIT = keras.backend.backend() == "jax"


def adamw():
    return keras.optimizers.AdamW(1e-2, weight_decay=0.01, global_clipnorm=1.0)


def loss():
    return kdo.losses.DistillationLoss(temperature=2.0, soft_weight=0.7, hard_weight=0.3)


def windows(batches, k):
    return [batches[i : i + k] for i in range(0, len(batches), k)]


@pytest.mark.parametrize("k", [1, 3, 4, 8])
def test_windows_of_k_micro_batches_equal_whole_windows_with_decay_and_clipping(k):
    batches = make_batches(UNEVEN)
    expected = make_student()
    losses = train_reference(expected, loss(), adamw(), windows(batches, k))
    trainer = make_trainer(loss=loss(), optimizer=adamw(), accumulation_steps=k)
    history = fit(trainer, batches)
    assert largest_difference(weights_of(trainer.student), weights_of(expected)) < CLOSE
    weight = [sum(float(np.sum(b.loss_weights)) for b in window) for window in windows(batches, k)]
    assert history.history["loss"][0] == pytest.approx(np.dot(losses, weight) / np.sum(weight), rel=1e-5)
    assert trainer.policy_version == -(-len(batches) // k)


def test_micro_batches_of_different_length_and_size_equal_one_window():
    batches = make_batches([(2, 6), (1, 9), (4, 1), (2, 6)])
    expected = make_student()
    train_reference(expected, loss(), adamw(), windows(batches, 3))
    trainer = make_trainer(loss=loss(), optimizer=adamw(), accumulation_steps=3, run_eagerly=not JIT, jit_compile=JIT)
    fit(trainer, batches)
    assert largest_difference(weights_of(trainer.student), weights_of(expected)) < 1e-5


def test_windows_never_cross_an_epoch():
    batches = make_batches([(2, 6)] * 5)
    expected = make_student()
    train_reference(expected, loss(), adamw(), windows(batches, 2) * 2)
    trainer = make_trainer(loss=loss(), optimizer=adamw(), accumulation_steps=2)
    fit(trainer, batches, epochs=2)
    assert trainer.policy_version == 6
    assert int(keras.ops.convert_to_numpy(trainer.optimizer.iterations)) == 6
    assert largest_difference(weights_of(trainer.student), weights_of(expected)) < CLOSE


def test_gradient_of_four_micro_batches_is_not_four_times_too_long():
    batches = make_batches([(1, 6)] * 4)
    one = make_trainer(run_eagerly=not JIT, jit_compile=JIT)
    fit(one, [kdo.data.concatenate_batches(batches)])
    four = make_trainer(accumulation_steps=4)
    fit(four, batches)
    start = weights_of(make_student())
    steps = [
        np.concatenate([(w - s).ravel() for w, s in zip(weights_of(t.student), start, strict=True)])
        for t in (one, four)
    ]
    ratio = np.linalg.norm(steps[1]) / np.linalg.norm(steps[0])
    assert ratio == pytest.approx(1.0, abs=1e-5)


def test_two_windows_of_unequal_token_counts_each_equal_a_fresh_run():
    big, small = make_batches([(2, 6)] * 2)
    small = small.map(np.copy)
    small.loss_weights[1:] = 0  # a window with far fewer tokens
    both = make_trainer()
    fit(both, [big, small])
    fresh = make_trainer()
    fit(fresh, [big])
    fit(fresh, [small])
    assert same_bits(weights_of(both.student), weights_of(fresh.student))


@pytest.mark.parametrize("k", [1, 2])
def test_nan_and_wrong_ids_at_weight_zero_change_no_bit(k):
    clean, poisoned = make_batches(UNEVEN[:4]), make_batches(UNEVEN[:4], poison=True)
    trainers = [make_trainer(optimizer=adamw(), accumulation_steps=k) for _ in range(2)]
    histories = [fit(t, b) for t, b in zip(trainers, (clean, poisoned), strict=True)]
    assert same_bits(weights_of(trainers[0].student), weights_of(trainers[1].student))
    assert histories[0].history == histories[1].history


@pytest.mark.parametrize("k", [1, 2])
def test_window_of_weight_zero_moves_nothing_by_default(k):
    trainer = make_trainer(optimizer=adamw(), accumulation_steps=k)
    fit(trainer, make_batches([(2, 6)] * 2))
    before, state = weights_of(trainer.student), optimizer_state(trainer)
    history = fit(trainer, make_batches([(2, 6)] * 2, seed=5, zero=(0, 1)))
    assert history.history["loss"] == [0.0]
    assert same_bits(before, weights_of(trainer.student))
    assert same_bits(state, optimizer_state(trainer))


def test_window_of_weight_zero_decays_and_counts_when_asked_to():
    trainer = make_trainer(optimizer=keras.optimizers.AdamW(1e-2, weight_decay=0.1), on_empty="zero_grad")
    before = weights_of(trainer.student)
    history = fit(trainer, make_batches([(2, 6)], zero=(0,)))
    assert history.history["loss"] == [0.0]
    assert int(keras.ops.convert_to_numpy(trainer.optimizer.iterations)) == 1
    for old, new in zip(before, weights_of(trainer.student), strict=True):
        np.testing.assert_allclose(new, old * (1 - 1e-2 * 0.1), rtol=1e-6)


def test_micro_batch_of_weight_zero_inside_a_window_adds_nothing():
    batches = make_batches([(2, 6)] * 3, zero=(1,))
    with_empty = make_trainer(accumulation_steps=3)
    fit(with_empty, batches)
    without = make_trainer(accumulation_steps=2)
    fit(without, [batches[0], batches[2]])
    assert largest_difference(weights_of(with_empty.student), weights_of(without.student)) < CLOSE


def test_regularisers_and_added_losses_count_once_however_many_micro_batches():
    batches = make_batches(UNEVEN[:4])
    trainers = []
    for parts, k in (([kdo.data.concatenate_batches(batches)], 1), (batches, 4)):
        trainer = make_trainer(
            make_student(regularizer=keras.regularizers.L2(0.1)),
            accumulation_steps=k,
            run_eagerly=not JIT,
            jit_compile=JIT,
        )
        history = fit(trainer, parts)
        trainers.append((trainer, history.history["loss"][0]))
    assert trainers[0][1] == pytest.approx(trainers[1][1], rel=1e-6)
    assert largest_difference(weights_of(trainers[0][0].student), weights_of(trainers[1][0].student)) < CLOSE
    plain = make_trainer(run_eagerly=not JIT, jit_compile=JIT)
    plain_loss = fit(plain, [kdo.data.concatenate_batches(batches)]).history["loss"][0]
    kernel = make_student().get_layer("hidden").get_weights()[0]
    assert trainers[0][1] - plain_loss == pytest.approx(0.1 * float(np.sum(kernel**2)), rel=1e-4)


def test_learning_rate_schedule_and_ema_advance_once_per_window():
    class Recorded(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return keras.ops.where(step < 1, 0.1, 0.0)

        def get_config(self):
            return {}

    batches = make_batches([(2, 6)] * 4)
    trainer = make_trainer(optimizer=keras.optimizers.SGD(Recorded()), accumulation_steps=2)
    fit(trainer, batches)
    once = make_trainer(accumulation_steps=2)
    fit(once, batches[:2])
    # The second window runs at rate 0. Counted per micro-batch, the first window's rate would be 0 already.
    assert same_bits(weights_of(trainer.student), weights_of(once.student))

    averaged = make_trainer(optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), accumulation_steps=2)
    start = weights_of(averaged.student)
    fit(averaged, batches[:2])
    ends = weights_of(once.student)
    # Keras starts the average at 0 and uses it as is: after one update 0.5 * 0 + 0.5 * w, or it starts at w0.
    moving = [np.array(keras.ops.convert_to_numpy(v.value)) for v in averaged.optimizer._model_variables_moving_average]
    for average, first, last in zip(moving, start, ends, strict=True):
        candidates = (0.5 * last, 0.5 * first + 0.5 * last, last)
        assert min(np.abs(average - c).max() for c in candidates) < 1e-6


OPTIMIZERS = [
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "Nadam",
    "Lion",
    "Lamb",
    "Adafactor",
    "Ftrl",
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_keras_optimizer_takes_the_whole_window(name):
    batches = make_batches([(2, 6)] * 2)
    expected = make_student()
    optimizer = getattr(keras.optimizers, name)
    train_reference(expected, loss(), optimizer(learning_rate=1e-2), [batches])
    trainer = make_trainer(loss=loss(), optimizer=optimizer(learning_rate=1e-2), accumulation_steps=2)
    fit(trainer, batches)
    before = weights_of(make_student())
    assert largest_difference(weights_of(trainer.student), before) > 1e-6
    # Sign-like first steps (Adam, Lion) amplify the last bit of gradients that are nearly 0.
    assert largest_difference(weights_of(trainer.student), weights_of(expected)) < 2e-4
