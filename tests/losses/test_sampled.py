"""Forward KL from drawn ids: unbiased where a naive top-k is not, and what its value is."""

import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.data import DenseTargets, PreparedBatch, SampledTargets, TopKTargets
from keras_diffusion_opd.losses import DistillationLoss, sampled_divergence, token_divergence
from tests.oracles import DIVERGENCES, compiled_value_and_grad, float64_scope, numpy, softmax, tensor, value_and_grad

P = np.array([0.5, 0.3, 0.15, 0.05])
Q = np.array([0.6, 0.2, 0.1, 0.1])
INF = np.inf


def batch_of(teacher, weights):
    weights = np.asarray(weights, "float32")
    ids = np.zeros(weights.shape, "int32")
    return PreparedBatch.create(model_inputs=ids, target_ids=ids, loss_weights=weights, teacher=teacher)


def gradients(targets, logits):
    """The gradient at every position, (B, L, V)."""
    t = targets.temperature
    return value_and_grad(lambda s: ops.sum(sampled_divergence(s, targets, temperature=t)), logits)[1]


@pytest.mark.parametrize("settings", [{}, {"proposal_temperature": 1.5}, {"draws": "systematic"}], ids=str)
def test_mean_gradient_of_a_hundred_thousand_draws_is_the_dense_one(settings):
    count = 100_000
    teacher = np.broadcast_to(np.log(P), (1, count, 4)).astype("float32")
    targets = SampledTargets.from_logits(teacher, 1, seed=0, **settings)
    student = tensor(np.broadcast_to(np.log(Q), (1, count, 4)))
    got = gradients(targets, student)[0].astype("float64")
    error = got.std(axis=0, ddof=1) / np.sqrt(count)
    assert np.all(error < 2e-3) and np.all(np.abs(got.mean(axis=0) - (Q - P)) < 3 * error)


def test_naive_top_k_has_a_biased_fixed_point_and_drawn_ids_do_not():
    # The student that the naive top-2 objective -sum(p log q) over two ids is content with: (.625, .375, 0, 0).
    fixed = np.array([P[0], P[1], 0.0, 0.0]) / P[:2].sum()
    assert 0.5 * np.abs(fixed - P).sum() == pytest.approx(0.2)
    renormalised = TopKTargets(np.array([[[0, 1]]]), tensor(np.log([[P[:2]]])), tail="renormalize")
    near = tensor(np.log([[[0.625, 0.375, 1e-6, 1e-6]]]))
    batch = batch_of(renormalised, [[1.0]])
    _, gradient = value_and_grad(lambda s: DistillationLoss()(s, batch).primary.total, near)
    assert np.abs(gradient).max() < 1e-6
    # At the teacher itself the mean gradient of drawn ids is 0; here it pulls towards the ids that were cut off.
    at_teacher = np.broadcast_to(np.log(P), (1, 20000, 4)).astype("float32")
    targets = SampledTargets.from_logits(at_teacher, 4, seed=1)
    for student, want in ((P, np.zeros(4)), (fixed + np.array([0, 0, 1e-6, 1e-6]), fixed - P)):
        got = gradients(targets, tensor(np.broadcast_to(np.log(student), (1, 20000, 4))))[0]
        error = got.std(axis=0, ddof=1) / np.sqrt(len(got))
        assert np.all(np.abs(got.mean(axis=0) - want) < 4 * error + 2e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_value_and_gradient_of_given_counts(temperature):
    student = np.array([[[0.3, -1.0, 0.5, 2.0]]])
    q, w = softmax(student, temperature)[0, 0], np.array([0.25, 0.0, 0.75, 0.0])
    entropy = np.array([[0.4]], "float32")
    for ids, counts in (([0, 2], [1, 3]), ([2, 0, 2], [1, 1, 2]), ([2, 0, -1], [0.75, 0.25, 0.0])):
        targets = SampledTargets(np.array([[ids]]), np.array([[counts]]), temperature=temperature)
        for known in (None, entropy):
            given = SampledTargets(targets.ids, targets.counts, temperature=temperature, entropy=known)

            def loss(s, given=given):
                return ops.sum(sampled_divergence(s, given, temperature=temperature))

            value, gradient = value_and_grad(loss, tensor(student))
            want = -(w * np.log(q)).sum() - (0.0 if known is None else 0.4)
            assert float(value) == pytest.approx(temperature**2 * want, rel=1e-5)
            np.testing.assert_allclose(gradient[0, 0], temperature * (q - w), rtol=1e-5, atol=1e-6)


def test_gradient_of_importance_weights_carries_their_sum():
    targets = SampledTargets(np.array([[[0, 1]]]), np.array([[[0.9, 0.3]]], "float32"))
    gradient = gradients(targets, tensor(np.log([[Q]])))
    np.testing.assert_allclose(gradient[0, 0], 1.2 * Q - [0.9, 0.3, 0.0, 0.0], atol=1e-6)


def test_mean_value_with_entropy_is_the_kl_and_without_it_the_cross_entropy():
    teacher = np.broadcast_to(np.log(P), (1, 20000, 4)).astype("float32")
    targets = SampledTargets.from_logits(teacher, 4, seed=5)
    student = tensor(np.broadcast_to(np.log(Q), (1, 20000, 4)))
    values = numpy(sampled_divergence(student, targets))[0]
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert abs(values.mean() - 0.056641) < 4 * error and error < 5e-3 and values.min() < 0
    plain = numpy(sampled_divergence(student, SampledTargets(targets.ids, targets.counts)))[0]
    np.testing.assert_allclose(plain - values, -(P * np.log(P)).sum(), atol=1e-5)


def test_whole_vocabulary_in_proportion_is_dense():
    rng = np.random.default_rng(0)
    student, counts = rng.normal(size=(1, 20, 6)), rng.integers(1, 9, (1, 20, 6))
    p = counts / counts.sum(-1, keepdims=True)
    entropy = -(p * np.log(p)).sum(-1).astype("float32")
    targets = SampledTargets(np.broadcast_to(np.arange(6), (1, 20, 6)), counts, entropy=entropy)
    want = numpy(token_divergence(tensor(student), tensor(np.log(p))))
    np.testing.assert_allclose(numpy(sampled_divergence(tensor(student), targets)), want, rtol=1e-4, atol=1e-6)


def test_compiled_equals_eager():
    teacher = np.random.default_rng(0).normal(size=(1, 10, 6)).astype("float32")
    targets = SampledTargets.from_logits(teacher, 3, seed=0)
    student = tensor(np.random.default_rng(1).normal(size=(1, 10, 6)))

    def loss(s, ids, counts):
        return ops.sum(sampled_divergence(s, SampledTargets(ids, counts)))

    rest = tensor(targets.ids, "int32"), tensor(targets.counts, "int32")
    for got, want in zip(
        compiled_value_and_grad(loss)(student, *rest), value_and_grad(loss, student, *rest), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_drawn_id_without_student_mass_is_infinite_with_gradient_zero_and_others_may_be_excluded():
    student = tensor([[[-INF, 0.0, 0.0, 1.0]]])
    drawn, other = (SampledTargets(np.array([[ids]]), np.array([[[1, 1]]])) for ids in ([0, 1], [1, 3]))
    value, gradient = value_and_grad(lambda s: ops.sum(sampled_divergence(s, drawn)), student)
    assert value == INF and np.all(gradient == 0.0)
    value, gradient = value_and_grad(lambda s: ops.sum(sampled_divergence(s, other)), student)
    assert np.isfinite(value) and np.isfinite(gradient).all() and gradient[0, 0, 0] == 0.0
    outside = SampledTargets(np.array([[[4]]]), np.array([[[1]]]))
    assert numpy(sampled_divergence(student, outside))[0, 0] == INF


def test_float64_stays_float64_and_bfloat16_is_computed_in_float32():
    ids, counts = np.array([[[0, 1]]]), np.array([[[1, 1]]])
    value = numpy(sampled_divergence(tensor(np.log([[Q]]), "bfloat16"), SampledTargets(ids, counts)))
    assert value.dtype == "float32"
    with float64_scope():
        targets = SampledTargets(ids, np.array([[[0.5, 0.5]]], "float64"))
        got = numpy(sampled_divergence(tensor(np.log([[Q]]), "float64"), targets))[0, 0]
    assert got == pytest.approx(-0.5 * np.log(Q[0] * Q[1]), rel=1e-12)


def test_inactive_positions_may_hold_anything():
    teacher = np.random.default_rng(0).normal(size=(1, 4, 6)).astype("float32")
    student = np.random.default_rng(1).normal(size=(1, 4, 6)).astype("float32")
    clean = SampledTargets.from_logits(teacher, 3, seed=0, proposal_temperature=2.0)
    weights = [[1.0, 0.0, 0.5, 0.0]]
    spoiled = SampledTargets(clean.ids.copy(), clean.counts.copy(), entropy=clean.entropy.copy())
    spoiled.ids[:, 1::2], spoiled.counts[:, 1::2], spoiled.entropy[:, 1::2] = -7, np.nan, np.nan
    wild = student.copy()
    wild[:, 1::2] = np.nan
    pairs = [(student, clean), (wild, spoiled)]
    results = []
    for logits, targets in pairs:
        batch = batch_of(targets, weights)
        results.append(value_and_grad(lambda s, b=batch: DistillationLoss()(s, b).primary.mean(), tensor(logits)))
    assert results[0][0] == results[1][0] and np.array_equal(results[0][1], results[1][1])
    assert np.all(results[0][1][:, 1::2] == 0.0)


def test_distillation_loss_refuses_what_the_kind_cannot_give():
    targets = SampledTargets.from_logits(np.log([[P]]).astype("float32"), 2, seed=0)
    student = tensor(np.zeros((1, 1, 4)))
    for divergence in DIVERGENCES[1:]:
        with pytest.raises(ValueError, match=rf"must be 'forward_kl' for SampledTargets. Received '{divergence}'"):
            DistillationLoss(divergence=divergence)(student, batch_of(targets, [[1.0]]))
    with pytest.raises(ValueError, match=r"`temperature` must be 1.0, at which the ids were drawn. Received 2.0"):
        DistillationLoss(temperature=2.0)(student, batch_of(targets, [[1.0]]))
    with pytest.raises(ValueError, match=r"`temperature` must be 1.0"):
        sampled_divergence(student, targets, temperature=2.0)


def test_faults_at_active_positions_are_named_where_values_can_be_read():
    targets = SampledTargets(np.array([[[0, 4]]]), np.array([[[1, 1]]]))
    with pytest.raises(ValueError, match=r"active sampled ids must be in \[0, 4\).*row 0, position 0"):
        DistillationLoss()(tensor(np.zeros((1, 1, 4))), batch_of(targets, [[1.0]]))


def test_what_does_not_fit_is_refused():
    targets = SampledTargets(np.array([[[0]]]), np.array([[[1]]]))
    with pytest.raises(ValueError, match=r"same positions. Received logits \(1, 2, 4\) and ids \(1, 1, 1\)"):
        sampled_divergence(tensor(np.zeros((1, 2, 4))), targets)
    with pytest.raises(TypeError, match=r"`targets` must be SampledTargets. Received DenseTargets"):
        sampled_divergence(tensor(np.zeros((1, 1, 4))), DenseTargets(np.zeros((1, 1, 4), "float32")))
