"""What a first user ran into: silent mistakes that are named now."""

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from tests.students import make_batches, make_trainer

ONES = np.ones((1, 2), "float32")


@pytest.mark.parametrize("wrong", [2**32 + 1, 2**33 + 1, -(2**32) + 1])
def test_ids_that_would_wrap_around_in_int32_are_refused(wrong):
    ids = np.array([[0, 1]])
    teacher = kdo.data.TopKTargets(np.full((1, 2, 1), wrong, "int64"), np.full((1, 2, 1), -1.0, "float32"))
    with pytest.raises(ValueError, match="`top-k ids` must fit in int32"):
        kdo.data.PreparedBatch.create(model_inputs=ids, target_ids=ids, loss_weights=ONES, teacher=teacher)
    with pytest.raises(ValueError, match=r"active target_ids must (fit in int32|be nonnegative)"):
        kdo.data.PreparedBatch.create(model_inputs=ids, target_ids=np.array([[0, wrong]]), loss_weights=ONES)


def stamped(version):
    b = make_batches([(2, 6)])[0]
    return kdo.data.PreparedBatch(b.model_inputs, b.target_ids, b.loss_weights, b.teacher, kdo.data.Stamp(version))


def test_batch_of_a_policy_that_is_yet_to_come_is_refused():
    dataset = kdo.data.PreparedDataset([stamped(4)], max_staleness=9)
    with pytest.raises(kdo.data.StaleBatchError, match="policy version 4, and the student is at 0"):
        dataset.batch(0)


def test_refreshing_another_dataset_than_the_one_trained_on_is_refused():
    trained, other = kdo.data.PreparedDataset([stamped(0)]), kdo.data.PreparedDataset([stamped(0)])
    refresh = kdo.callbacks.RolloutRefresh(other, lambda student, version: [stamped(version)])
    with pytest.raises(ValueError, match="`dataset` must be the PreparedDataset given to fit"):
        make_trainer().fit(trained, epochs=2, verbose=0, callbacks=[refresh])


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_batch_without_rows_or_positions_is_refused(shape):
    ids = np.zeros(shape, "int32")
    with pytest.raises(ValueError, match="at least one row and one position"):
        kdo.data.PreparedBatch.create(model_inputs=ids, target_ids=ids, loss_weights=np.ones(shape, "float32"))


@pytest.mark.parametrize("seeds", [(-1, -2), (2**63, 2**63 + 1), (2**64 - 1, 2**64 - 2), (0, 1)])
def test_different_seeds_give_different_orders(seeds):
    ids = np.arange(64, dtype="int32")[:, None]
    rows = kdo.data.PreparedBatch.create(model_inputs=ids, target_ids=ids, loss_weights=np.ones((64, 1), bool))
    orders = [kdo.data.PreparedDataset(rows, batch_size=64, shuffle=True, seed=s)[0][0].ravel() for s in seeds]
    assert not np.array_equal(*orders)


def test_keras_loss_and_batch_size_zero_are_refused():
    with pytest.raises(TypeError, match="Received the Keras loss MeanSquaredError"):
        make_trainer(loss=keras.losses.MeanSquaredError())
    with pytest.raises(ValueError, match="`batch_size` must be a whole number"):
        make_trainer().fit(make_batches([(2, 6)])[0], batch_size=0, verbose=0)
