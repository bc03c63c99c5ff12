"""Several processes write one store: each its own shards, and one merge that takes nothing on trust."""

import itertools
import shutil

import numpy as np
import pytest

from keras_diffusion_opd.data import StoreError, TeacherStore, concatenate_batches
from tests.stores import batches, content, write

GIVEN = batches(6)


def share(path, number, count=2, given=None, **options):
    return write(path, GIVEN[number::count] if given is None else given, writer=(number, count), **options)


def test_merged_store_holds_the_rows_writer_by_writer_whatever_their_timing(tmp_path):
    expected = None
    for number, order in enumerate(itertools.permutations(range(3))):
        path = tmp_path / str(number)
        for writer in order:
            assert share(path, writer, 3) is None
            if writer != order[-1]:
                with pytest.raises(StoreError, match=r"is written by 3 writers. Missing are"):
                    TeacherStore.merge(path)
        store = TeacherStore.merge(path)
        expected = expected or content(path)
        assert content(path) == expected
    whole = concatenate_batches([b for writer in range(3) for b in GIVEN[writer::3]])
    np.testing.assert_array_equal(store.batch(range(18)).target_ids, whole.target_ids)
    assert store.verify() == [] and content(path) == expected
    assert TeacherStore.merge(path).digest == store.digest, "a merge that is made again changes nothing"


def test_writer_that_is_not_done_is_refused(tmp_path):
    share(tmp_path, 0)

    def cut():
        yield GIVEN[1]
        raise KeyboardInterrupt

    from keras_diffusion_opd.data import PackedTopK

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, given=Lazy(cut()), writer=(1, 2), targets=PackedTopK(8, 90))
    with pytest.raises(StoreError, match=r"the writers \[1\] are not done"):
        TeacherStore.merge(tmp_path)
    share(tmp_path, 1)
    assert len(TeacherStore.merge(tmp_path)) == 18


class Lazy(list):
    """Batches of which only the first can be looked at before they are walked."""

    def __init__(self, walk):
        super().__init__([GIVEN[1]])
        self.walk = walk

    def __iter__(self):
        return self.walk


def test_gap_is_refused(tmp_path):
    share(tmp_path, 0), share(tmp_path, 1)
    (tmp_path / "shard-0001-000001.safetensors").unlink()
    with pytest.raises(StoreError, match=r"Missing: \['shard-0001-000001.safetensors'\]"):
        TeacherStore.merge(tmp_path)
    share(tmp_path, 1)
    assert TeacherStore.merge(tmp_path).verify() == []


def test_shard_too_many_is_refused(tmp_path):
    share(tmp_path, 0), share(tmp_path, 1)
    shutil.copy(tmp_path / "shard-0000-000000.safetensors", tmp_path / "shard-0000-000003.safetensors")
    with pytest.raises(StoreError, match=r"others: \['shard-0000-000003.safetensors'\]"):
        TeacherStore.merge(tmp_path)


def test_equal_rows_of_two_writers_are_refused_unless_allowed(tmp_path):
    share(tmp_path, 0), share(tmp_path, 1, given=GIVEN[0::2])
    with pytest.raises(StoreError, match=r"row 0 of shard-0001-000000.* is the same as row 0 of shard-0000-0"):
        TeacherStore.merge(tmp_path)
    assert len(TeacherStore.merge(tmp_path, allow_duplicates=True)) == 18


def test_shard_in_the_place_of_another_writer_is_refused(tmp_path):
    share(tmp_path, 0), share(tmp_path, 1)
    shutil.copy(tmp_path / "shard-0000-000000.safetensors", tmp_path / "shard-0001-000000.safetensors")
    with pytest.raises(StoreError, match="is the same as row 0 of shard-0000-000000"):
        TeacherStore.merge(tmp_path)


def test_other_settings_are_refused_by_the_second_writer_and_by_the_merge(tmp_path):
    share(tmp_path / "a", 0)
    with pytest.raises(StoreError, match="`writers` is 2 there, and 3 here"):
        share(tmp_path / "a", 1, 3)
    with pytest.raises(StoreError, match=r"`metadata\['corpus'\]`"):
        share(tmp_path / "a", 1, metadata={"corpus": "other"})
    share(tmp_path / "b", 1, metadata={"corpus": "other"})
    for path in (tmp_path / "b").iterdir():
        shutil.copy(path, tmp_path / "a")
    with pytest.raises(StoreError, match=r"writer-0001.json has other settings: `metadata\['corpus'\]`"):
        TeacherStore.merge(tmp_path / "a")


def test_directory_without_writers_is_refused(tmp_path):
    with pytest.raises(StoreError, match="neither store.json nor writer-0000.json"):
        TeacherStore.merge(tmp_path)
