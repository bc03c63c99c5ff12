"""The loss from hidden states, a few positions at a time, is the dense one: value, gradients, and every rule of it."""

import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.data import DenseTargets, HiddenTargets, OutputHead, PreparedBatch
from keras_diffusion_opd.losses import ChunkedDistillationLoss, DistillationLoss, HiddenScores, chunked_distillation
from tests.heads import (
    BIAS,
    FORWARD_ONLY,
    HEAD,
    HIDDEN,
    IDS,
    KINDS,
    LOW_B,
    OFF,
    TEACHER_LOGITS,
    WEIGHTS,
    A,
    D,
    V,
    batch_of,
    draw,
    relative,
    teachers,
    value_and_grads,
)
from tests.oracles import BACKEND, DIVERGENCES, cross_entropy, float64_scope, numpy, reference, softmax, tensor

MIXED = {"soft_weight": 0.7, "hard_weight": 0.3}
CASES = [(kind, d) for kind in KINDS for d in DIVERGENCES if kind not in FORWARD_ONLY or d == "forward_kl"]
SAME = 1e-5  # float32 sums of a few dozen terms, taken in another order


def dense(batch, **settings):
    """The dense loss as a function of hidden states, head, bias and low-rank pair."""

    def mean(hidden, head, bias, a, b):
        whole = OutputHead(head + ops.matmul(a, b), bias=bias, softcap=5.0)
        return DistillationLoss(**settings)(whole.logits(hidden), batch).primary.mean()

    return mean


def chunked(batch, **settings):
    def mean(hidden, head, bias, a, b):
        output = chunked_distillation(hidden, head, batch, bias=bias, softcap=5.0, low_rank=(a, b), **settings)
        return output.primary.mean()

    return mean


def assert_same(found, expected, tolerance=SAME):
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert relative(ours, theirs) < tolerance


@pytest.mark.parametrize(("kind", "divergence"), CASES)
def test_value_and_gradients_equal_the_dense_loss(kind, divergence):
    # Ten positions in chunks of 3: the last is short. With bias, softcap, LoRA and T = 2.
    batch = batch_of(teachers(2.0)[kind])
    settings = {"divergence": divergence, "temperature": 2.0, **MIXED}
    arrays = (HIDDEN, HEAD, BIAS, A, LOW_B)
    expected = value_and_grads(dense(batch, **settings), *arrays)
    assert_same(value_and_grads(chunked(batch, chunk_size=3, **settings), *arrays), expected)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_value_equals_the_formula_in_float64(divergence):
    logits = HIDDEN.astype("float64") @ HEAD.astype("float64")
    soft = (WEIGHTS * reference(divergence, logits, TEACHER_LOGITS, 2.0)).sum() / WEIGHTS.sum()
    hard = (WEIGHTS * cross_entropy(logits, IDS)).sum() / WEIGHTS.sum()
    batch = batch_of(DenseTargets(TEACHER_LOGITS))
    settings = {"divergence": divergence, "temperature": 2.0, "chunk_size": 4, **MIXED}
    output = chunked_distillation(tensor(HIDDEN), tensor(HEAD), batch, **settings)
    assert float(numpy(output.metrics["distill/soft_loss"].mean())) == pytest.approx(soft, rel=SAME)
    assert float(numpy(output.metrics["distill/hard_loss"].mean())) == pytest.approx(hard, rel=SAME)
    assert float(numpy(output.primary.mean())) == pytest.approx(0.7 * soft + 0.3 * hard, rel=SAME)


def test_gradient_equals_the_formula_in_float64():
    hidden, head, weights = (x.astype("float64") for x in (HIDDEN, HEAD, WEIGHTS))
    g = 2.0 * (softmax(hidden @ head, 2.0) - softmax(TEACHER_LOGITS, 2.0)) * (weights / weights.sum())[..., None]
    batch = batch_of(DenseTargets(TEACHER_LOGITS))

    def mean(hidden, head):
        return chunked_distillation(hidden, head, batch, temperature=2.0, chunk_size=3).primary.mean()

    _, (of_hidden, of_head) = value_and_grads(mean, HIDDEN, HEAD)
    assert relative(of_hidden, g @ head.T) < SAME
    assert relative(of_head, np.einsum("bld,blv->dv", hidden, g)) < SAME


def test_float64_stays_float64():
    with float64_scope():
        arrays = [tensor(x, "float64") for x in (HIDDEN, HEAD)]
        batch = batch_of(DenseTargets(tensor(TEACHER_LOGITS, "float64")), tensor(WEIGHTS, "float64"))
        value = numpy(chunked_distillation(*arrays, batch, chunk_size=3).primary.mean())
    logits = HIDDEN.astype("float64") @ HEAD.astype("float64")
    expected = (WEIGHTS * reference("forward_kl", logits, TEACHER_LOGITS)).sum() / WEIGHTS.sum()
    assert value.dtype == "float64" and float(value) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["hidden", "bucket"])
def test_chunk_size_changes_nothing(kind):
    batch = batch_of(teachers()[kind])
    found = [
        value_and_grads(chunked(batch, chunk_size=size, **MIXED), HIDDEN, HEAD, BIAS, A, LOW_B) for size in (1, 4, 1000)
    ]
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.parametrize("kind", ["dense", "hidden"])
def test_tied_embedding_gives_the_transposed_gradient(kind):
    batch = batch_of(teachers()[kind])

    def mean(hidden, head, transposed):
        return chunked_distillation(hidden, head, batch, transposed=transposed, chunk_size=4, **MIXED).primary.mean()

    value, (of_hidden, of_head) = value_and_grads(lambda h, w: mean(h, w, False), HIDDEN, HEAD)
    tied, (tied_hidden, tied_head) = value_and_grads(
        lambda h, w: mean(h, w, True), HIDDEN, np.ascontiguousarray(HEAD.T)
    )
    assert_same((tied, [tied_hidden, tied_head.T]), (value, [of_hidden, of_head]))


@pytest.mark.parametrize("transposed", [False, True])
def test_padding_columns_of_either_head_take_no_part(transposed):
    padded = np.concatenate([HEAD, 50 * np.ones((D, 5), "float32")], axis=1)
    wide = np.concatenate([TEACHER_LOGITS, 40 * np.ones((*TEACHER_LOGITS.shape[:2], 3), "float32")], axis=-1)

    def mean(hidden, head, teacher, **settings):
        return chunked_distillation(hidden, head, batch_of(DenseTargets(teacher)), **MIXED, **settings).primary.mean()

    expected = value_and_grads(lambda h, w: mean(h, w, TEACHER_LOGITS), HIDDEN, HEAD)
    head = np.ascontiguousarray(padded.T) if transposed else padded
    settings = {"vocabulary_size": V, "transposed": transposed, "chunk_size": 4}
    value, (of_hidden, of_head) = value_and_grads(lambda h, w: mean(h, w, wide, **settings), HIDDEN, head)
    of_head = of_head.T if transposed else of_head
    assert not of_head[:, V:].any()
    assert_same((value, [of_hidden, of_head[:, :V]]), expected)


@pytest.mark.parametrize("kind", ["dense", "hidden", "bucket"])
def test_bfloat16_is_right_to_one_percent(kind):
    # The truth: the same rounded arrays in float32. What is tested is the arithmetic.
    low = [tensor(x, "bfloat16") for x in (HIDDEN, HEAD)]
    wide = [numpy(x).astype("float32") for x in low]
    batch = batch_of(teachers()[kind])

    def mean(hidden, head):
        return chunked_distillation(hidden, head, batch, chunk_size=3, **MIXED).primary.mean()

    expected, found = value_and_grads(mean, *wide), value_and_grads(mean, *low)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)  # sums in float32 of exact products
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert relative(ours, theirs) < 1e-2


def test_gradients_have_the_dtypes_of_what_they_belong_to():
    batch = batch_of(DenseTargets(TEACHER_LOGITS))
    if BACKEND == "torch":
        hidden, head = (tensor(x, "bfloat16").requires_grad_() for x in (HIDDEN, HEAD))
        chunked_distillation(hidden, head, batch).primary.mean().backward()
        assert (hidden.grad.dtype, head.grad.dtype) == (hidden.dtype, head.dtype)
        return
    low, wide = tensor(HIDDEN, "bfloat16"), tensor(HEAD)
    found = raw_gradients(lambda h, w: chunked_distillation(h, w, batch).primary.mean(), low, wide)
    assert [str(g.dtype).split("'")[-2] if "'" in str(g.dtype) else str(g.dtype) for g in found] == [
        "bfloat16",
        "float32",
    ]


def raw_gradients(function, *arrays):
    if BACKEND == "jax":
        import jax

        return jax.grad(function, argnums=(0, 1))(*arrays)
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(arrays)
        value = function(*arrays)
    return tape.gradient(value, arrays)


def test_frozen_head_gets_no_gradient_and_its_low_rank_pair_does():
    batch = batch_of(DenseTargets(TEACHER_LOGITS))

    def mean(hidden, head, bias, a, b, trainable=False):
        whole = OutputHead(head, bias=bias, low_rank=(a, b), trainable=trainable)
        return chunked_distillation(hidden, whole, batch, chunk_size=4).primary.mean()

    arrays = (HIDDEN, HEAD, BIAS, A, LOW_B)
    value, frozen = value_and_grads(mean, *arrays)
    expected, free = value_and_grads(lambda *x: mean(*x, trainable=True), *arrays)
    assert not frozen[1].any() and not frozen[2].any() and free[1].any() and free[2].any()
    assert_same((value, [frozen[i] for i in (0, 3, 4)]), (expected, [free[i] for i in (0, 3, 4)]))


# ---- positions of weight 0 ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "hidden", "bucket"])
def test_garbage_at_weight_zero_changes_no_bit(kind):
    clean = teachers()[kind]

    def spoiled(x):
        x = np.array(numpy(x))
        x[OFF] = -7 if x.dtype.kind == "i" else np.nan
        return x

    ids = np.where(OFF, 10**6, IDS).astype("int32")
    dirty, hidden = clean.map(spoiled), np.where(OFF[..., None], np.float32(np.inf), HIDDEN)
    found = [
        value_and_grads(chunked(batch, chunk_size=3, **MIXED), hidden, HEAD, BIAS, A, LOW_B)
        for batch, hidden in ((batch_of(clean), HIDDEN), (batch_of(dirty, ids=ids), hidden))
    ]
    assert found[0][0] == found[1][0] and np.isfinite(found[0][0])
    for a, b in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_batch_of_weight_zero_is_zero_with_gradient_zero():
    batch = batch_of(DenseTargets(np.full_like(TEACHER_LOGITS, np.nan)), np.zeros_like(WEIGHTS))
    nan = np.full_like(HIDDEN, np.nan)
    value, gradients = value_and_grads(chunked(batch, chunk_size=3, **MIXED), nan, HEAD, BIAS, A, LOW_B)
    assert value == 0.0
    assert not any(g.any() for g in gradients)


# ---- ends of the range ----------------------------------------------------------------------------------


def test_teacher_that_is_the_student_gives_exactly_zero():
    batch = batch_of(HiddenTargets(HIDDEN, HEAD, bias=BIAS, softcap=2.0))
    output = chunked_distillation(tensor(HIDDEN), tensor(HEAD), batch, bias=tensor(BIAS), softcap=2.0, chunk_size=3)
    assert float(numpy(output.primary.total)) == 0.0


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_ids_excluded_by_a_bias_of_minus_infinity_in_both_add_nothing(divergence):
    excluded = BIAS.copy()
    excluded[4] = -np.inf
    allowed = np.delete(np.arange(V), 4)

    short = HEAD[:, allowed]
    expected = value_and_grads(
        lambda h, w: mean_of(h, w, BIAS[allowed], TEACHER_LOGITS[..., allowed], divergence), HIDDEN, short
    )
    teacher = TEACHER_LOGITS.copy()
    teacher[..., 4] = -np.inf
    value, (of_hidden, of_head) = value_and_grads(
        lambda h, w: mean_of(h, w, excluded, teacher, divergence), HIDDEN, HEAD
    )
    assert not of_head[:, 4].any()
    assert_same((value, [of_hidden, of_head[:, allowed]]), expected)


def mean_of(hidden, head, bias, teacher, divergence):
    whole = OutputHead(head, bias=tensor(bias))
    batch = batch_of(DenseTargets(teacher), ids=IDS % 4)
    return chunked_distillation(hidden, whole, batch, divergence=divergence, chunk_size=3).primary.mean()


def test_infinite_divergence_is_reported_with_a_finite_gradient():
    bias = BIAS.copy()
    bias[4] = -np.inf  # the student excludes an id that the teacher needs
    value, gradients = value_and_grads(lambda h, w: mean_of(h, w, bias, TEACHER_LOGITS, "forward_kl"), HIDDEN, HEAD)
    assert value == np.inf
    assert all(np.isfinite(g).all() for g in gradients)


# ---- what is refused ------------------------------------------------------------------------------------


def scored(**changes):
    fields = {"hidden": tensor(HIDDEN), "head": tensor(HEAD), "batch": batch_of(DenseTargets(TEACHER_LOGITS))}
    settings = {key: changes.pop(key) for key in list(changes) if key not in fields}
    return chunked_distillation(*{**fields, **changes}.values(), **settings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"hidden": tensor(HIDDEN[:, :4])},
            r"`hidden` must align with target_ids and head: expected shape \(2, 5, 6\)",
        ),
        ({"head": tensor(HEAD.T)}, r"transposed=True"),
        ({"bias": tensor(BIAS[:3])}, r"`bias` must have shape \(11,\)"),
        ({"low_rank": (tensor(A), tensor(A))}, r"`low_rank` must be \(A, B\) of shapes \(6, r\) and \(r, 11\)"),
        ({"softcap": 0.0}, r"`softcap` must be above 0"),
        ({"vocabulary_size": 12}, r"`vocabulary_size` must be at most the 11 columns"),
        ({"chunk_size": 0}, r"`chunk_size` must be a whole number of at least 1"),
        ({"batch": batch_of(None)}, r"needs a teacher, and this batch has none"),
        ({"batch": batch_of(DenseTargets(TEACHER_LOGITS[..., :7]), ids=IDS % 4)}, r"11 ids and a teacher of 7"),
        ({"batch": batch_of(teachers()["bucket"], ids=IDS + 8)}, r"smaller than vocabulary size 11 of the head"),
        ({"divergence": "kl"}, r"`divergence` must be one of"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        scored(**changes)


def test_faults_of_the_teacher_are_those_of_the_dense_loss():
    wrong = TEACHER_LOGITS.copy()
    wrong[1, 3, 0] = np.nan
    messages = []
    for function in (
        lambda batch: chunked_distillation(tensor(HIDDEN), tensor(HEAD), batch),
        lambda batch: DistillationLoss()(OutputHead(tensor(HEAD)).logits(tensor(HIDDEN)), batch),
    ):
        with pytest.raises(ValueError, match=r"active teacher_logits .* at row 1, position 3") as caught:
            function(batch_of(DenseTargets(wrong)))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    hidden = draw(2, 5, 4)
    hidden[0, 2] = np.inf
    with pytest.raises(ValueError, match=r"active teacher hidden must be finite.* at row 0, position 2"):
        chunked_distillation(tensor(HIDDEN), tensor(HEAD), batch_of(HiddenTargets(hidden, draw(4, V))))


def test_examination_names_the_positions():
    hidden, teacher = HIDDEN.copy(), TEACHER_LOGITS.copy()
    hidden[0, 0], hidden[0, 1], teacher[1, 1, 2] = np.nan, np.nan, -np.inf
    examined = ChunkedDistillationLoss(divergence="reverse_kl", chunk_size=3).examine(
        HiddenScores(tensor(hidden), OutputHead(tensor(HEAD))), batch_of(DenseTargets(teacher))
    )
    assert np.argwhere(numpy(examined.student_invalid)).tolist() == [[0, 0]]  # (0, 1) is inactive
    assert not any(numpy(where).any() for where in examined.teacher_faults.values())
    assert np.argwhere(numpy(examined.infinite)).tolist() == [[0, 0], [1, 1]]


def test_hard_labels_alone_need_no_teacher():
    batch = PreparedBatch(IDS, IDS, WEIGHTS)
    settings = {"soft_weight": 0.0, "hard_weight": 1.0}
    found = value_and_grads(chunked(batch, chunk_size=3, **settings), HIDDEN, HEAD, BIAS, A, LOW_B)
    assert_same(found, value_and_grads(dense(batch, **settings), HIDDEN, HEAD, BIAS, A, LOW_B))


def test_loss_object_is_rebuilt_from_its_config_and_takes_scores_alone():
    loss = ChunkedDistillationLoss(chunk_size=7, divergence="jsd", beta=0.2, temperature=2.0, hard_weight=0.5)
    assert ChunkedDistillationLoss.from_config(loss.get_config()).get_config() == loss.get_config()
    with pytest.raises(TypeError, match=r"takes HiddenScores.*Received .*For logits use DistillationLoss"):
        loss(tensor(TEACHER_LOGITS), batch_of(DenseTargets(TEACHER_LOGITS)))


@pytest.mark.skipif(BACKEND != "torch", reason="only torch keeps a graph that can be walked twice")
def test_torch_gives_its_gradients_once_and_says_so():
    import torch

    hidden = tensor(HIDDEN).requires_grad_()
    total = chunked_distillation(hidden, tensor(HEAD), batch_of(DenseTargets(TEACHER_LOGITS))).primary.total
    torch.autograd.grad(total, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"given away.*Compute the loss again"):
        torch.autograd.grad(total, hidden)
