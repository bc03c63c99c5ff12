"""A store as a dataset: in memory or not, through Keras or through grain, the rows are the same."""

import functools
import operator

import keras
import numpy as np
import pytest

from keras_diffusion_opd.data import PackedDense, PreparedDataset, TeacherStore, concatenate_batches
from keras_diffusion_opd.losses import DistillationLoss
from keras_diffusion_opd.trainers import PreparedTrainer
from tests.stores import batches, dense, write

ROWS = 12


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write(tmp_path_factory.mktemp("datasets") / "s", batches())


def ids(batch):
    return [row.tobytes() for row in np.asarray(batch.target_ids)]


def drawn(batches):
    return functools.reduce(operator.iadd, (ids(batch) for batch in batches), [])


# ---- Keras ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 1, 5, 12, 20])
@pytest.mark.parametrize("shuffle", [False, True])
def test_store_gives_the_batches_that_its_rows_give_in_memory(store, batch_size, shuffle):
    options = {"batch_size": batch_size, "shuffle": shuffle, "seed": 3}
    rows = store.batch(range(ROWS))
    split = [rows.map(lambda x, i=i: x[i : i + 1]) for i in range(ROWS)]
    from_store, from_memory = PreparedDataset(store, **options), PreparedDataset(split, **options)
    assert len(from_store) == len(from_memory)
    for epoch in (0, 4):
        from_store.set_epoch(epoch), from_memory.set_epoch(epoch)
        for index in range(len(from_store)):
            a, b = from_store.batch(index), from_memory.batch(index)
            assert ids(a) == ids(b)
            for name, array in a.teacher.arrays().items():
                np.testing.assert_array_equal(array, b.teacher.arrays()[name])


def test_dataset_of_a_store_names_it_by_its_digest_and_takes_no_adapter(store):
    settings = PreparedDataset(store, batch_size=5).settings()
    assert settings["store"] == {"rows": ROWS, "digest": store.digest} and settings["batches"] == 3
    with pytest.raises(ValueError, match="`adapter` must be None for a store"):
        PreparedDataset(store, adapter=lambda row: row)


def test_store_is_replaced_by_one_with_as_many_batches(store, tmp_path):
    other = write(tmp_path / "o", batches(seed=3))
    dataset = PreparedDataset(store, batch_size=5)
    dataset.replace(other)
    assert ids(dataset.batch(0)) == ids(other.batch(range(5)))
    with pytest.raises(ValueError, match=r"`replace` must keep the number of batches, 3. Received 1"):
        dataset.replace(write(tmp_path / "p", batches(1)))


def test_training_from_a_store_equals_training_from_memory(tmp_path):
    """Float32 logits are kept as they are, so the weights are equal bit for bit."""
    given = dense()
    stored = write(tmp_path / "s", [given], targets=PackedDense(20, "float32"))
    results = []
    for source in (
        PreparedDataset(given, batch_size=2),
        PreparedDataset(stored, batch_size=2),
        stored.grain_loader(batch_size=2, shuffle=False),
    ):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((5,), dtype="int32")
        student = keras.Model(inputs, keras.layers.Dense(20)(keras.layers.Embedding(20, 4)(inputs)))
        trainer = PreparedTrainer(student, DistillationLoss())
        trainer.compile(keras.optimizers.SGD(0.5))
        trainer.fit(source, epochs=1, steps_per_epoch=2, verbose=0)
        results.append(student.get_weights())
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


# ---- grain ---------------------------------------------------------------------------------------------------

grain = pytest.importorskip("grain.python")


def test_grain_reads_every_row_once_in_an_order_of_the_seed(store):
    def order(**options):
        return drawn(store.grain_loader(batch_size=5, **options))

    everything = ids(store.batch(range(ROWS)))
    assert order(shuffle=False) == everything
    assert sorted(order(seed=1)) == sorted(everything) != order(seed=1)
    assert order(seed=1) == order(seed=1) != order(seed=2)
    twice = order(seed=1, num_epochs=2)
    assert sorted(twice[:ROWS]) == sorted(twice[ROWS:]) and twice[:ROWS] != twice[ROWS:]
    assert [batch.rows for batch in store.grain_loader(batch_size=5, drop_remainder=True)] == [5, 5]


def test_processes_share_the_rows(store):
    shares = [
        drawn(store.grain_loader(batch_size=4, seed=1, shard_options=grain.ShardOptions(shard_index=i, shard_count=3)))
        for i in range(3)
    ]
    assert [len(share) for share in shares] == [4, 4, 4]
    assert sorted(functools.reduce(operator.iadd, shares, [])) == sorted(ids(store.batch(range(ROWS))))


@pytest.mark.parametrize("at", range(6))
def test_position_is_restored_exactly(store, at):
    loader = store.grain_loader(batch_size=5, seed=7, num_epochs=2)
    walk = iter(loader)
    for _ in range(at):
        next(walk, None)
    state = walk.get_state()
    rest = [ids(batch) for batch in walk]
    again = iter(TeacherStore.open(store.path).grain_loader(batch_size=5, seed=7, num_epochs=2))
    again.set_state(state)
    assert [ids(batch) for batch in again] == rest


def test_position_in_another_store_is_refused(store, tmp_path):
    state = iter(store.grain_loader(batch_size=5)).get_state()
    other = iter(write(tmp_path / "o", batches(seed=3)).grain_loader(batch_size=5))
    with pytest.raises(ValueError, match=store.digest[:12]):
        other.set_state(state)


def test_source_serves_a_pipeline_of_ones_own(store):
    source = store.grain_source()
    assert isinstance(source, grain.RandomAccessDataSource) and len(source) == ROWS
    assert repr(source) == f"TeacherStore({store.digest})"
    whole = grain.MapDataset.source(source).seed(3).shuffle().batch(4, batch_fn=concatenate_batches)
    assert sorted(drawn(whole)) == sorted(ids(store.batch(range(ROWS))))
    assert [batch.rows for batch in whole] == [4, 4, 4]
