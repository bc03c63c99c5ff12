"""`PreparedDataset`: which batches, in which order, how old."""

import numpy as np
import pytest
from tests.oracles import numpy, tensor

from keras_diffusion_opd.data import DenseTargets, PreparedBatch, PreparedDataset, StaleBatchError, Stamp


def rows(first, count, version=None):
    """Rows numbered from `first`: inputs, ids, weights and teacher all hold the number."""
    numbers = np.arange(first, first + count)
    return PreparedBatch.create(
        model_inputs={"n": numbers},
        target_ids=np.stack([numbers] * 2, 1),
        loss_weights=np.stack([numbers + 1.0] * 2, 1).astype("float32"),
        teacher=DenseTargets((numbers[:, None, None] + np.zeros((1, 2, 100))).astype("float32")),
        stamp=None if version is None else Stamp(policy_version=version),
    )


def numbers(dataset):
    return [dataset[i][0]["n"].tolist() for i in range(len(dataset))]


# ---- which batches -------------------------------------------------------------------------------------


def test_batches_come_as_they_are_in_their_order():
    batches = [rows(0, 2), rows(2, 3)]
    dataset = PreparedDataset(batches)
    assert len(dataset) == dataset.num_batches == 2
    assert dataset.batch(0) is batches[0]
    x, y, sample_weight = dataset[1]
    assert x is batches[1].model_inputs and y["target_ids"] is batches[1].target_ids
    assert sample_weight is batches[1].loss_weights


def test_rows_of_all_batches_are_cut_anew_with_the_last_batch_short():
    dataset = PreparedDataset([rows(0, 2), rows(2, 3)], batch_size=2)
    assert numbers(dataset) == [[0, 1], [2, 3], [4]]


def test_a_single_batch_is_a_dataset():
    assert len(PreparedDataset(rows(0, 5))) == 1
    assert numbers(PreparedDataset(rows(0, 3), batch_size=1)) == [[0], [1], [2]]


def test_rows_of_tensors_are_cut_too():
    lifted = rows(0, 3).map(lambda x: tensor(x, x.dtype.name.replace("64", "32")))
    x, _, _ = PreparedDataset(lifted, batch_size=2, shuffle=True, seed=1)[1]
    assert numpy(x["n"]).shape == (1,)


@pytest.mark.parametrize("index", [-1, 2])
def test_batch_that_does_not_exist_is_an_index_error(index):
    with pytest.raises(IndexError, match=f"Batch {index} of 2"):
        PreparedDataset([rows(0, 1), rows(1, 1)]).batch(index)


# ---- order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 2])
def test_shuffled_order_is_a_function_of_seed_and_epoch_alone(batch_size):
    def order(seed, epoch):
        dataset = PreparedDataset([rows(i, 1) for i in range(12)], batch_size=batch_size, shuffle=True, seed=seed)
        dataset[0]
        dataset.set_epoch(epoch)
        return sum(numbers(dataset), [])

    assert order(1, 3) == order(1, 3)
    assert len({tuple(order(s, e)) for s in (0, 1) for e in (0, 1, 2)}) == 6
    assert sorted(order(1, 3)) == list(range(12))


def test_without_shuffle_every_epoch_is_the_same():
    dataset = PreparedDataset([rows(i, 1) for i in range(4)])
    dataset.set_epoch(5)
    assert numbers(dataset) == [[0], [1], [2], [3]]


def test_shuffled_rows_keep_their_ids_weights_and_teacher_with_them():
    dataset = PreparedDataset(rows(0, 9), batch_size=4, shuffle=True, seed=3)
    for index in range(len(dataset)):
        batch = dataset.batch(index)
        n = batch.model_inputs["n"]
        np.testing.assert_array_equal(batch.target_ids[:, 0], n)
        np.testing.assert_array_equal(batch.loss_weights[:, 1], n + 1)
        np.testing.assert_array_equal(batch.teacher.logits[:, 1, 7], n)


# ---- raw items -----------------------------------------------------------------------------------------


def test_adapter_is_called_once_per_batch_with_the_identical_raw_object():
    raw, seen = [object(), object()], []

    def adapter(item):
        seen.append(item)
        return rows(len(seen), 1)

    dataset = PreparedDataset(raw, adapter=adapter)
    assert seen == []
    dataset[1]
    assert len(seen) == 1 and seen[0] is raw[1]


def test_adapter_is_called_once_per_item_when_rows_are_cut_anew():
    seen = []
    dataset = PreparedDataset([0, 1, 2], batch_size=2, adapter=lambda i: (seen.append(i), rows(i, 1))[1])
    numbers(dataset), numbers(dataset)
    assert seen == [0, 1, 2]


def test_adapter_that_returns_something_else_is_refused():
    with pytest.raises(TypeError, match="`adapter` must return PreparedBatch objects. Received dict for item 0"):
        PreparedDataset([1], adapter=lambda raw: {})[0]


def test_adapter_is_validated_batch_by_batch():
    broken = PreparedBatch(np.zeros(1), np.zeros((1, 2), "int32"), np.full((1, 2), np.nan))
    with pytest.raises(ValueError, match="`loss_weights` must contain only finite values"):
        PreparedDataset([1], adapter=lambda raw: broken)[0]


def test_adapter_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="`adapter` must be None or a function.*Received 3"):
        PreparedDataset([1], adapter=3)


# ---- sources that do not serve ---------------------------------------------------------------------------


def test_generator_is_refused_and_sent_to_fit():
    with pytest.raises(TypeError, match=r"`batches_or_store` must be a PreparedBatch.*Received generator.*fit\(\)"):
        PreparedDataset(b for b in [rows(0, 1)])


def test_empty_source_is_refused():
    with pytest.raises(ValueError, match="`batches_or_store` is empty"):
        PreparedDataset([])


def test_items_that_are_no_batches_are_refused_with_the_mend():
    with pytest.raises(TypeError, match="`batches_or_store` must hold PreparedBatch.*Received tuple for item 0.*adapter="):
        PreparedDataset([rows(0, 1).as_fit()])[0]


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True])
def test_batch_size_that_is_no_count_is_refused(batch_size):
    with pytest.raises(ValueError, match="`batch_size` must be a whole number of at least 1. Received"):
        PreparedDataset(rows(0, 2), batch_size=batch_size)


@pytest.mark.parametrize("max_staleness", [-1, 1.5, "2", True])
def test_max_staleness_that_is_no_count_is_refused(max_staleness):
    with pytest.raises(ValueError, match="`max_staleness` must be None or a whole number >= 0. Received"):
        PreparedDataset(rows(0, 2), max_staleness=max_staleness)


@pytest.mark.parametrize("seed", [1.5, "1", None, True])
def test_seed_that_is_no_whole_number_is_refused(seed):
    with pytest.raises(TypeError, match="`seed` must be a whole number. Received"):
        PreparedDataset(rows(0, 2), seed=seed)


# ---- age -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 2])
def test_batch_older_than_allowed_is_refused_and_one_as_old_as_allowed_is_not(batch_size):
    dataset = PreparedDataset([rows(0, 2, version=3)], batch_size=batch_size, max_staleness=2)
    dataset.policy_version = 5
    dataset[0]
    dataset.policy_version = 6
    with pytest.raises(
        StaleBatchError, match=r"Batch 0 was generated 3 updates ago \(policy version 3, now 6\).*max_staleness is 2"
    ):
        dataset[0]


def test_batch_without_a_stamp_is_refused_when_age_matters_and_only_then():
    with pytest.raises(StaleBatchError, match=r"Batch 0 has no stamp.*max_staleness=0.*Stamp\(policy_version"):
        PreparedDataset(rows(0, 1), max_staleness=0)[0]
    PreparedDataset(rows(0, 1))[0]


def test_one_batch_without_a_stamp_among_rows_cut_anew_is_refused_too():
    dataset = PreparedDataset([rows(0, 1, version=0), rows(1, 1)], batch_size=2, max_staleness=9)
    with pytest.raises(StaleBatchError, match="has no stamp"):
        dataset[0]


def test_rows_cut_anew_are_as_old_as_the_oldest():
    dataset = PreparedDataset([rows(0, 1, version=5), rows(1, 1, version=2)], batch_size=1, max_staleness=3)
    dataset.policy_version = 5
    dataset[0]
    dataset.policy_version = 6
    with pytest.raises(StaleBatchError, match="policy version 2, now 6"):
        dataset[0]


# ---- fresh rollouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size, fresh", [(None, [rows(50, 1), rows(60, 1)]), (2, rows(50, 3))])
def test_replace_puts_fresh_batches_in_place(batch_size, fresh):
    dataset = PreparedDataset([rows(0, 2), rows(2, 2)], batch_size=batch_size, max_staleness=None)
    dataset.replace(fresh)
    assert numbers(dataset)[0][0] == 50 and len(dataset) == 2


def test_replace_by_another_number_is_refused_and_leaves_the_old():
    dataset = PreparedDataset([rows(0, 2), rows(2, 2)])
    with pytest.raises(ValueError, match="`replace` must keep the number of batches, 2. Received 1"):
        dataset.replace([rows(50, 2)])
    assert numbers(dataset) == [[0, 1], [2, 3]]


def test_replace_by_something_broken_is_refused_and_leaves_the_old():
    dataset = PreparedDataset([rows(0, 2), rows(2, 2)], batch_size=2)
    with pytest.raises(TypeError, match="must hold PreparedBatch"):
        dataset.replace([rows(50, 2), 3])
    assert numbers(dataset) == [[0, 1], [2, 3]]
