"""`as_fit` and `from_fit`: a batch as Keras carries it, and back, with nothing shifted, cast or lost."""

import json
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.batches import fields

from keras_diffusion_opd.data import DenseTargets, PreparedBatch, Stamp, TeacherTargets
from keras_diffusion_opd.data.targets import no_distribution

TEACHER = DenseTargets(np.zeros((2, 3, 5), "float16"))


@dataclass(frozen=True)
class Tempered(TeacherTargets):
    """A kind of targets with a setting, as a user would add one."""

    logits: Any
    temperature: float
    kind: ClassVar[str] = "tempered_for_tests"

    def arrays(self):
        return {"logits": self.logits}

    def settings(self):
        return {"temperature": self.temperature}

    def validate(self, target_ids):
        pass

    def vocabulary_size(self):
        return None

    def invalid(self):
        return no_distribution(self.logits)


def same(a, b):
    return (
        a.model_inputs is b.model_inputs
        and a.target_ids is b.target_ids
        and a.loss_weights is b.loss_weights
        and type(a.teacher) is type(b.teacher)
    )


@pytest.mark.parametrize("teacher", [None, TEACHER])
def test_round_trip_keeps_the_same_arrays(teacher):
    batch = PreparedBatch.create(**fields(teacher=teacher))
    x, y, sample_weight = batch.as_fit()
    back = PreparedBatch.from_fit(x, y, sample_weight)
    assert same(batch, back) and back.validate() is back
    if teacher is not None:
        assert back.teacher.logits is teacher.logits


def test_y_names_ids_and_teacher_by_kind():
    assert set(PreparedBatch(**fields()).as_fit()[1]) == {"target_ids"}
    y = PreparedBatch(**fields(teacher=TEACHER)).as_fit()[1]
    assert y["teacher"] == {"dense": {"logits": TEACHER.logits}}


def test_settings_of_a_teacher_travel_in_its_tag():
    batch = PreparedBatch.create(**fields(teacher=Tempered(np.zeros((2, 3, 5)), 2.5)))
    (tag,) = batch.as_fit()[1]["teacher"]
    assert json.loads(tag.partition(" ")[2]) == {"temperature": 2.5}
    back = PreparedBatch.from_fit(*batch.as_fit())
    assert isinstance(back.teacher, Tempered) and back.teacher.temperature == 2.5


@pytest.mark.parametrize("y", [np.zeros((2, 3), "int32"), {"ids": 1}, None])
def test_y_without_target_ids_is_refused(y):
    with pytest.raises(ValueError, match=r"`y` must be a dict with 'target_ids'.*as_fit\(\).*Received"):
        PreparedBatch.from_fit(np.zeros(2), y, np.ones((2, 3)))


def test_missing_sample_weight_is_refused():
    with pytest.raises(ValueError, match=r"`sample_weight` must hold the weight of every token.*Received None"):
        PreparedBatch.from_fit(np.zeros(2), {"target_ids": np.zeros((2, 3), "int32")}, None)


def test_unknown_keys_of_y_are_refused_so_that_a_misspelt_teacher_is_no_silent_loss():
    y = {"target_ids": np.zeros((2, 3), "int32"), "teacher_logits": np.zeros((2, 3, 5))}
    with pytest.raises(ValueError, match=r"`y` has the keys 'target_ids' and 'teacher'.*Received also.*teacher_logits"):
        PreparedBatch.from_fit(np.zeros(2), y, np.ones((2, 3)))


@pytest.mark.parametrize("teacher", [{"dense": {}, "topk": {}}, {}, np.zeros(3)])
def test_not_exactly_one_teacher_is_refused(teacher):
    with pytest.raises(ValueError, match=r"`y\['teacher'\]` must hold the targets of exactly one teacher.*Received"):
        PreparedBatch.from_fit(np.zeros(2), {"target_ids": np.zeros((2, 3)), "teacher": teacher}, np.ones((2, 3)))


def test_unknown_kind_of_teacher_is_refused_with_the_known_ones():
    y = {"target_ids": np.zeros((2, 3)), "teacher": {"oracle": {}}}
    with pytest.raises(ValueError, match=r"`y\['teacher'\]` has kind 'oracle'. Known kinds.*'dense'"):
        PreparedBatch.from_fit(np.zeros(2), y, np.ones((2, 3)))


def test_map_reaches_every_array_and_keeps_structure_and_stamp():
    batch = PreparedBatch.create(**fields(teacher=TEACHER, stamp=Stamp(policy_version=4), model_inputs=(np.ones(2), [np.ones(2)])))
    seen = []
    mapped = batch.map(lambda x: (seen.append(x.shape), x[:1])[1])
    assert sorted(seen) == sorted([(2,), (2,), (2, 3), (2, 3), (2, 3, 5)])
    assert mapped.rows == 1 and mapped.stamp == batch.stamp and mapped.validate() is mapped
    assert type(mapped.model_inputs) is tuple and type(mapped.model_inputs[1]) is list


def test_abstract_targets_cannot_be_instantiated():
    with pytest.raises(TypeError, match=re.escape("abstract")):
        TeacherTargets()
