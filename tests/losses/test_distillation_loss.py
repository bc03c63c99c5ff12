"""`DistillationLoss` of a prepared batch: values, gradients, denominators, settings."""

import re

import keras
import numpy as np
import pytest

from keras_diffusion_opd.data import DenseTargets, PreparedBatch, TeacherTargets
from keras_diffusion_opd.losses import DistillationLoss, LossOutput, WeightedSum
from tests.batches import prepared
from tests.oracles import DIVERGENCES, cross_entropy, numerical_gradient, numpy, reference, tensor, value_and_grad

# Every case becomes one shape, so that JAX compiles its operations once: what is added is excluded in both
# models or has weight 0, which is exactly neutral (test_divergence_edges.py, test_inactive_positions.py).
SHAPE = (2, 3, 5)


def embedded(array, fill):
    """`array` in the corner of a (2, 3, 5) or (2, 3) one that holds `fill` elsewhere."""
    array = np.asarray(array)
    whole = np.full(SHAPE[: array.ndim], fill, array.dtype if array.dtype != "float64" else "float32")
    whole[tuple(slice(n) for n in array.shape)] = array
    return whole


def logits_of(array):
    whole = embedded(array, -np.inf)
    whole[..., 0] = np.where(np.isneginf(whole).all(-1), 0.0, whole[..., 0])
    return whole


def case(student, weights, *, teacher=None, ids=None):
    """`(student logits, batch)` of the common shape."""
    batch = prepared(
        embedded(weights, 0),
        ids=None if ids is None else embedded(ids, 0),
        teacher=None if teacher is None else logits_of(teacher),
    )
    return tensor(logits_of(student)), batch


def parts(output):
    """Total, weight and mean of the primary sum, then of each metric."""
    sums = {"primary": output.primary, **output.metrics}
    return {name: tuple(float(numpy(x)) for x in (s.total, s.weight, s.mean())) for name, s in sums.items()}


def mean_and_grad(loss, student, weights, **rest):
    """The mean of a case and its gradient in the case's own shape."""
    logits, batch = case(student, weights, **rest)
    value, gradient = value_and_grad(lambda s: loss(s, batch).primary.mean(), logits)
    own = tuple(slice(n) for n in np.shape(student))
    assert np.isfinite(gradient).all() and np.count_nonzero(gradient) == np.count_nonzero(gradient[own])
    return value, gradient[own]


# ---- values -----------------------------------------------------------------------------------------------


def test_weighted_soft_and_hard_loss_of_two_tokens():
    student, teacher = [[[2.0, -1.0], [-0.5, 0.5]]], [[[-1.0, 2.0], [0.75, -0.75]]]
    loss = DistillationLoss(temperature=2.0, soft_weight=0.75, hard_weight=0.25)
    found = parts(loss(*case(student, [[1.0, 0.5]], ids=[[1, 0]], teacher=teacher)))
    assert found["distill/soft_loss"] == pytest.approx((4.18325242, 1.5, 4.18325242 / 1.5), rel=1e-6)
    assert found["distill/hard_loss"] == pytest.approx((3.70521820, 1.5, 3.70521820 / 1.5), rel=1e-6)
    assert found["primary"] == pytest.approx((4.06374386, 1.5, 2.70916258), rel=1e-6)
    _, gradient = mean_and_grad(loss, student, [[1.0, 0.5]], ids=[[1, 0]], teacher=teacher)
    np.testing.assert_allclose(gradient, [[[0.79391131, -0.79391131], [-0.21174056, 0.21174056]]], rtol=1e-6)


def test_fractional_weights_are_the_denominator_of_loss_and_metric():
    student, teacher = [[[1.0, 0.0], [0.0, 1.0], [2.0, -2.0]]], [[[0.0, 1.0], [0.0, 1.0], [-2.0, 2.0]]]
    found = parts(DistillationLoss()(*case(student, [[2.0, 0.25, 0.0]], teacher=teacher)))
    assert found["primary"] == pytest.approx((0.924234315, 2.25, 0.410770806), rel=1e-6)
    assert found["distill/soft_loss"] == found["primary"]


def test_loss_gradient_norm_and_sgd_step_of_two_tokens():
    student, teacher = np.array([[[1.0, -1.0], [-0.5, 0.5]]]), [[[-1.0, 1.0], [1.0, -1.0]]]
    loss = DistillationLoss(temperature=2.0, soft_weight=0.8, hard_weight=0.2)
    value, gradient = mean_and_grad(loss, student, [[1.0, 0.5]], ids=[[1, 0]], teacher=teacher)
    assert value == pytest.approx(1.63155449, rel=1e-6)
    assert np.linalg.norm(gradient) == pytest.approx(0.926117461, rel=1e-6)
    np.testing.assert_allclose(student - 0.1 * gradient, [[[0.9389635, -0.9389635], [-0.476272, 0.476272]]], atol=1e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_divergence_is_weighted_token_by_token(divergence):
    draw = np.random.default_rng(0)
    student, teacher = draw.normal(size=(2, 3, 4)), draw.normal(size=(2, 3, 4)).astype("float32")
    weights = np.array([[0.3, 0.0, 2.0], [1.0, 0.5, 0.0]])
    loss = DistillationLoss(divergence=divergence, temperature=1.5)
    found = parts(loss(*case(student, weights, teacher=teacher)))
    want = (weights * reference(divergence, student, teacher, 1.5)).sum()
    assert found["primary"] == pytest.approx((want, 3.8, want / 3.8), rel=1e-5)


def test_nothing_is_shifted_between_logits_and_targets():
    student = 8.0 * np.eye(3)[None]
    found = parts(
        DistillationLoss(hard_weight=1.0)(*case(student, [[1.0, 0.5, 0.0]], ids=[[0, 1, 2]], teacher=student))
    )
    assert found["primary"] == pytest.approx((0.00100605043, 1.5, 0.000670700286), rel=1e-4)
    assert found["distill/soft_loss"][0] == 0.0


def test_student_that_equals_its_teacher_has_loss_zero_and_a_shifted_teacher_has_not():
    logits = np.random.default_rng(1).normal(size=SHAPE)
    weights = np.ones((2, 3))
    assert parts(DistillationLoss()(*case(logits, weights, teacher=logits)))["primary"][0] == 0.0
    shifted = np.roll(logits, 1, axis=1)
    assert parts(DistillationLoss()(*case(logits, weights, teacher=shifted)))["primary"][2] > 0.1


def test_changing_the_teacher_changes_the_loss():
    draw = np.random.default_rng(2)
    student, one, other = draw.normal(size=(3, *SHAPE))
    values = [parts(DistillationLoss()(*case(student, np.ones((2, 3)), teacher=t)))["primary"][0] for t in (one, other)]
    assert abs(values[0] - values[1]) > 1e-2


@pytest.mark.parametrize("dtype", ["bool", "int32", "float16", "float32"])
def test_weights_of_any_dtype_count_as_numbers(dtype):
    draw = np.random.default_rng(3)
    student, teacher = draw.normal(size=(2, *SHAPE))
    weights = np.array([[1, 0, 1], [0, 0, 0]]).astype(dtype)
    logits, batch = case(student, weights, teacher=teacher)
    assert batch.loss_weights.dtype == dtype
    found = parts(DistillationLoss()(logits, batch))
    assert found["primary"][1] == 2.0
    assert found["primary"][0] == pytest.approx(reference("forward_kl", student, teacher)[0, [0, 2]].sum(), rel=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_half_precision_logits_are_float32(dtype):
    logits = tensor(np.random.default_rng(4).normal(size=SHAPE), dtype)
    output = DistillationLoss(hard_weight=0.5)(logits, prepared(np.ones((2, 3), "int32"), teacher=logits))
    for part in (output.primary, *output.metrics.values()):
        assert {numpy(x).dtype for x in (*part, part.mean())} == {np.dtype("float32")}


# ---- gradients ----------------------------------------------------------------------------------------------


def test_gradient_is_that_of_the_definition():
    draw = np.random.default_rng(5)
    student, teacher = draw.normal(size=(2, 1, 2, 4))
    weights, ids = np.array([[0.4, 1.5]]), np.array([[3, 1]])
    loss = DistillationLoss(temperature=2.0, soft_weight=0.7, hard_weight=0.3)
    _, gradient = mean_and_grad(loss, student, weights, ids=ids, teacher=teacher)

    def mean(s):
        tokens = 0.7 * reference("forward_kl", s, teacher, 2.0) + 0.3 * cross_entropy(s, ids)
        return (weights * tokens).sum() / weights.sum()

    np.testing.assert_allclose(gradient, numerical_gradient(mean, student), rtol=1e-4, atol=1e-6)


def test_teacher_receives_no_gradient_and_the_student_does():
    student, teacher = np.random.default_rng(6).normal(size=(2, *SHAPE)).astype("float32")
    weights = np.ones((2, 3), "float32")

    def of_teacher(t):
        batch = PreparedBatch(t, np.zeros((2, 3), "int32"), weights, DenseTargets(t))
        return DistillationLoss(hard_weight=0.5)(tensor(student), batch).primary.mean()

    assert not value_and_grad(of_teacher, tensor(teacher))[1].any()
    assert mean_and_grad(DistillationLoss(), student, weights, teacher=teacher)[1].any()


def test_gradient_of_the_sum_divided_by_the_weight_is_the_gradient_of_the_mean():
    student, teacher = np.random.default_rng(7).normal(size=(2, *SHAPE)).astype("float32")
    weights = np.array([[1.5, 0.5, 0.0], [0.25, 0.0, 0.0]], "float32")
    _, of_mean = mean_and_grad(DistillationLoss(), student, weights, teacher=teacher)
    logits, batch = case(student, weights, teacher=teacher)
    _, of_sum = value_and_grad(lambda s: DistillationLoss()(s, batch).primary.total, logits)
    # One rounding of float32, where q and p almost cancel.
    np.testing.assert_allclose(of_sum / 2.25, of_mean, rtol=1e-6, atol=1e-8)
    assert not np.allclose(of_sum, of_mean)


# ---- parts that are switched off ------------------------------------------------------------------------------


def test_soft_loss_of_weight_zero_is_not_evaluated_even_with_a_teacher_of_nan():
    nan = np.full(SHAPE, np.nan, "float32")
    found = parts(DistillationLoss(soft_weight=0.0, hard_weight=1.0)(*case([[[2.0, 0.0]]], [[1.0]], teacher=nan)))
    assert found["primary"][2] == pytest.approx(0.126928011, rel=1e-6)
    assert found["distill/soft_loss"] == (0.0, 1.0, 0.0)


def test_hard_loss_alone_needs_no_teacher():
    found = parts(DistillationLoss(soft_weight=0.0, hard_weight=2.0)(*case(np.zeros((1, 1, 4)), [[3]], ids=[[3]])))
    assert found["primary"] == pytest.approx((6 * np.log(4), 3.0, 2 * np.log(4)), rel=1e-6)
    assert found["distill/hard_loss"][0] == pytest.approx(3 * np.log(4), rel=1e-6)


def test_hard_loss_of_weight_zero_is_reported_as_zero():
    logits = np.random.default_rng(8).normal(size=SHAPE)
    found = parts(DistillationLoss()(*case(logits, [[1, 1]], teacher=logits * 0.5)))
    assert found["distill/hard_loss"] == (0.0, 2.0, 0.0)


def test_output_is_a_loss_output_with_exactly_the_two_named_metrics():
    output = DistillationLoss()(*case(np.zeros(SHAPE), [[1]], teacher=np.zeros(SHAPE)))
    assert isinstance(output, LossOutput) and isinstance(output.primary, WeightedSum)
    assert tuple(output.metrics) == DistillationLoss.metric_names == ("distill/soft_loss", "distill/hard_loss")


# ---- refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["temperature", "soft_weight", "hard_weight", "beta"])
@pytest.mark.parametrize("value", [np.nan, np.inf, True, "1"])
def test_setting_that_is_no_finite_real_is_refused_at_construction(name, value):
    arguments = {"divergence": "jsd", name: value}
    with pytest.raises(ValueError, match=f"`{name}` must be a finite real scalar. Received"):
        DistillationLoss(**arguments)


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_temperature_whose_square_leaves_float32_is_refused_at_construction(temperature):
    with pytest.raises(ValueError, match="`temperature` must be between 1e-06 and 1e"):
        DistillationLoss(temperature=temperature)


@pytest.mark.parametrize("temperature", [0.0, -2.0])
def test_temperature_that_is_not_positive_is_refused_at_construction(temperature):
    with pytest.raises(ValueError, match=f"`temperature` must be positive. Received {temperature}"):
        DistillationLoss(temperature=temperature)


@pytest.mark.parametrize("weights", [(-1.0, 1.0), (1.0, -0.5)])
def test_negative_part_is_refused_at_construction(weights):
    with pytest.raises(ValueError, match=r"`soft_weight` and `hard_weight` must be nonnegative. Received"):
        DistillationLoss(soft_weight=weights[0], hard_weight=weights[1])


def test_loss_without_any_part_is_refused_at_construction():
    with pytest.raises(ValueError, match="At least one of `soft_weight` and `hard_weight` must be positive"):
        DistillationLoss(soft_weight=0.0, hard_weight=0.0)


def test_unknown_divergence_is_refused_at_construction():
    with pytest.raises(ValueError, match="`divergence` must be one of"):
        DistillationLoss(divergence="kl")


@pytest.mark.parametrize("size", [2, 5])
def test_student_and_teacher_of_different_vocabularies_are_refused(size):
    batch = prepared([[1, 1]], teacher=np.zeros((1, 2, size), "float32"))
    words = f"Student and teacher logits must have identical shapes.*(1, 2, 3).*(1, 2, {size}).*fit_vocabulary"
    with pytest.raises(ValueError, match=re.escape(words).replace(re.escape(".*"), ".*")):
        DistillationLoss()(tensor(np.zeros((1, 2, 3))), batch)


def test_misaligned_student_logits_are_refused():
    batch = prepared([[1, 1]], teacher=np.zeros((1, 2, 3), "float32"))
    with pytest.raises(
        ValueError, match=r"`logits` must align with target_ids.*\(1, 2, vocabulary\).*Received \(1, 1, 3\)"
    ):
        DistillationLoss()(tensor(np.zeros((1, 1, 3))), batch)


def test_batch_without_a_teacher_is_refused_with_the_mend():
    with pytest.raises(ValueError, match=r"needs a teacher.*teacher=DenseTargets.*TokenCrossEntropyLoss"):
        DistillationLoss()(tensor(np.zeros((1, 1, 3))), prepared([[1]]))


def test_batch_that_is_no_prepared_batch_is_refused():
    with pytest.raises(TypeError, match=r"`batch` must be a PreparedBatch. Received dict"):
        DistillationLoss()(tensor(np.zeros((1, 1, 3))), {"teacher_logits": np.zeros((1, 1, 3))})


def test_teacher_of_another_kind_is_refused():
    class Other(TeacherTargets):
        def arrays(self):
            return {}

        settings = arrays

        def validate(self, target_ids):
            pass

        def vocabulary_size(self):
            return None

        def invalid(self):
            return np.zeros((1, 1), bool)

    batch = PreparedBatch(np.zeros(1), np.zeros((1, 1), "int32"), np.ones((1, 1)), Other())
    with pytest.raises(TypeError, match=r"DenseTargets, TopKTargets, SampledTargets or HiddenTargets. Received Other"):
        DistillationLoss()(tensor(np.zeros((1, 1, 3))), batch)


@pytest.mark.parametrize("row", [[0.0, np.nan], [np.inf, 0.0], [-np.inf, -np.inf]], ids=str)
def test_active_teacher_that_says_nothing_usable_is_refused_with_its_place(row):
    teacher = np.zeros(SHAPE, "float32")
    teacher[1, 0] = [*row, *row, row[0]]
    with pytest.raises(
        ValueError, match=r"active teacher_logits must contain only finite values.*row 1, position 0 and 0 more"
    ):
        DistillationLoss()(tensor(np.zeros(SHAPE)), prepared(np.ones((2, 3)), teacher=teacher))


# ---- as a Keras object -------------------------------------------------------------------------------------------


def test_config_round_trip_and_serialisation():
    settings = {"divergence": "jsd", "temperature": 2.0, "beta": 0.3, "soft_weight": 0.7, "hard_weight": 0.3}
    loss = DistillationLoss(**settings)
    assert DistillationLoss.from_config(loss.get_config()).get_config() == settings
    back = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(loss))
    assert isinstance(back, DistillationLoss) and back.get_config() == settings
