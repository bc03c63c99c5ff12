"""Value checks that hold inside a compiled step: each names its fault, where it is, and nothing else."""

import numpy as np
import pytest

from keras_diffusion_opd.data import DenseTargets, PreparedBatch, TeacherTargets, violations
from keras_diffusion_opd.data.violations import MESSAGES, messages
from tests.oracles import compiled, numpy, tensor

B, L, V = 2, 3, 5
INF = np.inf


def program(ids, weights, teacher, logits, total):
    batch = PreparedBatch(ids, ids, weights, DenseTargets(teacher))
    return violations(batch, logits, total)


RUN = compiled(program)


def found(total=0.0, **changes):
    """`{name: [(row, position), ...]}` of the checks that found something."""
    arrays = {
        "ids": np.zeros((B, L), "int32"),
        "weights": np.ones((B, L), "float32"),
        "teacher": np.zeros((B, L, V), "float32"),
        "logits": np.zeros((B, L, V), "float32"),
        **changes,
    }
    answer = RUN(*(tensor(x, x.dtype.name) for x in arrays.values()), tensor(total))
    assert set(answer) == {*MESSAGES, "teacher_finite"}
    return {name: [tuple(w) for w in np.argwhere(numpy(x))] for name, x in answer.items() if numpy(x).any()}


def array(name, value, where=(1, 2), fill=0.0):
    """The array of that name with `value` at one place."""
    shape = (B, L) if name in ("ids", "weights") else (B, L, V)
    x = np.full(shape, fill, "int32" if name == "ids" else "float32")
    x[where] = value
    return {name: x}


def test_sound_batch_breaks_nothing():
    assert found() == {}


@pytest.mark.parametrize(
    "name, check, value",
    [
        ("weights", "weights_finite", np.nan),
        ("weights", "weights_finite", INF),
        ("weights", "weights_nonnegative", -0.5),
        ("ids", "targets_nonnegative", -1),
        ("ids", "targets_in_vocabulary", V),
        ("teacher", "teacher_finite", np.nan),
        ("teacher", "teacher_finite", INF),
        ("teacher", "teacher_finite", -INF),
        ("logits", "student_finite", np.nan),
        ("logits", "student_finite", INF),
        ("logits", "student_finite", -INF),
    ],
)
def test_each_fault_is_found_at_its_place_inside_a_compiled_function(name, check, value):
    assert found(**array(name, value, fill=float(name == "weights"))) == {check: [(1, 2)]}


@pytest.mark.parametrize("name", ["teacher", "logits"])
def test_single_excluded_ids_are_no_fault(name):
    assert found(**array(name, -INF, (1, 2, 4))) == {}


def test_inactive_positions_may_hold_anything():
    changes = {
        **array("weights", 0.0, fill=1.0),
        **array("ids", -7),
        **array("teacher", np.nan),
        **array("logits", INF),
    }
    assert found(**changes) == {}


def test_several_faults_are_all_named():
    changes = {**array("ids", -1), **array("teacher", np.nan, (0, 1)), **array("logits", np.nan, (0, 0, 3))}
    assert found(total=np.nan, **changes) == {
        "targets_nonnegative": [(1, 2)],
        "teacher_finite": [(0, 1)],
        "student_finite": [(0, 0)],
    }


@pytest.mark.parametrize("total", [INF, np.nan])
def test_infinite_loss_is_traced_to_the_id_that_only_the_student_excludes(total):
    both = array("logits", -INF, (0, 0, 4))["logits"]
    student = both.copy()
    student[1, 1, 3] = -INF
    assert found(total=total, logits=student, teacher=both) == {"loss_finite": [(1, 1)]}


def test_infinite_loss_is_traced_to_a_target_that_both_exclude():
    both = array("logits", -INF, (1, 0, 2))["logits"]
    assert found(total=INF, logits=both, teacher=both, **array("ids", 2, (1, 0))) == {"loss_finite": [(1, 0)]}


def test_infinite_loss_that_nothing_explains_points_at_every_active_position():
    assert found(total=INF, **array("weights", 0.0, (0, 1), fill=1.0)) == {
        "loss_finite": [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)]
    }


def test_batch_without_a_teacher_is_checked_for_the_rest():
    batch = PreparedBatch(np.ones((1, 2)), np.array([[0, 9]]), np.ones((1, 2), "float32"))
    answer = violations(batch, np.zeros((1, 2, V), "float32"), 0.0)
    assert numpy(answer["targets_in_vocabulary"]).tolist() == [[False, True]]
    assert "teacher_finite" not in answer


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int64"])
@pytest.mark.parametrize("vocabulary", [5, 300])
def test_ids_of_any_integer_dtype_are_compared_without_wrapping(dtype, vocabulary):
    batch = PreparedBatch(np.ones((1, 2)), np.array([[0, 9]], dtype), np.ones((1, 2), "float32"))
    answer = violations(batch, np.zeros((1, 2, vocabulary), "float32"), 0.0)
    assert numpy(answer["targets_in_vocabulary"]).tolist() == [[False, vocabulary == 5]]
    assert not numpy(answer["targets_nonnegative"]).any()


@pytest.mark.parametrize("dtype", ["bool", "int32"])
def test_weights_that_are_no_floats_are_checked_too(dtype):
    batch = PreparedBatch(np.ones((1, 2)), np.array([[-1, -1]]), np.array([[0, 1]], dtype))
    answer = violations(batch, np.zeros((1, 2, V), "float32"), 0.0)
    assert numpy(answer["targets_nonnegative"]).tolist() == [[False, True]]


def test_every_message_says_what_must_hold():
    assert all("must" in message for message in messages().values())


def test_every_kind_of_teacher_has_its_faults_among_the_messages():
    kinds = list(TeacherTargets.registry.values())
    assert len(kinds) >= 3
    assert {name for kind in kinds for name in kind.FAULTS} | set(MESSAGES) == set(messages())
    assert all("{" not in message for message in messages().values())


def test_kind_without_names_for_its_faults_shares_the_general_one():
    class Unnamed(DenseTargets):
        kind = ""

        def faults(self, vocabulary=None):
            return {"own words": self.invalid(), "others": self.invalid() & False}

    teacher = Unnamed(np.full((1, 2, V), np.nan, "float32"))
    batch = PreparedBatch(np.ones((1, 2)), np.zeros((1, 2), "int32"), np.array([[0.0, 1.0]], "float32"), teacher)
    answer = violations(batch, np.zeros((1, 2, V), "float32"), 0.0)
    assert numpy(answer["teacher_finite"]).tolist() == [[False, True]]
