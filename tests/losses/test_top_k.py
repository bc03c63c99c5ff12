"""Divergences from k ids and the mass of the rest: values, bounds, precision, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.data import DenseTargets, PreparedBatch, TopKTargets
from keras_diffusion_opd.losses import DistillationLoss, token_divergence, top_k_divergence
from tests.oracles import DIVERGENCES, compiled, divergence_of, float64_scope, numpy, softmax, tensor, value_and_grad

CASES = json.loads((Path(__file__).parents[1] / "golden" / "sparse_teacher.json").read_text())["cases"]
TAILS = ("bucket", "renormalize")
INF = np.inf
P = [0.5, 0.3, 0.15, 0.05]


def targets_of(p, k, tail="bucket"):
    """One position whose teacher has the probabilities p and gives the first k of them."""
    return TopKTargets(np.arange(k)[None, None], tensor(np.log([[p[:k]]])), tail=tail)


def value(q, targets, divergence="forward_kl"):
    return float(numpy(top_k_divergence(tensor(np.log([[q]])), targets, divergence=divergence))[0, 0])


def batch_of(teacher, weights, ids=None):
    weights = np.asarray(weights, "float32")
    return PreparedBatch.create(
        model_inputs=np.zeros(weights.shape, "int32"),
        target_ids=np.zeros(weights.shape, "int32") if ids is None else ids,
        loss_weights=weights,
        teacher=teacher,
    )


def random_logits(rows, vocabulary, scale, seed):
    return (scale * np.random.default_rng(seed).normal(size=(1, rows, vocabulary))).astype("float32")


@pytest.mark.parametrize("exact", [False, True], ids=["given", "from-logits"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{i}-T{CASES[i]['temperature']}-k{CASES[i]['k']}")
def test_float32_sums_and_gradients(index, tail, exact):
    case, settings = CASES[index], {"temperature": CASES[index]["temperature"], "tail": tail}
    if exact:
        teacher = TopKTargets.from_logits(tensor([case["teacher_logits"]]), case["k"], **settings)
    else:
        teacher = TopKTargets(np.array([case["ids"]]), tensor([case["log_probs"]]), **settings)
    batch = batch_of(teacher, [case["weights"]])
    loss = DistillationLoss(temperature=case["temperature"])
    total, gradient = value_and_grad(lambda s: loss(s, batch).primary.total, tensor([case["student_logits"]]))
    # One id renormalised has no divergence: there the reference is 1e-16 of its own rounding.
    np.testing.assert_allclose(total, case[tail]["total"], rtol=2e-5, atol=1e-12)
    # References are central differences: they round to 1e-9. Float32 rounds relative to the largest entry.
    want = np.array([case[tail]["grad_student_logits"]])
    np.testing.assert_allclose(gradient, want, rtol=2e-5, atol=2e-5 * np.abs(want).max() + 1e-9)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_dense_value_and_retained_mass(index):
    case = CASES[index]
    batch = batch_of(DenseTargets(tensor([case["teacher_logits"]])), [case["weights"]])
    total = DistillationLoss(temperature=case["temperature"])(tensor([case["student_logits"]]), batch).primary.total
    np.testing.assert_allclose(float(numpy(total)), case["dense_total"], rtol=2e-5)
    mass = numpy(TopKTargets(np.array([case["ids"]]), tensor([case["log_probs"]])).retained_mass())[0]
    assert case["retained_mass"] == pytest.approx(np.average(mass, weights=case["weights"]), rel=2e-5)


@pytest.mark.parametrize(
    ("q", "bucket", "renormalized", "full"),
    [
        ([0.6, 0.2, 0.1, 0.1], 0.030479, 0.038098, 0.056641),
        ([0.5, 0.3, 0.02, 0.18], 0.0, 0.0, 0.238189),
        ([0.6, 0.36, 0.02, 0.02], 0.176030, 0.0, 0.202193),
    ],
)
def test_known_values_where_a_truncated_sum_would_be_negative_or_blind(q, bucket, renormalized, full):
    assert value(q, targets_of(P, 2)) == pytest.approx(bucket, abs=1e-6)
    assert value(q, targets_of(P, 2, "renormalize")) == pytest.approx(renormalized, abs=1e-6)
    assert value(q, targets_of(P, 4)) == pytest.approx(full, abs=1e-6)


def test_reverse_kl_of_one_id_of_two_is_the_whole_reverse_kl_with_its_gradient():
    targets = targets_of([0.9, 0.1], 1)
    assert value([0.6, 0.4], targets, "reverse_kl") == pytest.approx(0.311239, abs=1e-6)

    student = tensor(np.log([[[0.6, 0.4]]]))
    _, got = value_and_grad(lambda s: ops.sum(top_k_divergence(s, targets, divergence="reverse_kl")), student)
    teacher = tensor(np.log([[[0.9, 0.1]]]))
    _, want = value_and_grad(lambda s: ops.sum(token_divergence(s, teacher, divergence="reverse_kl")), student)
    assert np.abs(want).min() > 0.4
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_ten_thousand_random_cases_lie_between_zero_and_the_dense_value(divergence):
    for seed, (k, scale) in enumerate([(1, 3.0), (2, 0.1), (5, 10.0), (11, 3.0)]):
        student, teacher = (random_logits(2500, 12, scale, 2 * seed + i) for i in (0, 1))
        dense = numpy(token_divergence(tensor(student), tensor(teacher), divergence=divergence))
        targets = TopKTargets.from_logits(tensor(teacher), k)
        bucket = numpy(top_k_divergence(tensor(student), targets, divergence=divergence))
        # Both are float32 sums of 12 terms that do not cancel; log-probabilities of some -60 round to 4e-6.
        assert bucket.shape == (1, 2500) and bucket.min() >= 0.0
        assert np.all(bucket <= dense * (1 + 2e-5) + 1e-9)
        assert bucket.mean() < dense.mean() or k == 11  # one id is left: it is its own bucket


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_bucket_is_the_divergence_of_k_and_one_events(divergence):
    student, teacher = random_logits(20, 9, 2.0, 0), random_logits(20, 9, 2.0, 1)
    targets = TopKTargets.from_logits(tensor(teacher), 3, temperature=2.0)
    got = numpy(top_k_divergence(tensor(student), targets, divergence=divergence, temperature=2.0))
    ids = numpy(targets.ids)
    events = []
    for logits in (teacher, student):
        chosen = np.take_along_axis(softmax(logits, 2.0), ids, -1)
        events.append(np.concatenate([chosen, 1 - chosen.sum(-1, keepdims=True)], -1))
    np.testing.assert_allclose(got, 4 * divergence_of(divergence, *events), rtol=2e-5)


@pytest.mark.parametrize("tail", TAILS)
def test_k_of_the_whole_vocabulary_is_dense(tail):
    student, teacher = tensor(random_logits(50, 7, 3.0, 0)), tensor(random_logits(50, 7, 3.0, 1))
    exact = TopKTargets.from_logits(teacher, 7, tail=tail)
    given = TopKTargets(exact.ids, exact.log_probs, tail=tail)
    for targets in (exact, given):
        np.testing.assert_allclose(
            numpy(top_k_divergence(student, targets)), numpy(token_divergence(student, teacher)), rtol=1e-5
        )


@pytest.mark.parametrize("log_rest", [-5.0, -20.0, -69.0, -80.0])
def test_tail_of_the_student_has_its_digits_where_one_minus_the_rest_is_zero(log_rest):
    student = np.array([[[0.0, -1.0, log_rest, log_rest - 1.0]]])
    targets = targets_of(P, 2)
    q = softmax(student)[0, 0]
    events = np.array([0.5, 0.3, 0.2]), np.array([q[0], q[1], q[2] + q[3]])
    got, gradient = value_and_grad(lambda s: ops.sum(top_k_divergence(s, targets)), tensor(student))
    assert float(got) == pytest.approx(float(divergence_of("forward_kl", *events)), rel=1e-6)
    # Student minus teacher, whose tail is shared out as the student's.
    want = q - np.array([0.5, 0.3, 0.2 * q[2] / events[1][2], 0.2 * q[3] / events[1][2]])
    np.testing.assert_allclose(gradient[0, 0], want, rtol=2e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_student_equal_to_its_teacher_is_at_exactly_zero(divergence, temperature):
    # Teacher and student go through the same operations here, so that nothing rounds otherwise.
    logits = tensor(random_logits(40, 30, 6.0, 3))
    targets = TopKTargets.from_logits(logits, 4, temperature=temperature)
    values = top_k_divergence(logits, targets, divergence=divergence, temperature=temperature)
    assert np.all(numpy(values) == 0.0)


def test_student_equal_to_its_teacher_compiled_is_at_zero_but_for_squares_of_roundings():
    logits = tensor(random_logits(40, 30, 6.0, 3))
    targets = TopKTargets.from_logits(logits, 4)
    values = compiled(lambda s: top_k_divergence(s, targets))(logits)
    assert numpy(values).max() < 1e-11


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("excluded", [[0], [6, 7], [3, 4, 5, 6, 7]], ids=str)
def test_ids_that_both_exclude_change_nothing(divergence, excluded):
    student, teacher = random_logits(20, 8, 2.0, 0), random_logits(20, 8, 2.0, 1)
    kept = [i for i in range(8) if i not in excluded]
    small = TopKTargets.from_logits(tensor(teacher[..., kept]), 3)

    def of(targets):
        return lambda s: ops.sum(top_k_divergence(s, targets, divergence=divergence))

    want, small_gradient = value_and_grad(of(small), tensor(student[..., kept]))
    student[..., excluded] = teacher[..., excluded] = -INF
    got, gradient = value_and_grad(of(TopKTargets.from_logits(tensor(teacher), 3)), tensor(student))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(gradient[..., kept], small_gradient, rtol=1e-4, atol=1e-6)
    assert np.all(gradient[..., excluded] == 0.0)


def test_more_ids_than_the_teacher_has_are_of_probability_zero():
    teacher = np.array([[[0.0, 1.0, -INF, -INF, -INF]]])
    targets = TopKTargets.from_logits(tensor(teacher), 4)
    assert not numpy(targets.invalid()).any() and numpy(targets.log_tail)[0, 0] == -INF
    student = tensor(random_logits(1, 5, 1.0, 0))
    want = numpy(token_divergence(student, tensor(teacher)))
    np.testing.assert_allclose(numpy(top_k_divergence(student, targets)), want, rtol=1e-6)


@pytest.mark.parametrize(
    ("student", "k"), [([-INF, 0.0, 0.0, 0.0], 2), ([0.0, 0.0, -INF, -INF], 2)], ids=["an-id", "the-tail"]
)
def test_student_without_what_the_teacher_has_is_infinitely_far_with_gradient_zero(student, k):
    got, gradient = value_and_grad(lambda s: ops.sum(top_k_divergence(s, targets_of(P, k))), tensor([[student]]))
    assert got == INF and np.all(gradient == 0.0)
    jsd, gradient = value_and_grad(
        lambda s: ops.sum(top_k_divergence(s, targets_of(P, k), divergence="jsd")), tensor([[student]])
    )
    assert 0.0 < jsd < np.log(2) and np.isfinite(gradient).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradients_of_extreme_logits_are_finite(divergence):
    student, teacher = random_logits(50, 6, 1e4, 0), random_logits(50, 6, 1e4, 1)
    targets = TopKTargets.from_logits(tensor(teacher), 2)
    _, gradient = value_and_grad(
        lambda s: ops.sum(top_k_divergence(s, targets, divergence=divergence)), tensor(student)
    )
    assert np.isfinite(gradient).all()


def test_bfloat16_logits_are_computed_in_float32():
    student = tensor(random_logits(30, 9, 3.0, 0), "bfloat16")
    targets = TopKTargets.from_logits(tensor(random_logits(30, 9, 3.0, 1), "bfloat16"), 3)
    got, gradient = value_and_grad(lambda s: ops.sum(top_k_divergence(s, targets)), student)
    want, exact = value_and_grad(lambda s: ops.sum(top_k_divergence(s, targets)), tensor(numpy(student)))
    assert got.dtype == "float32" and float(got) == pytest.approx(float(want), rel=1e-6)
    np.testing.assert_allclose(gradient, exact, rtol=2**-8, atol=1e-6)


def test_float64_logits_are_computed_in_float64():
    student, teacher = np.random.default_rng(0).normal(size=(2, 1, 20, 9))
    with float64_scope():
        targets = TopKTargets.from_logits(tensor(teacher, "float64"), 9)
        got = numpy(top_k_divergence(tensor(student, "float64"), targets))
    np.testing.assert_allclose(got, divergence_of("forward_kl", softmax(teacher), softmax(student)), rtol=1e-11)


def test_inactive_positions_may_hold_anything():
    student, teacher = random_logits(4, 6, 2.0, 0), random_logits(4, 6, 2.0, 1)
    made = TopKTargets.from_logits(tensor(teacher), 2)
    arrays = {name: numpy(array).copy() for name, array in made.arrays().items()}
    weights = [[1.0, 0.0, 0.5, 0.0]]

    def of(student, arrays, tail):
        batch = batch_of(TopKTargets.from_arrays(arrays, {"temperature": 1.0, "tail": tail}), weights)
        return value_and_grad(lambda s: DistillationLoss()(s, batch).primary.mean(), tensor(student))

    for tail in TAILS:
        clean, gradient = of(student, arrays, tail)
        poisoned = {name: array.copy() for name, array in arrays.items()}
        poisoned["ids"][:, 1::2] = -7
        poisoned["log_probs"][:, 1::2] = poisoned["log_tail"][:, 1::2] = np.nan
        wild = student.copy()
        wild[:, 1::2] = np.nan
        got, poisoned_gradient = of(wild, poisoned, tail)
        assert got == clean and np.array_equal(gradient, poisoned_gradient)
        assert np.all(gradient[:, 1::2] == 0.0) and np.abs(gradient[:, ::2]).max() > 0.0


def test_hard_loss_stays_and_another_teacher_gives_another_loss():
    student = tensor(random_logits(4, 6, 2.0, 0))
    ids, weights = np.array([[1, 0, 5, 2]]), [[1.0, 1.0, 1.0, 1.0]]
    loss = DistillationLoss(soft_weight=0.7, hard_weight=0.3)
    outputs = [
        loss(student, batch_of(TopKTargets.from_logits(tensor(random_logits(4, 6, 2.0, seed)), 2), weights, ids))
        for seed in (1, 2)
    ]
    softs, hards = ([float(numpy(o.metrics[f"distill/{n}_loss"].mean())) for o in outputs] for n in ("soft", "hard"))
    assert hards[0] == hards[1] and abs(softs[0] - softs[1]) > 0.1
    total = float(numpy(outputs[0].primary.mean()))
    assert total == pytest.approx(0.7 * softs[0] + 0.3 * hards[0], rel=1e-6)


def test_another_temperature_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"`temperature` must be 1.0.*Received 2.0.*normaliser.*from_logits"):
        top_k_divergence(tensor(np.zeros((1, 1, 4))), targets_of(P, 2), temperature=2.0)
    with pytest.raises(ValueError, match=r"`temperature` must be 1.0"):
        DistillationLoss(temperature=2.0)(tensor(np.zeros((1, 1, 4))), batch_of(targets_of(P, 2), [[1.0]]))


@pytest.mark.parametrize("divergence", DIVERGENCES[1:])
def test_renormalised_targets_give_forward_kl_alone(divergence):
    with pytest.raises(ValueError, match=rf"must be 'forward_kl'.*Received '{divergence}'.*student's ids"):
        top_k_divergence(tensor(np.zeros((1, 1, 4))), targets_of(P, 2, "renormalize"), divergence=divergence)


def test_reverse_kl_takes_the_teacher_at_the_students_own_ids():
    # The student is sure of id 3, of which the teacher thinks nothing: one event among others for id 0 and 1.
    q = [0.05, 0.05, 0.1, 0.8]
    at_teachers = value(q, targets_of(P, 1), "reverse_kl")
    at_students = value(q, TopKTargets(np.array([[[3]]]), tensor(np.log([[[0.05]]]))), "reverse_kl")
    full = float(divergence_of("reverse_kl", np.array(P), np.array(q)))
    assert at_teachers < 0.7 * full < 0.9 * full < at_students < full


@pytest.mark.parametrize("wrong", [-1, 4])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_id_outside_of_the_vocabulary_is_infinitely_wrong_and_refused_where_it_can_be_read(divergence, wrong):
    targets = TopKTargets(np.array([[[0, wrong]]]), tensor(np.log([[P[:2]]])))
    assert value([0.25] * 4, targets, divergence) == INF
    batch = PreparedBatch(np.zeros((1, 1)), np.zeros((1, 1), "int32"), np.ones((1, 1), "float32"), targets)
    with pytest.raises(ValueError, match=r"active top-k ids must be in \[0, 4\).*at row 0, position 0"):
        DistillationLoss(divergence=divergence)(tensor(np.zeros((1, 1, 4))), batch)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"same positions. Received logits \(1, 2, 4\) and ids \(1, 1, 2\)"):
        top_k_divergence(tensor(np.zeros((1, 2, 4))), targets_of(P, 2))
    with pytest.raises(ValueError, match=r"4 ids a position, more than the student's vocabulary of 3"):
        top_k_divergence(tensor(np.zeros((1, 1, 3))), targets_of(P, 4))
    with pytest.raises(TypeError, match=r"`targets` must be TopKTargets. Received DenseTargets"):
        top_k_divergence(tensor(np.zeros((1, 1, 3))), DenseTargets(np.zeros((1, 1, 3))))
