"""Metrics are ratios of sums through fit, evaluate, callbacks and files; evaluation has no dropout."""

import csv

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from tests.students import V, fit, make_batches, make_student, make_trainer, same_bits, weights_of

UNEVEN = [(2, 6), (1, 6), (2, 3)]


def logits_of(student, batch):
    return np.asarray(keras.ops.convert_to_numpy(student(batch.model_inputs)), "float64")


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def float64_metrics(student, batches, temperature):
    """Everything the trainer reports, from the formulas, over all tokens at once."""
    sums, weight = {}, 0.0
    for batch in batches:
        w = np.asarray(batch.loss_weights, "float64")
        s, t = logits_of(student, batch), np.asarray(batch.teacher.logits, "float64")
        ls, lt = log_softmax(s), log_softmax(t)
        soft_s, soft_t = log_softmax(s / temperature), log_softmax(t / temperature)
        values = {
            "distill/soft_loss": temperature**2 * (np.exp(soft_t) * (soft_t - soft_s)).sum(-1),
            "distill/hard_loss": -np.take_along_axis(ls, np.asarray(batch.target_ids)[..., None], -1)[..., 0],
            "distill/kl": (np.exp(lt) * (lt - ls)).sum(-1),
            "distill/teacher_entropy": -(np.exp(lt) * lt).sum(-1),
            "distill/student_entropy": -(np.exp(ls) * ls).sum(-1),
            "distill/top1_agreement": (t.argmax(-1) == s.argmax(-1)) * 1.0,
            "distill/acceptance": 1 - 0.5 * np.abs(np.exp(lt) - np.exp(ls)).sum(-1),
            "accuracy": (s.argmax(-1) == np.asarray(batch.target_ids)) * 1.0,
        }
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + (w * value).sum()
        weight += w.sum()
    means = {name: total / weight for name, total in sums.items()}
    means["loss"] = 0.7 * means["distill/soft_loss"] + 0.3 * means["distill/hard_loss"]
    return means


def watched(k=1, **arguments):
    return make_trainer(
        metrics=[*kdo.metrics.distillation_diagnostics(), "accuracy"], accumulation_steps=k, **arguments
    )


@pytest.mark.parametrize("k", [1, 2])
def test_evaluate_equals_float64_over_all_tokens_whatever_the_batches(k):
    batches = make_batches(UNEVEN)
    trainer = watched(k)
    before = weights_of(trainer.student)
    got = trainer.evaluate(kdo.data.PreparedDataset(batches), verbose=0, return_dict=True)
    expected = float64_metrics(trainer.student, batches, temperature=2.0)
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    assert same_bits(before, weights_of(trainer.student))


def test_nothing_reports_the_exponential_of_a_divergence():
    trainer = watched()
    fit(trainer, make_batches([(2, 6)]))
    assert not any(
        "perplexity" in name for name in trainer.evaluate(make_batches([(2, 6)]), verbose=0, return_dict=True)
    )


def test_validation_data_callbacks_history_and_csv_show_the_same_numbers(tmp_path):
    batches, held_out = make_batches([(2, 6)] * 3), make_batches([(2, 6)] * 3, seed=9)
    trainer = watched(k=2)
    ends = []
    history = trainer.fit(
        kdo.data.PreparedDataset(batches),
        validation_data=kdo.data.PreparedDataset(held_out),
        epochs=2,
        verbose=0,
        callbacks=[
            keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(dict(logs))),
        ],
    )
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    last = trainer.evaluate(held_out, verbose=0, return_dict=True)
    for name, values in history.history.items():
        assert [float(row[name]) for row in rows] == pytest.approx(values, rel=1e-6)
        assert [float(end[name]) for end in ends] == pytest.approx(values, rel=1e-6)
    for name, value in last.items():
        assert history.history[f"val_{name}"][-1] == pytest.approx(value, rel=1e-6)


def test_evaluate_is_deterministic_and_free_of_dropout():
    batches = make_batches([(2, 6)] * 2)
    trainer = watched_with_dropout = make_trainer(make_student(dropout=0.5))
    first = trainer.evaluate(batches, verbose=0)
    second = watched_with_dropout.evaluate(batches, verbose=0)
    assert first == second
    plain = make_trainer(make_student())
    assert plain.evaluate(batches, verbose=0) == pytest.approx(first, rel=1e-6)


def test_training_draws_new_dropout_for_every_micro_batch():
    trainer = make_trainer(make_student(dropout=0.5), optimizer=keras.optimizers.SGD(0.0))
    one = make_batches([(2, 6)])
    losses = fit(trainer, one, epochs=3).history["loss"]
    assert len(set(losses)) == 3


def test_metrics_of_a_scalar_kind_count_once_per_micro_batch():
    class Reporting:
        metric_names = ("weighted", "plain")

        def __call__(self, logits, batch):
            total = keras.ops.sum(keras.ops.cast(batch.loss_weights, "float32"))
            primary = kdo.losses.TokenCrossEntropyLoss()(logits, batch).primary
            plain = keras.ops.cast(batch.target_ids[0, 0], "float32")
            return kdo.losses.LossOutput(
                primary, {"weighted": kdo.losses.WeightedSum(2.0 * total, total), "plain": plain}
            )

    batches = make_batches(UNEVEN)
    trainer = make_trainer(loss=Reporting(), accumulation_steps=2)
    first_ids = [float(b.target_ids[0, 0]) for b in batches]
    for got in (fit(trainer, batches).history, trainer.evaluate(batches, verbose=0, return_dict=True)):
        assert np.ravel(got["weighted"])[0] == pytest.approx(2.0)
        assert np.ravel(got["plain"])[0] == pytest.approx(np.mean(first_ids))


def test_loss_that_reports_what_it_does_not_declare_is_refused():
    def loss(logits, batch):
        output = kdo.losses.TokenCrossEntropyLoss()(logits, batch)
        return kdo.losses.LossOutput(output.primary, {"extra": output.primary})

    with pytest.raises(ValueError, match=r"reports the metrics \['extra'\].*`metric_names`"):
        fit(make_trainer(loss=loss), make_batches([(2, 6)]))


def test_loss_that_does_not_return_a_loss_output_is_refused():
    with pytest.raises(TypeError, match="must return a LossOutput"):
        fit(make_trainer(loss=lambda logits, batch: keras.ops.sum(logits)), make_batches([(2, 6)]))


def test_token_metrics_need_a_teacher_and_say_so():
    trainer = make_trainer(loss=kdo.losses.TokenCrossEntropyLoss(), metrics=[kdo.metrics.TeacherKL()])
    with pytest.raises(ValueError, match="'distill/kl' compares with the teacher"):
        fit(trainer, make_batches([(2, 6)], teacher=False))
    alone = make_trainer(loss=kdo.losses.TokenCrossEntropyLoss(), metrics=[kdo.metrics.StudentEntropy()])
    history = fit(alone, make_batches([(2, 6)], teacher=False))
    assert 0 < history.history["distill/student_entropy"][0] <= np.log(V) + 1e-6


def test_batch_methods_take_a_prepared_batch():
    batch = make_batches([(2, 6)])[0]
    trainer = watched()
    expected = float64_metrics(trainer.student, [batch], temperature=2.0)
    assert trainer.test_on_batch(batch, return_dict=True)["loss"] == pytest.approx(expected["loss"], rel=2e-5)
    before = weights_of(trainer.student)
    logs = trainer.train_on_batch(*batch.as_fit()[:2], sample_weight=batch.loss_weights, return_dict=True)
    assert logs["loss"] == pytest.approx(expected["loss"], rel=2e-5)
    assert not same_bits(before, weights_of(trainer.student))
    assert trainer.policy_version == 1
    logits = trainer.predict(batch.model_inputs, verbose=0)
    np.testing.assert_allclose(logits, logits_of(trainer.student, batch), rtol=1e-5, atol=1e-6)
    assert trainer.predict_on_batch(batch.model_inputs).shape == (2, 6, V)


def test_metrics_are_empty_before_anything_weighed():
    trainer = watched()
    got = trainer.evaluate(make_batches([(2, 6)], zero=(0,)), verbose=0, return_dict=True)
    assert set(got.values()) == {0.0}
