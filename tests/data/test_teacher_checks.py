"""Teachers that say nothing are named, and those that say little are not."""

import numpy as np
import pytest

from keras_diffusion_opd.data import (
    DegenerateTeacherError,
    DenseTargets,
    PreparedBatch,
    PreparedDataset,
    SampledTargets,
    TopKTargets,
    check_teacher,
)
from tests.oracles import tensor

SHAPE = (3, 4)
SOUND = np.random.default_rng(0).normal(size=(*SHAPE, 9)).astype("float32")
ROW = SOUND[:1, :1]
WEIGHTS = np.ones(SHAPE, "float32")


def batch_of(teacher, weights=WEIGHTS):
    ids = np.zeros(weights.shape, "int32")
    return PreparedBatch.create(model_inputs=ids, target_ids=ids, loss_weights=weights, teacher=teacher)


def kinds(logits):
    """The same teacher in every form that has single scores."""
    return [
        DenseTargets(logits),
        DenseTargets(tensor(logits)),
        DenseTargets(tensor(logits, "bfloat16")),
        TopKTargets.from_logits(tensor(logits), 4),
    ]


@pytest.mark.parametrize("index", range(4))
def test_uniform_answers_are_named(index):
    # One constant at each position: as little as one constant for all.
    logits = np.zeros_like(SOUND) + np.arange(12, dtype="float32").reshape(*SHAPE, 1)
    with pytest.raises(DegenerateTeacherError, match=r"prefers no id to another at any of 12.*never loaded"):
        check_teacher(batch_of(kinds(logits)[index]), allow=["constant"])
    check_teacher(batch_of(kinds(logits)[index]), allow=["constant", "uniform"])


@pytest.mark.parametrize("index", range(4))
def test_the_same_answer_everywhere_is_named(index):
    logits = np.tile(ROW, (*SHAPE, 1)) + np.arange(12, dtype="float32").reshape(*SHAPE, 1)
    if index == 2:
        logits = np.tile(ROW, (*SHAPE, 1))  # bfloat16 would round each constant otherwise
    with pytest.raises(DegenerateTeacherError, match=r"says the same at all of 12.*not given the inputs"):
        check_teacher(batch_of(kinds(logits)[index]))
    check_teacher(batch_of(kinds(logits)[index]), allow=["constant"])


def test_all_zeros_are_both():
    with pytest.raises(DegenerateTeacherError, match=r"prefers no id.*It also says the same.*allow=\['uniform'"):
        check_teacher(batch_of(DenseTargets(np.zeros_like(SOUND))))


@pytest.mark.parametrize("index", range(4))
def test_teacher_that_knows_something_somewhere_passes(index):
    check_teacher(batch_of(kinds(SOUND)[index]))
    logits = np.zeros_like(SOUND)
    logits[2, 3, 5] = 1.0
    check_teacher(batch_of(kinds(logits)[index]))


def test_uniform_over_what_is_not_excluded_is_uniform_and_certainty_is_not():
    logits = np.zeros_like(SOUND)
    logits[..., 8] = -np.inf
    with pytest.raises(DegenerateTeacherError, match="prefers no id"):
        check_teacher(batch_of(DenseTargets(logits)))
    certain = np.full_like(SOUND, -np.inf)
    certain[..., 0] = 0.0
    certain[0, 0, :2] = [-np.inf, 0.0]
    check_teacher(batch_of(DenseTargets(certain)))


def test_drawn_ids_are_compared_between_positions_alone():
    check_teacher(batch_of(SampledTargets.from_logits(np.zeros_like(SOUND), 4, seed=0)))
    stuck = SampledTargets(np.full((*SHAPE, 1), 3, "int32"), np.ones((*SHAPE, 1), "int32"))
    with pytest.raises(DegenerateTeacherError, match="says the same"):
        check_teacher(batch_of(stuck))


def test_inactive_positions_are_not_looked_at_and_few_show_nothing():
    logits = np.zeros_like(SOUND)
    logits[0] = SOUND[0]
    logits[1] = np.nan
    weights = WEIGHTS.copy()
    weights[:2] = 0.0
    with pytest.raises(DegenerateTeacherError, match="any of 4 active"):
        check_teacher(batch_of(DenseTargets(logits), weights))
    weights[2, 1:] = 0.0
    check_teacher(batch_of(DenseTargets(logits), weights))


def test_only_so_many_positions_are_looked_at():
    with pytest.raises(DegenerateTeacherError, match="any of 3 active"):
        check_teacher(batch_of(DenseTargets(np.zeros_like(SOUND))), positions=3)


def test_batch_without_a_teacher_passes_and_unknown_names_do_not():
    check_teacher(batch_of(None))
    with pytest.raises(ValueError, match=r"`allow` must hold names .*'constant', 'uniform'.* Received \['all'\]"):
        check_teacher(batch_of(None), allow=["all"])


def test_dataset_looks_once_at_its_first_batch_and_can_be_told_not_to():
    more = np.tile(SOUND, (2, 1, 1))
    sound, zeros = (batch_of(DenseTargets(x), np.ones((6, 4), "float32")) for x in (more, np.zeros_like(more)))
    few = np.zeros((6, 4), "float32")
    few[:5, :3] = 1.0
    assert PreparedDataset(batch_of(DenseTargets(np.zeros_like(more)), few))[0] is not None
    dataset = PreparedDataset([zeros, sound])
    for _ in range(2):
        with pytest.raises(DegenerateTeacherError, match="check_teacher=False"):
            dataset[0]
    assert PreparedDataset([zeros, sound], check_teacher=False)[0] is not None
    later = PreparedDataset([sound, zeros])
    assert later[0] is not None and later[1] is not None
