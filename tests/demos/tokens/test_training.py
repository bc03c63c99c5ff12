"""Training courses of the demo: the same start and the same number of updates give the same student."""

import dataclasses

import keras
import numpy as np

from keras_diffusion_opd.demos.tokens.batches import Rollouts
from keras_diffusion_opd.demos.tokens.digits import load_scans
from keras_diffusion_opd.demos.tokens.settings import STUDENT
from keras_diffusion_opd.demos.tokens.training import Course, denoiser
from keras_diffusion_opd.losses import TokenCrossEntropyLoss


def test_a_course_forgets_the_student_before(capsys):
    keras.utils.set_random_seed(0)
    network = dataclasses.replace(STUDENT, width=6, depth=1, channels=2, updates=6)
    model = denoiser(network, "student")
    start = model.get_weights()
    course = Course(model, TokenCrossEntropyLoss(), network, epochs=2)
    training, _ = load_scans()
    rollout = Rollouts(seed=0, count=3, size=4).mixing(training, 0.0)
    watched = []

    def watch():
        watched.append(model.get_weights())
        return float(len(watched))

    first = course.train("first", start, rollout, watch)
    second = course.train("second", start, rollout)
    assert first.curve == [(3, 1.0), (6, 2.0)]
    assert second.curve == []
    for a, b, c in zip(first.weights, second.weights, start, strict=True):
        assert np.array_equal(a, b)
        assert not np.array_equal(a, c)
    assert course.trainer.policy_version == 6
    said = capsys.readouterr().out
    assert "6/6" in said
    assert "loss" in said
