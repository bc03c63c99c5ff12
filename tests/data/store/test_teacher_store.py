"""`TeacherStore`: what is written is what is read, row by row, and it is told whose it is."""

import json
import pickle

import numpy as np
import pytest

from keras_diffusion_opd.data import (
    DenseTargets,
    PackedDense,
    PackedHidden,
    PackedSampled,
    PackedTopK,
    PreparedBatch,
    PreparedDataset,
    Stamp,
    StoreError,
    TargetPacking,
    TeacherStore,
    TeacherTargets,
    TopKTargets,
    concatenate_batches,
)
from keras_diffusion_opd.data.row_digests import row_digests
from keras_diffusion_opd.provenance import digest
from tests.oracles import numpy, tensor
from tests.stores import VOCABULARY, batches, dense, write


def assert_same(read, expected, packing):
    """Equal in everything that was given, and in what the packing makes of the targets."""
    active = np.asarray(expected.loss_weights) > 0
    teacher = packing.decode(packing.encode(expected.teacher, active))
    for (name, a), (_, b) in zip(read.model_inputs.items(), expected.model_inputs.items(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
        assert a.dtype == b.dtype
    for a, b in ((read.target_ids, expected.target_ids), (read.loss_weights, expected.loss_weights)):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    for name, array in teacher.arrays().items():
        np.testing.assert_array_equal(read.teacher.arrays()[name], array)
    assert read.teacher.settings() == teacher.settings()


# ---- round trip ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_probs", ["int8", "float16", "float32"])
def test_rows_come_back_one_by_one_and_in_any_order(tmp_path, log_probs):
    given, packing = batches(), PackedTopK(8, VOCABULARY, log_probs)
    write(tmp_path / "s", given, targets=packing)
    store, whole = TeacherStore.open(tmp_path / "s"), concatenate_batches(given)
    assert len(store) == whole.rows == 12 and len(list((tmp_path / "s").glob("*.safetensors"))) == 3
    for index in range(12):
        assert_same(store[index], whole.map(lambda x, i=index: x[i : i + 1]), packing)
    order = [11, 0, 5, 5, 4]
    assert_same(store.batch(order), whole.map(lambda x: x[order]), packing)
    store.batch(order).validate()
    np.testing.assert_array_equal(store.row_digests(), row_digests(whole.target_ids))
    np.testing.assert_array_equal(store.row_digests([3]), row_digests(whole.target_ids[3:4]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dense_targets_come_back_in_their_dtype(tmp_path, dtype):
    given = dense()
    store = write(tmp_path / "s", [given], targets=PackedDense(20, dtype))
    read = store.batch([2, 0])
    assert read.teacher.logits.dtype.name == dtype and read.loss_weights.dtype == bool
    np.testing.assert_array_equal(read.teacher.logits, given.teacher.logits[[2, 0]].astype(read.teacher.logits.dtype))
    np.testing.assert_array_equal(read.model_inputs, given.target_ids[[2, 0]])


def test_any_nest_of_inputs_and_any_row_shape_come_back(tmp_path):
    given = dense()
    inputs = {"b": (np.ones((3, 5, 2, 2), "float16"), [np.arange(3, dtype="int64")]), "a": np.eye(3) > 0, "c": None}
    given = PreparedBatch.create(
        model_inputs=inputs, target_ids=given.target_ids, loss_weights=given.loss_weights, teacher=given.teacher
    )
    read = write(tmp_path / "s", [given], targets=PackedDense(20)).batch([1, 2]).model_inputs
    assert list(read) == ["b", "a", "c"] and isinstance(read["b"], tuple) and isinstance(read["b"][1], list)
    assert read["b"][0].shape == (2, 5, 2, 2) and read["b"][1][0].tolist() == [1, 2] and read["c"] is None
    np.testing.assert_array_equal(read["a"], inputs["a"][1:])


def test_tensors_of_the_backend_are_written_as_numpy_is(tmp_path):
    given = dense()
    lifted = given.map(lambda x: tensor(x, x.dtype.name))
    write(tmp_path / "a", [given], targets=PackedDense(20))
    write(tmp_path / "b", [lifted], targets=PackedDense(20))
    assert TeacherStore.open(tmp_path / "a").digest == TeacherStore.open(tmp_path / "b").digest
    half = given.map(lambda x: tensor(x, "bfloat16" if x.dtype.name == "float32" else x.dtype.name))
    read = write(tmp_path / "c", [half], targets=PackedDense(20, "bfloat16")).batch([0])
    np.testing.assert_array_equal(
        read.teacher.logits.astype("float32"), numpy(half.teacher.logits)[:1].astype("float32")
    )


def test_teacher_is_asked_batch_by_batch_and_makes_top_k_of_logits(tmp_path):
    given = dense()
    logits = given.teacher.logits
    bare = PreparedBatch(given.model_inputs, given.target_ids, given.loss_weights)
    packing = PackedTopK(6, 20, "float32", temperature=2.0)
    asked = []

    def teacher(batch):
        asked.append(batch.rows)
        return tensor(logits, "float32")

    store = write(tmp_path / "s", [bare], targets=packing, teacher=teacher)
    expected = TopKTargets.from_logits(logits, 6, temperature=2.0)
    read = store.batch(range(3)).teacher
    assert asked == [3]
    np.testing.assert_array_equal(read.ids, numpy(expected.ids))
    np.testing.assert_array_equal(read.log_probs, numpy(expected.log_probs))
    assert read.temperature == 2.0 and store.fingerprints["temperature"] == 2.0
    # A dense teacher in the batch serves as well.
    again = write(tmp_path / "t", [given], targets=packing)
    np.testing.assert_array_equal(again.batch(range(3)).teacher.ids, read.ids)


def test_stamps_come_back_and_a_batch_is_as_old_as_its_oldest_row(tmp_path):
    store = write(tmp_path / "s", batches(stamped=True))
    assert store[0].stamp == Stamp(policy_version=2) and store.batch([9, 3]).stamp.policy_version == 3
    assert store.oldest_policy_version() == 2
    dataset = PreparedDataset(store, batch_size=4, max_staleness=1)
    dataset.policy_version = 5
    assert dataset.staleness() == 3
    mixed = [*batches(1, stamped=True), *batches(1, seed=1)]
    store = write(tmp_path / "m", mixed)
    assert store.batch([0, 3]).stamp is None and store.oldest_policy_version() is None


def test_store_of_a_realistic_shape_takes_300_bytes_a_token(tmp_path):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 128256, (2, 64)).astype("int32")
    chosen = np.argsort(rng.random((2, 64, 4096)), -1)[..., :64].astype("int32") * 31
    log_probs = np.log(rng.dirichlet(np.ones(65), (2, 64))).astype("float32")
    targets = TopKTargets(chosen, log_probs[..., :64], log_tail=log_probs[..., 64])
    given = PreparedBatch.create(
        model_inputs={"token_ids": ids}, target_ids=ids, loss_weights=np.ones((2, 64), "float32"), teacher=targets
    )
    for log_probs, most in (("int8", 240), ("float16", 300)):
        store = write(tmp_path / log_probs, [given], targets=PackedTopK(64, 128256, log_probs))
        assert store.bytes_per_token <= most, "targets, ids, inputs, weights and digests together"


# ---- rows of different lengths --------------------------------------------------------------------------------


def test_rows_keep_their_length_and_are_padded_where_it_is_said_how(tmp_path):
    given = [*batches(1, 2, 5), *batches(1, 2, 3, seed=1)]
    write(tmp_path / "s", given)
    store = TeacherStore.open(tmp_path / "s", padding={"token_ids": 77})
    assert store[0].target_ids.shape == (1, 5) and store[3].target_ids.shape == (1, 3)
    read = store.batch([3, 0]).validate()
    np.testing.assert_array_equal(read.model_inputs["token_ids"][0, 3:], 77)
    np.testing.assert_array_equal(read.loss_weights[0, 3:], 0)
    np.testing.assert_array_equal(read.target_ids[0, :3], given[1].target_ids[1])
    np.testing.assert_array_equal(read.target_ids[1], given[0].target_ids[0])
    with pytest.raises(ValueError, match=r"Rows of different lengths \[3, 5\].*padding=\{'token_ids': ...\}"):
        TeacherStore.open(tmp_path / "s").batch([3, 0])
    with pytest.raises(ValueError, match=r"`padding` must name inputs, \['token_ids', 'time'\]. Received \['tokens'\]"):
        TeacherStore.open(tmp_path / "s", padding={"tokens": 0})


# ---- whose it is ----------------------------------------------------------------------------------------------


def test_one_changed_weight_of_the_teacher_is_refused(tmp_path):
    weights = [np.ones((4, 4), "float32"), np.zeros(4, "float32")]
    store = write(tmp_path / "s", fingerprints={"teacher": weights, "tokenizer": "2" * 64, "mask_id": VOCABULARY - 1})
    expected = {
        "teacher": digest(weights),
        "tokenizer": "2" * 64,
        "mask_id": 89,
        "vocabulary_size": 90,
        "temperature": 1.0,
    }
    assert store.fingerprints == expected
    TeacherStore.open(tmp_path / "s", expect={"teacher": weights})
    TeacherStore.open(tmp_path / "s", expect=expected)
    weights[0][2, 1] = np.nextafter(np.float32(1), np.float32(2))
    with pytest.raises(StoreError, match=r"not the store that is expected: `teacher` is '.*' there, not '"):
        TeacherStore.open(tmp_path / "s", expect={"teacher": weights})


@pytest.mark.parametrize(
    ("expect", "message"),
    [
        ({"tokenizer": "3" * 64}, "`tokenizer` is None there"),
        ({"vocabulary_size": 91}, "`vocabulary_size` is 90 there, not 91"),
        ({"temperature": 2.0}, "`temperature` is 1.0 there, not 2.0"),
        ({"mask_id": 0}, "`mask_id` is None there, not 0"),
        ({"theacher": "1" * 64}, "`expect` must be a mapping with some of the keys"),
        ({"teacher": "big model"}, "must be a digest"),
    ],
)
def test_store_of_something_else_is_refused(tmp_path, expect, message):
    write(tmp_path / "s", batches(1))
    with pytest.raises(ValueError, match=message):
        TeacherStore.open(tmp_path / "s", expect=expect)


def test_metadata_come_back_and_decide_the_identity(tmp_path):
    first = write(tmp_path / "a", batches(1), metadata={"rate": 0.5, "shape": (1, 2)})
    assert first.metadata == {"rate": 0.5, "shape": [1, 2]}
    assert first.digest != write(tmp_path / "b", batches(1), metadata={"rate": 0.25}).digest
    assert first.digest == write(tmp_path / "c", batches(1), metadata={"shape": [1, 2], "rate": 0.5}).digest


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"metadata": {"loss": float("nan")}}, ValueError, r"`metadata\['loss'\]` must be finite"),
        ({"metadata": {"step": 3}}, ValueError, "reserved key 'step'"),
        ({"metadata": [1]}, TypeError, "`metadata` must be None or a mapping"),
        ({"fingerprints": {}}, ValueError, "`fingerprints` must name the teacher"),
        ({"fingerprints": {"teacher": "x"}}, ValueError, "must be a digest"),
        ({"targets": "top_k"}, TypeError, "`targets` must be a packing"),
        ({"teacher": 3}, TypeError, "`teacher` must be None or a function"),
        ({"writer": (2, 2)}, ValueError, "`writer` must be"),
        ({"rows_per_shard": 0}, ValueError, "`rows_per_shard` must be a whole number"),
    ],
)
def test_wrong_arguments_write_nothing(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        write(tmp_path / "s", batches(1), **options)
    assert not (tmp_path / "s").exists()


# ---- what cannot be stored ------------------------------------------------------------------------------------


def test_nothing_to_store_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`batches` is empty"):
        write(tmp_path / "s", [], targets=PackedTopK(8, VOCABULARY))


@pytest.mark.parametrize("value, place", [(np.nan, (1, 2)), (np.inf, (0, 4))])
def test_teacher_that_says_nan_is_refused_with_its_place(tmp_path, value, place):
    given = dense()
    given.teacher.logits[(*place, 3)] = value
    with pytest.raises(ValueError, match=rf"Batch 0: .*NaN.*row {place[0]}, position {place[1]}"):
        write(tmp_path / "s", [given], targets=PackedDense(20))


def test_logits_that_overflow_half_precision_are_refused(tmp_path):
    given = dense()
    given.teacher.logits[0, 0, 0] = 1e5
    with pytest.raises(ValueError, match=r"`teacher logits` must fit in float16. Received 100000.0. Choose bfloat16"):
        write(tmp_path / "s", [given], targets=PackedDense(20))


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        (PackedTopK(9, VOCABULARY), "must have k=9, temperature=1.0, tail='bucket'. Received k=8"),
        (PackedTopK(8, VOCABULARY, temperature=2.0), "temperature=2.0"),
        (PackedTopK(8, 40), "Batch 0: .*40"),
        (PackedDense(20), "must give logits or targets of kind 'dense'. Received TopKTargets"),
    ],
)
def test_targets_that_do_not_fit_the_packing_are_refused(tmp_path, packing, message):
    with pytest.raises((ValueError, TypeError), match=message):
        write(tmp_path / "s", batches(1), targets=packing)


def test_batches_of_another_form_are_refused(tmp_path):
    first, second = batches(2)
    other = PreparedBatch(
        dict(second.model_inputs, x=np.zeros(3)), second.target_ids, second.loss_weights, second.teacher
    )
    with pytest.raises(ValueError, match="Batch 1: `model_inputs` of all batches must be the same nest"):
        write(tmp_path / "a", [first, other])
    wide = second.map(lambda x: x.astype("int64") if x.dtype == "int32" else x)
    with pytest.raises(ValueError, match=r"Batch 1: `inputs.0` of all batches must have one dtype.*Received int64"):
        write(tmp_path / "b", [first, wide])


def test_batch_without_a_teacher_is_refused(tmp_path):
    batch = batches(1)[0]
    bare = PreparedBatch(batch.model_inputs, batch.target_ids, batch.loss_weights)
    with pytest.raises(ValueError, match="a batch must have a teacher, or `teacher` must be given"):
        write(tmp_path / "s", [bare], targets=PackedTopK(8, VOCABULARY))


# ---- reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indices", [[12], [-1], []])
def test_rows_that_do_not_exist_are_an_index_error(tmp_path, indices):
    store = write(tmp_path / "s")
    with pytest.raises(IndexError):
        store.batch(indices)
    with pytest.raises(IndexError, match="Row 12 of 12"):
        store[12]


def test_only_what_is_asked_for_is_read(tmp_path, monkeypatch):
    from keras_diffusion_opd.provenance import row_shard

    write(tmp_path / "s", batches(20, 4, 50), rows_per_shard=80)
    size = (tmp_path / "s" / "shard-0000-000000.safetensors").stat().st_size
    read = []
    exactly = row_shard._exactly

    def counted(file, start, count, path):
        read.append(count)
        return exactly(file, start, count, path)

    monkeypatch.setattr(row_shard, "_exactly", counted)
    store = TeacherStore.open(tmp_path / "s")
    assert read == []
    store[41]
    assert sum(read) < size / 8  # the index of 80 rows, and one row of 80


def test_store_can_be_pickled_for_workers(tmp_path):
    store = write(tmp_path / "s")
    store[0]
    again = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(again[7].target_ids, store[7].target_ids)


def test_missing_store_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"store.json is missing"):
        TeacherStore.open(tmp_path)


# ---- other kinds of targets ------------------------------------------------------------------------------------


def test_another_kind_joins_the_registry():
    assert {"top_k", "dense", "sampled", "hidden"} <= set(TargetPacking.registry)
    with pytest.raises(StoreError, match=r"kind 'odd'. Known kinds: \['dense'"):
        TargetPacking.from_json({"kind": "odd"})
    with pytest.raises(StoreError, match="the packing of the store's targets does not hold"):
        TargetPacking.from_json({"kind": "dense", "vocabulary_size": -1})


@pytest.mark.parametrize(
    "packing",
    [
        PackedTopK(4, 9, "float16", temperature=0.5, tail="renormalize"),
        PackedDense(9, "bfloat16"),
        PackedSampled(3, 9, "uint16", temperature=2.0, entropy=True),
        PackedHidden(4, 9, "5" * 64, softcap=30.0, transposed=True),
    ],
)
def test_packings_come_back_from_json(packing):
    assert TargetPacking.from_json(json.loads(json.dumps(packing.to_json()))) == packing


@pytest.mark.skipif("sampled" not in TeacherTargets.registry, reason="this release has no sampled targets")
def test_sampled_targets_come_back(tmp_path):
    given = dense()
    targets = TeacherTargets.registry["sampled"].from_logits(given.teacher.logits, 6, seed=3)
    given = PreparedBatch(given.model_inputs, given.target_ids, given.loss_weights, targets)
    n = targets.ids.shape[-1]
    read = write(tmp_path / "s", [given], targets=PackedSampled(n, 20, entropy=True)).batch([2, 0]).teacher
    for name, array in targets.arrays().items():
        np.testing.assert_array_equal(read.arrays()[name], numpy(array)[[2, 0]])
    with pytest.raises(ValueError, match=r"sampled targets must have n=5.*Received n="):
        write(tmp_path / "t", [given], targets=PackedSampled(5, 20, entropy=True))


@pytest.mark.skipif("hidden" not in TeacherTargets.registry, reason="this release has no hidden targets")
def test_hidden_states_come_back_with_their_head_and_with_no_other(tmp_path):
    rng = np.random.default_rng(0)
    head = {"head": rng.normal(size=(4, 20)).astype("float32"), "bias": np.zeros(20, "float32")}
    hidden = rng.normal(size=(3, 5, 4)).astype("float32")
    given = dense()
    targets = TeacherTargets.registry["hidden"](hidden, head["head"], bias=head["bias"], softcap=30.0)
    given = PreparedBatch(given.model_inputs, given.target_ids, given.loss_weights, targets)
    packing = PackedHidden(4, 20, head, "float32", softcap=30.0)
    write(tmp_path / "s", [given], targets=packing)
    read = TeacherStore.open(tmp_path / "s", head=head).batch([1]).teacher
    np.testing.assert_array_equal(read.hidden, hidden[1:2])
    np.testing.assert_allclose(numpy(read.logits()), numpy(targets.logits())[1:2], rtol=1e-6)
    with pytest.raises(StoreError, match=r"hidden states need their head"):
        TeacherStore.open(tmp_path / "s").batch([1])
    with pytest.raises(StoreError, match="written with another head"):
        TeacherStore.open(tmp_path / "s", head={"head": head["head"] + 1, "bias": head["bias"]})


def test_hidden_states_without_a_head_given_are_not_read():
    with pytest.raises(StoreError, match="hidden states need their head, of digest 555555555555"):
        PackedHidden(4, 9, "5" * 64).decode({"hidden": np.zeros((1, 1, 4))})


def test_targets_of_another_type_are_refused_by_each_packing():
    with pytest.raises(ValueError, match="`targets` must be TopKTargets. Received DenseTargets"):
        PackedTopK(2, 4).encode(DenseTargets(np.zeros((1, 1, 4))), np.ones((1, 1), bool))
    with pytest.raises(ValueError, match="`targets` must be DenseTargets. Received TopKTargets"):
        PackedDense(4).encode(batches(1)[0].teacher, np.ones((3, 5), bool))
