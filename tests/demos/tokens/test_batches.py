"""Batches of the demo: what is in an epoch, how it is dealt, and what it is stamped with."""

import keras
import numpy as np

from keras_diffusion_opd.demos.tokens.batches import Rollouts, noting
from keras_diffusion_opd.demos.tokens.digits import LEVELS, Scans, load_scans, one_of_each
from keras_diffusion_opd.models.token_denoiser import TokenDenoiser


def scans(count=40):
    rng = np.random.default_rng(0)
    return Scans(rng.integers(0, LEVELS, (count, 64)).astype("int32"), (np.arange(count) % 10).astype("int32"))


def small():
    keras.utils.set_random_seed(0)
    model = TokenDenoiser(LEVELS, 64, 10, width=4, depth=1, channels=2)
    model.build()
    return model


def test_the_split_is_fixed_and_covers_every_scan_once():
    training, held_out = load_scans()
    assert (len(training), len(held_out)) == (1437, 360)
    rows = {row.tobytes() for row in np.concatenate([training.token_ids, held_out.token_ids])}
    assert len(rows) == 1797  # all scans differ, so none is in both parts
    assert training.token_ids.min() == 0
    assert training.token_ids.max() == 16
    assert np.bincount(held_out.class_ids).tolist() == [36] * 10
    again, _ = load_scans()
    assert np.array_equal(again.token_ids, training.token_ids)


def test_pictures_show_every_class_in_order():
    training, _ = load_scans()
    shown = one_of_each(training, rows=2)
    assert shown.shape == (20, 64)
    assert np.array_equal(shown[13], training.token_ids[np.flatnonzero(training.class_ids == 3)[1]])


def test_a_mixture_holds_scans_and_samples_and_its_stamps_are_noted():
    model, seen = small(), []
    data = scans(40)
    rollout = noting(Rollouts(seed=0, count=10, size=8, pool=20, steps=4).mixing(data, 0.5), seen)
    targets = np.concatenate([batch.target_ids for batch in rollout(model, 30)])
    known = {row.tobytes() for row in data.token_ids}
    assert sum(row.tobytes() in known for row in targets) == 40
    assert [stamp.policy_version for stamp in seen] == [30]


def test_hard_labels_and_distillation_see_the_same_corruptions():
    rollouts = Rollouts(seed=0, count=3, size=8)
    hard, soft = (rollouts.mixing(scans(), 0.0, teacher)(small(), 0) for teacher in (None, lambda inputs: None))
    assert all(np.array_equal(a.loss_weights, b.loss_weights) for a, b in zip(hard, soft, strict=True))
