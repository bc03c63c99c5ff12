"""Batches are rolled out by the student that trains on them."""

import numpy as np
import pytest

import keras_diffusion_opd as kdo
from tests.students import make_batches, make_trainer, same_bits, weights_of


def stamped(version, seed=0):
    return [
        kdo.data.PreparedBatch(b.model_inputs, b.target_ids, b.loss_weights, b.teacher, kdo.data.Stamp(version))
        for b in make_batches([(2, 6)] * 2, seed=seed)
    ]


def test_student_is_rolled_out_at_its_present_weights_and_version_and_trained_on_the_result():
    calls = []

    def rollout(student, version):
        calls.append((version, weights_of(student)))
        return stamped(version, seed=version)

    dataset = kdo.data.PreparedDataset(rollout(make_trainer().student, 0), max_staleness=3)
    calls.clear()
    trainer = make_trainer()
    trainer.fit(dataset, epochs=5, verbose=0, callbacks=[kdo.callbacks.RolloutRefresh(dataset, rollout, every=2)])
    # Two windows an epoch; the first epoch finds the dataset fresh.
    assert [version for version, _ in calls] == [4, 8]
    by_hand = make_trainer()
    for epochs, version in ((2, 0), (2, 4), (1, 8)):
        assert (
            not calls
            or version not in [v for v, _ in calls]
            or same_bits(dict(calls)[version], weights_of(by_hand.student))
        )
        by_hand.fit(kdo.data.PreparedDataset(stamped(version, seed=version)), epochs=epochs, verbose=0)
    assert same_bits(weights_of(trainer.student), weights_of(by_hand.student))


@pytest.mark.parametrize("version", [None, 0])
def test_rollout_that_hands_out_old_or_unstamped_batches_is_refused(version):
    def rollout(student, present):
        return make_batches([(2, 6)] * 2) if version is None else stamped(version)

    trainer = make_trainer()
    dataset = kdo.data.PreparedDataset(stamped(0))
    with pytest.raises(ValueError, match="`rollout` must stamp every batch with the student's present version, 2"):
        trainer.fit(dataset, epochs=2, verbose=0, callbacks=[kdo.callbacks.RolloutRefresh(dataset, rollout)])
    assert all(np.all(np.isfinite(w)) for w in weights_of(trainer.student))


@pytest.mark.parametrize(
    "returned, message",
    [(None, "Received NoneType"), ([], "an empty one"), ([1], "PreparedBatch objects. Received int")],
)
def test_rollout_that_returns_no_batches_is_refused_before_anything_is_replaced(returned, message):
    trainer = make_trainer()
    dataset = kdo.data.PreparedDataset(stamped(0))
    with pytest.raises(TypeError, match=message):
        trainer.fit(
            dataset, epochs=2, verbose=0, callbacks=[kdo.callbacks.RolloutRefresh(dataset, lambda *_: returned)]
        )
    assert dataset.replacements == 0


def test_arguments_are_checked():
    dataset = kdo.data.PreparedDataset(stamped(0))
    with pytest.raises(TypeError, match="`dataset` must be the PreparedDataset"):
        kdo.callbacks.RolloutRefresh([], lambda *_: [])
    with pytest.raises(TypeError, match="`rollout` must be a function"):
        kdo.callbacks.RolloutRefresh(dataset, None)
    with pytest.raises(ValueError, match="`every` must be a whole number"):
        kdo.callbacks.RolloutRefresh(dataset, lambda *_: [], every=0)
