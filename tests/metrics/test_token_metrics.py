"""What to watch while distilling: each metric against its definition, weighted token by token."""

import keras
import numpy as np
import pytest

from keras_diffusion_opd import metrics
from keras_diffusion_opd.losses import TeacherDivergence, token_divergence
from keras_diffusion_opd.metrics import (
    Acceptance,
    StudentEntropy,
    TeacherEntropy,
    TeacherKL,
    TokenMetric,
    TopOneAgreement,
    distillation_diagnostics,
)
from tests.oracles import BACKEND, DIVERGENCES, numpy, reference, softmax, tensor

INF = np.inf
B, L, V = 2, 3, 5
WEIGHTS = np.array([[1.0, 0.25, 0.0], [0.5, 0.0, 2.0]])
OFF = WEIGHTS == 0


def entropy(logits):
    p = softmax(logits)
    return -np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0).sum(-1)


DEFINITIONS = {
    TeacherKL: lambda t, s: reference("forward_kl", s, t),
    TeacherEntropy: lambda t, s: entropy(t),
    StudentEntropy: lambda t, s: entropy(s),
    TopOneAgreement: lambda t, s: (t.argmax(-1) == s.argmax(-1)).astype("float64"),
    Acceptance: lambda t, s: 1 - reference("total_variation", s, t),
}
each = pytest.mark.parametrize("kind", DEFINITIONS, ids=lambda kind: kind.__name__)


def pair(seed=0):
    return np.random.default_rng(seed).normal(size=(2, B, L, V)).astype("float32") * 2


def result(metric, *updates):
    for teacher, student, weights in updates:
        metric.update_state(teacher, student, sample_weight=weights)
    return float(numpy(metric.result()))


@each
def test_metric_is_the_weighted_mean_of_its_definition(kind):
    teacher, student = pair()
    want = (WEIGHTS * DEFINITIONS[kind](teacher, student)).sum() / WEIGHTS.sum()
    assert result(kind(), (teacher, student, WEIGHTS)) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("kind", [TeacherKL, TopOneAgreement])
def test_streaming_over_batches_of_different_length_equals_one_shot(kind):
    teacher, student = pair(1)
    parts = [(teacher[:, :n], student[:, :n], WEIGHTS[:, :n]) for n in (1, 3)]
    both = [np.concatenate(x, 1) for x in zip(*parts, strict=True)]
    assert result(kind(), *parts) == pytest.approx(result(kind(), both), rel=1e-5)


@each
def test_garbage_at_weight_zero_changes_nothing_by_a_bit(kind):
    clean, dirty = pair(2), pair(2)
    dirty[0][OFF], dirty[1][OFF] = np.nan, INF
    assert result(kind(), (*clean, WEIGHTS)) == result(kind(), (*dirty, WEIGHTS))


@each
def test_without_weights_every_token_counts_once(kind):
    teacher, student = pair(3)
    assert result(kind(), (teacher, student, None)) == pytest.approx(
        DEFINITIONS[kind](teacher, student).mean(), rel=1e-5
    )


@each
def test_empty_result_is_zero(kind):
    assert result(kind()) == 0.0
    assert result(kind(), (*pair(), np.zeros((B, L)))) == 0.0


@each
def test_excluded_ids_leave_the_metric_finite(kind):
    teacher, student = pair(4)
    teacher[..., -1] = student[..., -1] = -INF
    want = DEFINITIONS[kind](teacher[..., :-1], student[..., :-1]).mean()
    assert result(kind(), (teacher, student, None)) == pytest.approx(want, rel=1e-5)


@each
def test_half_precision_logits_are_measured_in_float32(kind):
    teacher, student = (tensor(x, "bfloat16") for x in pair(5))
    want = DEFINITIONS[kind](numpy(teacher), numpy(student)).mean()
    assert result(kind(), (teacher, student, None)) == pytest.approx(want, rel=1e-5)


@each
def test_student_that_equals_its_teacher(kind):
    logits = pair(6)[0]
    want = {TeacherKL: 0.0, TopOneAgreement: 1.0, Acceptance: 1.0}.get(kind, entropy(logits).mean())
    got = result(kind(), (logits, logits.copy(), None))
    assert got == want if kind in (TeacherKL, TopOneAgreement, Acceptance) else got == pytest.approx(want, rel=1e-5)


def test_acceptance_is_one_minus_total_variation_of_known_distributions():
    p, q = np.log([[0.5, 0.3, 0.15, 0.05]]), np.log([[0.6, 0.2, 0.1, 0.1]])
    assert result(Acceptance(), (p, q, None)) == pytest.approx(0.85, abs=1e-6)
    assert result(TeacherKL(), (p, q, None)) == pytest.approx(0.056641, abs=1e-6)


def test_divergence_is_reported_at_temperature_one_whatever_the_loss_does():
    teacher, student = np.array([[2.0, 0.0, -1.0]]), np.array([[0.0, 1.0, 0.0]])
    assert float(numpy(token_divergence(student, teacher, temperature=2.0))[0]) == pytest.approx(1.091222, abs=1e-5)
    assert result(TeacherKL(), (teacher, student, None)) == pytest.approx(0.912983, abs=1e-6)
    assert result(TeacherKL(temperature=2.0), (teacher, student, None)) == pytest.approx(1.091222, abs=1e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_any_named_divergence_is_a_metric(divergence):
    teacher, student = pair(7)
    want = reference(divergence, student, teacher).mean()
    assert result(TeacherKL(divergence=divergence), (teacher, student, None)) == pytest.approx(want, rel=1e-5)


def test_student_entropy_needs_no_teacher():
    student = pair(8)[1]
    got = result(StudentEntropy(), (np.zeros((B, L), "int32"), student, WEIGHTS))
    assert got == pytest.approx((WEIGHTS * entropy(student)).sum() / WEIGHTS.sum(), rel=1e-5)


def test_diagnostics_are_the_five_with_names_of_their_own():
    names = [metric.name for metric in distillation_diagnostics()]
    assert names == [
        "distill/kl",
        "distill/teacher_entropy",
        "distill/student_entropy",
        "distill/top1_agreement",
        "distill/acceptance",
    ]
    assert distillation_diagnostics()[0] is not distillation_diagnostics()[0]


def test_nothing_reports_the_exponential_of_a_divergence_as_a_perplexity():
    names = [*metrics.__all__, *(metric.name for metric in distillation_diagnostics())]
    assert not [name for name in names if "perplexity" in name.lower() or "ppl" in name.lower()]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"divergence": "kl"}, "`divergence` must be one of"),
        ({"temperature": 0}, "`temperature` must be positive"),
        ({"temperature": np.inf}, "`temperature` must be a finite real scalar"),
    ],
)
def test_setting_out_of_range_is_refused_at_construction(arguments, words):
    with pytest.raises(ValueError, match=words):
        TeacherKL(**arguments)


def test_teacher_and_student_of_different_vocabularies_are_refused():
    with pytest.raises(ValueError, match="must have identical shapes"):
        TeacherKL().update_state(np.zeros((1, 2, 4), "float32"), np.zeros((1, 2, 5), "float32"))


def test_token_metric_is_abstract_in_its_values():
    with pytest.raises(TypeError, match="abstract.*values"):
        TokenMetric()


@each
def test_config_round_trip(kind):
    metric = kind(name="mine")
    back = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(metric))
    assert type(back) is kind and back.name == "mine" and back.get_config() == metric.get_config()


def test_configured_divergence_survives_the_round_trip():
    back = TeacherKL.from_config(TeacherKL("jsd", temperature=2.0).get_config())
    assert (back.divergence, back.temperature) == ("jsd", 2.0)


def test_metrics_in_a_plain_model_compile_see_weights_and_masks():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((None,), dtype="int32"),
            keras.layers.Embedding(V, 4, mask_zero=True),
            keras.layers.Dense(V),
        ]
    )
    model.compile(
        loss=TeacherDivergence(),  # Keras's own losses change sample_weight in place on torch
        metrics=[Acceptance()],
        weighted_metrics=[TeacherKL()],
        jit_compile=False if BACKEND == "tensorflow" else "auto",
    )
    x = np.array([[1, 2, 0], [3, 4, 1]], "int32")
    teacher, _ = pair(9)
    logs = model.evaluate(x, teacher, sample_weight=WEIGHTS, batch_size=1, return_dict=True, verbose=0)
    student, mask = numpy(model(x)), x != 0
    values, weights = reference("forward_kl", student, teacher), WEIGHTS * mask
    assert logs["distill/kl"] == pytest.approx((values * weights).sum() / weights.sum(), rel=1e-5)
    accepted = 1 - reference("total_variation", student, teacher)
    assert logs["distill/acceptance"] == pytest.approx(accepted[mask].mean(), rel=1e-5)
