"""Masked sampling: exact distributions, order, independence of rows, one trace."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.backend import BACKEND, compiled
from keras_diffusion_opd.samplers import MaskedSampler
from keras_diffusion_opd.samplers.row_noise import row_keys
from keras_diffusion_opd.schedules import CosineMaskSchedule

MASK = 4
LENGTH = 6


@keras.saving.register_keras_serializable(package="tests")
class Table(keras.layers.Layer):
    """Logits that depend on the position, the class and the tokens already there."""

    def __init__(self, scale=1.0):
        super().__init__()
        rng = np.random.default_rng(0)
        self.weight = self.add_weight(shape=(LENGTH, 4), name="weight")
        self.weight.assign(scale * rng.normal(size=(LENGTH, 4)))
        self.mixing = rng.normal(size=(5, 4)).astype("float32")
        self.calls = 0
        self.built = True

    def call(self, inputs):
        self.calls += 1
        seen = ops.sum(ops.take(ops.convert_to_tensor(self.mixing), inputs["token_ids"], axis=0), axis=1)
        classes = ops.cast(inputs["class_ids"], "float32")
        return self.weight + ops.expand_dims(seen * 0.1, 1) + ops.reshape(classes, (-1, 1, 1)) * 0.1


class Constant(keras.layers.Layer):
    """The same logits whatever it sees; as if there were no context."""

    def __init__(self, logits):
        super().__init__()
        self.logits = np.asarray(logits, "float32")

    def call(self, inputs):
        rows = ops.shape(inputs["token_ids"])[0]
        return ops.broadcast_to(ops.convert_to_tensor(self.logits), (rows, *self.logits.shape))


def classes(rows):
    return {"class_ids": np.arange(rows) % 3}


orders = pytest.mark.parametrize("order", ["random", "confidence", "margin"])


@orders
@pytest.mark.parametrize("steps", [1, 4, 6, 11])
def test_nothing_is_masked_at_the_end(order, steps):
    sampler = MaskedSampler(MASK, order=order)
    out = sampler.sample(Table(), shape=(5, LENGTH), steps=steps, seed=0, conditions=classes(5))
    assert out.dtype == np.int32
    assert out.shape == (5, LENGTH)
    assert out.min() >= 0
    assert out.max() < MASK


@orders
def test_every_step_leaves_as_many_masked_as_the_schedule_says(order):
    sampler, seen = MaskedSampler(MASK, order=order, schedule="cosine"), []
    sampler.sample(
        Table(),
        shape=(3, LENGTH),
        steps=4,
        seed=0,
        conditions=classes(3),
        callback=lambda step, steps, tokens: seen.append((step, steps, (tokens == MASK).sum(axis=1).tolist())),
    )
    left = [int(CosineMaskSchedule().masked_left(LENGTH, k / 4)) for k in range(1, 5)]
    assert seen == [(k + 1, 4, [left[k]] * 3) for k in range(4)]


@orders
def test_a_row_does_not_depend_on_the_other_rows_nor_on_the_batch(order):
    sampler, model = MaskedSampler(MASK, order=order), Table()
    own = np.array([11, 12, 13, 14])
    kwargs = {"steps": 3, "batch_size": 4}
    whole = sampler.sample(model, shape=(4, LENGTH), seed=own, conditions=classes(4), **kwargs)
    flipped = sampler.sample(
        model,
        shape=(4, LENGTH),
        seed=own[::-1],
        conditions={"class_ids": classes(4)["class_ids"][::-1]},
        **kwargs,
    )
    assert np.array_equal(whole, flipped[::-1])
    numbered = sampler.sample(model, shape=(10, LENGTH), seed=5, conditions=classes(10), **kwargs)
    fewer = sampler.sample(model, shape=(7, LENGTH), seed=5, conditions=classes(7), **kwargs)
    assert np.array_equal(numbered[:7], fewer)
    assert not np.array_equal(numbered[0], numbered[3])


def test_independent_positions_are_sampled_from_the_softmax():
    logits = np.random.default_rng(1).normal(size=(LENGTH, MASK))
    rows = 4000
    out = MaskedSampler(MASK).sample(Constant(logits), shape=(rows, LENGTH), steps=3, seed=2)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    share = np.stack([(out == v).mean(axis=0) for v in range(MASK)], axis=-1)
    assert np.all(np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / rows))  # five standard errors


def test_one_token_per_step_samples_a_dependent_pair_exactly():
    # Token 1 copies token 0 (and the reverse): (0,0) and (1,1) only, whichever is revealed first.
    def copy(inputs):
        tokens = inputs["token_ids"]
        other = ops.flip(tokens, axis=1)
        bias = ops.stack([ops.equal(other, 0), ops.equal(other, 1)], axis=-1)
        return 60.0 * ops.cast(bias, "float32") + ops.convert_to_tensor(np.array([0.0, 1.0], "float32"))

    out = MaskedSampler(MASK).sample(copy, shape=(3000, 2), steps=2, seed=0)
    assert np.array_equal(out[:, 0], out[:, 1])
    p = 1 / (1 + np.exp(-1))
    assert abs(out[:, 0].mean() - p) < 5 * np.sqrt(p * (1 - p) / 3000)
    # All at once the two are independent, and half of the pairs disagree about it.
    at_once = MaskedSampler(MASK).sample(copy, shape=(3000, 2), steps=1, seed=0)
    assert abs((at_once[:, 0] != at_once[:, 1]).mean() - 2 * p * (1 - p)) < 0.05


def test_temperature_zero_takes_the_best_token_and_temperature_sharpens():
    logits = np.random.default_rng(1).normal(size=(LENGTH, MASK))
    sampler, model = MaskedSampler(MASK), Constant(logits)
    cold = sampler.sample(model, shape=(3, LENGTH), steps=2, seed=0, temperature=0.0)
    assert np.array_equal(cold, np.tile(logits.argmax(-1), (3, 1)))
    rows = 3000
    out = sampler.sample(model, shape=(rows, LENGTH), steps=2, seed=0, temperature=np.full(rows, 0.5))
    p = np.exp(2 * logits) / np.exp(2 * logits).sum(-1, keepdims=True)
    share = np.stack([(out == v).mean(axis=0) for v in range(MASK)], axis=-1)
    assert np.all(np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / rows))


@pytest.mark.parametrize("order", ["confidence", "margin"])
def test_the_surest_positions_come_first(order):
    scale = np.array([0.0, 5.0, 1.0, 4.0, 2.0, 3.0])[:, None]
    model, seen = Constant(scale * np.array([1.0, 0.0, 0.0, 0.0])), []
    MaskedSampler(MASK, order=order, order_noise=0.0).sample(
        model,
        shape=(1, LENGTH),
        steps=LENGTH,
        seed=0,
        temperature=0.0,
        callback=lambda step, steps, tokens: seen.append(np.flatnonzero(tokens[0] != MASK).tolist()),
    )
    first = [sorted(set(now) - set(before)) for before, now in zip([[], *seen], seen, strict=False)]
    assert first == [[1], [3], [5], [4], [2], [0]]


def test_random_order_is_uniform_over_positions():
    firsts = []
    MaskedSampler(MASK).sample(
        Constant(np.zeros((LENGTH, MASK))),
        shape=(3000, LENGTH),
        steps=LENGTH,
        seed=4,
        callback=lambda step, steps, tokens: firsts.append(tokens != MASK) if step == 1 else None,
    )
    share = firsts[0].mean(axis=0)
    assert np.all(np.abs(share - 1 / 6) < 5 * np.sqrt(5 / 36 / 3000))


def test_the_long_and_the_short_way_to_rank_agree(monkeypatch):
    arguments = {"shape": (4, LENGTH), "steps": 3, "seed": 1, "conditions": classes(4)}
    short = MaskedSampler(MASK, order="confidence").sample(Table(), **arguments)
    monkeypatch.setattr("keras_diffusion_opd.samplers.revealing.PAIRWISE_LENGTH", 0)
    assert np.array_equal(MaskedSampler(MASK, order="confidence").sample(Table(), **arguments), short)


def test_what_is_there_already_stays():
    given = np.full((3, LENGTH), MASK)
    given[:, :2] = [[3, 2], [1, 1], [0, 3]]
    given[2] = 1  # nothing to fill in
    out = MaskedSampler(MASK).sample(Table(), shape=(3, LENGTH), steps=4, seed=0, tokens=given, conditions=classes(3))
    assert np.array_equal(out[:, :2], given[:, :2])
    assert np.array_equal(out[2], given[2])
    assert out.max() < MASK


def test_the_mask_is_never_drawn_even_if_scored():
    logits = np.zeros((LENGTH, MASK + 1))
    logits[:, MASK] = 50.0
    out = MaskedSampler(MASK).sample(Constant(logits), shape=(4, LENGTH), steps=2, seed=0)
    assert out.max() < MASK


@pytest.mark.skipif(BACKEND == "torch", reason="torch runs eagerly: there is no trace to count")
def test_one_trace_serves_every_step_count_schedule_temperature_and_seed():
    sampler, model = MaskedSampler(MASK), Table()
    for steps, schedule, temperature, seed in [
        (2, None, 1.0, 0),
        (7, "cosine", 0.5, 1),
        (1, "linear", 0.0, 2),
    ]:
        sampler.sample(
            model,
            shape=(4, LENGTH),
            steps=steps,
            seed=seed,
            conditions=classes(4),
            schedule=schedule,
            temperature=temperature,
        )
    assert model.calls == 1


def test_new_weights_are_seen_without_a_new_program():
    sampler, model = MaskedSampler(MASK), Table(scale=10.0)
    arguments = {"shape": (2, LENGTH), "steps": 2, "seed": 0, "conditions": classes(2), "temperature": 0.0}
    before = sampler.sample(model, **arguments)
    model.weight.assign(-model.weight)
    after = sampler.sample(model, **arguments)
    assert not np.array_equal(before, after)
    assert np.array_equal(after, MaskedSampler(MASK).sample(model, **arguments))


def test_steps_can_be_driven_by_hand():
    sampler, model = MaskedSampler(MASK), Table()
    whole = sampler.sample(model, shape=(2, LENGTH), steps=3, seed=9, conditions=classes(2))
    state = {k: ops.convert_to_tensor(v) for k, v in sampler.init(np.full((2, LENGTH), MASK), row_keys(9, 2)).items()}
    ones = ops.ones((2,), "float32")
    advance = compiled(sampler.advance)
    for left in sampler.plan(np.full((2, LENGTH), MASK), 3):
        logits = model(sampler.inputs(state, {k: ops.convert_to_tensor(v) for k, v in classes(2).items()}))
        state = advance(state, logits, ops.convert_to_tensor(left), ones, ones)
    assert np.array_equal(sampler.finalize(state), whole)


def test_the_sampler_survives_serialisation():
    sampler = MaskedSampler(MASK, schedule=CosineMaskSchedule(eps=0.01), order="margin", order_noise=0.5)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(sampler))
    arguments = {"shape": (2, LENGTH), "steps": 3, "seed": 0, "conditions": classes(2)}
    assert np.array_equal(again.sample(Table(), **arguments), sampler.sample(Table(), **arguments))


def test_a_denoiser_that_gives_nan_is_reported():
    logits = np.zeros((LENGTH, MASK))
    logits[3, 1] = np.nan
    with pytest.raises(ValueError, match="not a distribution"):
        MaskedSampler(MASK).sample(Constant(logits), shape=(2, LENGTH), steps=2, seed=0)


def test_errors_name_the_argument():
    sampler, arguments = MaskedSampler(MASK), {"shape": (2, LENGTH), "steps": 2, "seed": 0}
    with pytest.raises(ValueError, match="`order` must be one of"):
        MaskedSampler(MASK, order="best")
    with pytest.raises(ValueError, match="`order_noise`"):
        MaskedSampler(MASK, order_noise=-1.0)
    with pytest.raises(ValueError, match="`steps`"):
        sampler.sample(Table(), **{**arguments, "steps": 0})
    with pytest.raises(ValueError, match="`shape` must be"):
        sampler.sample(Table(), **{**arguments, "shape": (2, 3, 4)})
    with pytest.raises(ValueError, match="`temperature`"):
        sampler.sample(Table(), **arguments, temperature=-0.5)
    with pytest.raises(ValueError, match="`tokens` must be integers of shape"):
        sampler.sample(Table(), **arguments, tokens=np.zeros((2, 3), "int32"))
    with pytest.raises(ValueError, match=r"`conditions\['class_ids'\]` must have 2 rows"):
        sampler.sample(Table(), **arguments, conditions=classes(3))
    with pytest.raises(TypeError, match="`denoiser` must be"):
        sampler.sample(None, **arguments)
    with pytest.raises(ValueError, match="need a `token_key`"):
        MaskedSampler(MASK, token_key=None).sample(Table(), **arguments, conditions=classes(2))


def test_what_used_to_fail_far_from_its_cause_is_named_before_anything_runs():
    sampler, arguments, model = MaskedSampler(MASK), {"shape": (2, LENGTH), "steps": 2, "seed": 0}, Table()
    for wrong in (5, (LENGTH,), "ab"):
        with pytest.raises(ValueError, match=r"`shape` (must be \(rows, length\)|\[0\])"):
            sampler.sample(model, **{**arguments, "shape": wrong})
    with pytest.raises(TypeError, match=r"`callback` must be None or a function \(step, steps, tokens\). Received 3"):
        sampler.sample(model, **arguments, conditions=classes(2), callback=3)
    with pytest.raises(ValueError, match="`mask_id` must be a whole number. Received 'a'"):
        MaskedSampler("a")
    with pytest.raises(ValueError, match="`mask_id` must be at least 0. Received -1"):
        MaskedSampler(-1)
    with pytest.raises(ValueError, match="`temperature` must be one number, or 2"):
        sampler.sample(model, **arguments, conditions=classes(2), temperature=np.ones(3))
    with pytest.raises(ValueError, match="`tokens` must have a dtype that holds the mask id 300.*int8"):
        MaskedSampler(300).sample(model, **arguments, conditions=classes(2), tokens=np.zeros((2, LENGTH), "int8"))
    with pytest.raises(ValueError, match="`tokens` must be at least 0. Received -1"):
        sampler.sample(model, **arguments, conditions=classes(2), tokens=np.full((2, LENGTH), -1))
    with pytest.raises(TypeError, match="`conditions` must be None or a dict"):
        sampler.sample(model, **arguments, conditions=[1, 2])
    with pytest.raises(ValueError, match="`conditions` must not hold 'token_ids'"):
        sampler.sample(model, **arguments, conditions={"token_ids": np.zeros((2, LENGTH))})
    with pytest.raises(TypeError, match="`denoiser` must be a Keras model or layer.*Received <class"):
        sampler.sample(Table, **arguments)
    assert model.calls == 0


@pytest.mark.parametrize(
    "output, error, words",
    [
        (
            lambda x: ops.zeros((2, LENGTH), "float32"),
            ValueError,
            r"here \(2, 6, vocabulary\).*Received shape \(2, 6\)",
        ),
        (lambda x: ops.zeros((2, LENGTH + 1, 4), "float32"), ValueError, r"Received shape \(2, 7, 4\)"),
        (lambda x: ops.zeros((1, LENGTH, 4), "float32"), ValueError, r"Received shape \(1, 6, 4\)"),
        (lambda x: ops.zeros((2, LENGTH, 4), "int32"), TypeError, "floating dtype. Received int32"),
        (lambda x: {"logits": ops.zeros((2, LENGTH, 4))}, TypeError, "one tensor. Received dict"),
    ],
)
def test_a_denoiser_that_gives_something_else_than_logits_is_named(output, error, words):
    with pytest.raises(error, match="`denoiser` must give logits of shape .*" + words):
        MaskedSampler(MASK).sample(output, shape=(2, LENGTH), steps=1, seed=0)
