"""KerasHub models as token scorers: logits at every position, both sides seen, variables shared."""

import re
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.models import (
    EveryPosition,
    TiedTokenScorer,
    causal_attention,
    full_attention,
    token_scorer,
)

hub = pytest.importorskip("keras_hub").models
VOCABULARY, LENGTH, WIDTH = 37, 6, 16
ENCODER = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 1,
    "hidden_dim": WIDTH,
    "intermediate_dim": WIDTH,
}
BERT = {**ENCODER, "num_heads": 2, "max_sequence_length": 8, "dropout": 0.0}
DECODER = {**ENCODER, "num_query_heads": 2, "num_key_value_heads": 1}
GEMMA = {**DECODER, "head_dim": 8, "image_size": 16}


def bert(**arguments):
    return hub.BertMaskedLM(hub.BertBackbone(**BERT, **arguments), name="bert")


def t5gemma(**arguments):
    half = {
        "hidden_dim": WIDTH,
        "intermediate_dim": WIDTH,
        "num_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "layer_types": ["full_attention"],
    }
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in half.items()}
    return hub.T5GemmaBackbone(vocabulary_size=VOCABULARY, **{**sides, **arguments})


def gemma3(flag):
    return hub.Gemma3Backbone(**GEMMA, use_bidirectional_attention=flag)


def llama3():
    return hub.Llama3Backbone(**DECODER)


def qwen3():
    return hub.Qwen3Backbone(**DECODER, head_dim=8)


SEEING_BOTH_SIDES = {
    "bert": bert,
    "roberta": lambda: hub.RobertaMaskedLM(hub.RobertaBackbone(**BERT)),
    "xlm_roberta": lambda: hub.XLMRobertaMaskedLM(hub.XLMRobertaBackbone(**BERT)),
    "deberta_v3": lambda: hub.DebertaV3MaskedLM(hub.DebertaV3Backbone(**BERT, bucket_size=4)),
    "distil_bert": lambda: hub.DistilBertMaskedLM(hub.DistilBertBackbone(**BERT)),
    "albert": lambda: hub.AlbertMaskedLM(
        hub.AlbertBackbone(**ENCODER, num_heads=2, max_sequence_length=8, embedding_dim=8)
    ),
    "f_net": lambda: hub.FNetMaskedLM(hub.FNetBackbone(**ENCODER, max_sequence_length=LENGTH, dropout=0.0)),
    "roformer_v2": lambda: hub.RoformerV2MaskedLM(
        hub.RoformerV2Backbone(**ENCODER, num_heads=2, head_size=8, dropout=0.0)
    ),
    "esm": lambda: hub.ESMMaskedPLM(hub.ESMBackbone(**BERT)),
    "gemma3": lambda: gemma3(True),
    "gemma4": lambda: hub.Gemma4Backbone(**GEMMA, use_bidirectional_attention=True),
    "t5gemma": t5gemma,
}


def inputs_of(scorer, rows, seed=0):
    """Random tokens, no padding: `rows` equal rows, as NumPy arrays under the scorer's own names."""
    tokens = np.random.default_rng(seed).integers(5, VOCABULARY, (1, LENGTH)).repeat(rows, 0).astype("int32")
    made = {}
    for name in scorer.input:
        if name.endswith("token_ids"):
            made[name] = tokens
        elif name == "position_ids":
            made[name] = np.arange(LENGTH, dtype="int32")[None].repeat(rows, 0)
        else:
            made[name] = np.full((rows, LENGTH), name.endswith("padding_mask"), "int32")
    return made


def logits_of(scorer, inputs):
    return np.asarray(ops.convert_to_numpy(scorer.predict_on_batch(inputs)), "float32")


def influence(scorer):
    """bool (L, L): whether the logits at column move when the token at row changes. All in one batch."""
    inputs = inputs_of(scorer, LENGTH + 1)
    name = next(n for n in inputs if n.endswith("token_ids"))
    tokens = inputs[name].copy()
    for j in range(LENGTH):
        tokens[j + 1, j] = 5 + (tokens[j + 1, j] - 4) % (VOCABULARY - 5)
    logits = logits_of(scorer, {**inputs, name: tokens})
    return np.abs(logits[1:] - logits[:1]).max(-1) > 1e-6  # rows of one batch agree to 1e-7


def identities(variables):
    return {id(v) for v in variables}


@pytest.mark.parametrize("family", SEEING_BOTH_SIDES)
def test_every_position_is_scored_from_both_sides_with_the_models_own_variables(family):
    model = SEEING_BOTH_SIDES[family]()
    scorer = token_scorer(model)
    assert tuple(scorer.output.shape) == (None, None, VOCABULARY)
    assert influence(scorer).all()
    assert identities(scorer.variables) <= identities(model.variables)
    if family != "t5gemma":  # its decoder is not used
        assert identities(scorer.trainable_variables) == identities(model.trainable_variables)


@pytest.mark.parametrize("family", ["bert", "gemma3", "gemma4", "t5gemma", "llama3", "qwen3"])
def test_a_scorer_saves_and_loads(family, tmp_path):
    if family in ("llama3", "qwen3"):
        scorer = token_scorer({"llama3": llama3, "qwen3": qwen3}[family](), bidirectional=True)
    else:
        scorer = token_scorer(SEEING_BOTH_SIDES[family]())
    inputs = inputs_of(scorer, 2)
    want = logits_of(scorer, inputs)
    scorer.save(tmp_path / "scorer.keras")
    loaded = keras.models.load_model(tmp_path / "scorer.keras")
    np.testing.assert_allclose(logits_of(loaded, inputs), want, atol=1e-6)
    assert len(loaded.variables) == len(scorer.variables)  # what was tied is tied
    if family == "llama3":
        assert influence(loaded).all()


def test_position_i_of_the_scorer_is_the_tasks_own_score_of_position_i():
    task = bert()
    scorer = token_scorer(task)
    inputs = inputs_of(scorer, 2)
    positions = np.array([[1, 4], [3, 0]], "int32")
    picked = logits_of(task, {**inputs, "mask_positions": positions})
    every = logits_of(scorer, inputs)
    np.testing.assert_allclose(picked, np.take_along_axis(every, positions[..., None], 1), atol=1e-6)


def test_training_the_scorer_trains_the_task_and_its_preset(tmp_path):
    task = bert()
    scorer = token_scorer(task)
    inputs = inputs_of(scorer, 4)
    before = logits_of(scorer, inputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    scorer.compile(optimizer=keras.optimizers.SGD(0.5), loss=loss)
    history = scorer.fit(inputs, inputs["token_ids"], epochs=3, verbose=0).history["loss"]
    after = logits_of(scorer, inputs)
    assert history[-1] < history[0]
    assert np.abs(after - before).max() > 1e-2
    task.save_to_preset(str(tmp_path / "preset"))
    again = hub.BertMaskedLM.from_preset(str(tmp_path / "preset"))
    np.testing.assert_allclose(logits_of(token_scorer(again), inputs), after, atol=1e-6)


def test_a_task_with_its_preprocessor_scores_tokens(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", *"012345"]
    preprocessor = hub.BertMaskedLMPreprocessor(hub.BertTokenizer(vocabulary=words), sequence_length=LENGTH)
    task = hub.BertMaskedLM(hub.BertBackbone(**BERT), preprocessor=preprocessor)
    scorer = token_scorer(task)
    inputs = inputs_of(scorer, 2)
    scorer.save(tmp_path / "scorer.keras")
    loaded = keras.models.load_model(tmp_path / "scorer.keras")
    np.testing.assert_allclose(logits_of(loaded, inputs), logits_of(scorer, inputs), atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "gemma3"])
def test_mixed_bfloat16_computes_in_bfloat16_and_keeps_float32_variables(family):
    make, policy = SEEING_BOTH_SIDES[family], keras.config.dtype_policy()
    exact = token_scorer(make())
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        scorer = token_scorer(make())
    finally:
        keras.config.set_dtype_policy(policy)
    assert {v.dtype for v in scorer.trainable_variables} == {"float32"}
    for target, source in zip(scorer.variables, exact.variables, strict=True):
        target.assign(ops.convert_to_numpy(source))
    inputs = inputs_of(scorer, 2)
    error = np.abs(logits_of(scorer, inputs) - logits_of(exact, inputs)).max()
    assert 0 < error < 0.05  # logits of size 1 to 2 through a few roundings of 2^-9 each


@pytest.mark.parametrize("make", [llama3, qwen3])
def test_full_attention_is_full_beside_padding_and_can_be_undone(make):
    backbone = make()
    with pytest.raises(ValueError, match=re.escape("token_scorer(model, bidirectional=True)")):
        token_scorer(backbone)
    scorer = token_scorer(backbone, bidirectional=True)
    assert influence(scorer).all()
    assert identities(scorer.variables) == identities(backbone.variables)

    inputs = inputs_of(scorer, 2)
    inputs["padding_mask"] = inputs["padding_mask"].copy()
    inputs["padding_mask"][:, -1] = 0
    inputs["token_ids"] = inputs["token_ids"].copy()
    inputs["token_ids"][1, -1] = 5 + (inputs["token_ids"][1, -1] - 4) % (VOCABULARY - 5)
    logits = logits_of(scorer, inputs)
    np.testing.assert_allclose(logits[0, :-1], logits[1, :-1], atol=1e-6)  # padding is not seen

    assert token_scorer(backbone) is not scorer  # already full: no flag is needed
    causal_attention(backbone)
    causal_attention(backbone)
    fresh = keras.Model(backbone.input, backbone.token_embedding(backbone(backbone.input), reverse=True))
    np.testing.assert_array_equal(influence(fresh), np.triu(np.ones((LENGTH, LENGTH), bool)))


def test_full_attention_refuses_to_generate_with_a_cache():
    backbone = llama3()
    full_attention(backbone)
    layer = backbone.transformer_layers[0]
    with pytest.raises(ValueError, match=r"causal_attention\(backbone\)"):
        layer._compute_self_attention_mask(np.zeros((1, 1, WIDTH)), self_attention_cache=np.zeros((1, 2, 4, 1, 8)))


def test_a_causal_task_is_scored_by_its_backbone():
    task = hub.Llama3CausalLM(llama3(), preprocessor=None)
    scorer = token_scorer(task, bidirectional=True)
    assert identities(scorer.variables) == identities(task.variables)


@pytest.mark.parametrize(
    ("make", "mend"),
    [
        (lambda: gemma3(False), "Gemma3Backbone.from_preset(..., use_bidirectional_attention=True)"),
        (
            lambda: hub.GPT2Backbone(**BERT),
            "There is no known way to make its attention full",
        ),
        (lambda: hub.BertBackbone(**BERT), "token_scorer(keras_hub.models.BertMaskedLM(backbone))"),
        (lambda: hub.ESMBackbone(**BERT), "token_scorer(keras_hub.models.ESMMaskedPLM(backbone))"),
        (
            lambda: hub.BertTextClassifier(hub.BertBackbone(**BERT), num_classes=2),
            "Received the task BertTextClassifier",
        ),
        (
            lambda: hub.VGGBackbone([1], [2], image_shape=(8, 8, 3)),
            "Received VGGBackbone, which does not",
        ),
    ],
    ids=["gemma3", "gpt2", "bert_backbone", "esm_backbone", "classifier", "image"],
)
def test_what_cannot_score_is_refused_with_the_mend(make, mend):
    with pytest.raises(ValueError, match=r"^`model` must .*" + re.escape(mend)):
        token_scorer(make())


def test_a_causal_model_is_not_made_full_where_that_is_unknown():
    with pytest.raises(ValueError, match="GPT2Backbone attends only to what comes before"):
        token_scorer(hub.GPT2Backbone(**BERT), bidirectional=True)
    with pytest.raises(ValueError, match=r"`backbone` must be .* Received Gemma3Backbone"):
        full_attention(gemma3(False))
    with pytest.raises(ValueError, match=r"`backbone` must be .* Received BertMaskedLM"):
        causal_attention(bert())


def test_a_t5gemma_encoder_narrower_than_its_decoder_is_refused():
    with pytest.raises(ValueError, match="Received encoder_hidden_dim=16, decoder_hidden_dim=32"):
        token_scorer(t5gemma(decoder_hidden_dim=2 * WIDTH))


def plain(activation=None, rank=3, dtype=None):
    tokens = keras.Input((None,), dtype="int32", name="token_ids")
    hidden = keras.layers.Embedding(VOCABULARY, WIDTH)(tokens)
    if rank == 2:
        hidden = keras.layers.GlobalAveragePooling1D()(hidden)
    logits = keras.layers.Dense(VOCABULARY, activation=activation)(hidden)
    return keras.Model({"token_ids": tokens}, ops.cast(logits, dtype) if dtype else logits)


def test_a_plain_model_passes_through_and_so_does_a_scorer():
    model = plain()
    assert token_scorer(model) is model
    scorer = token_scorer(bert())
    assert token_scorer(scorer) is scorer


def test_a_plain_model_without_logits_at_every_position_is_refused():
    for model, received in (
        (plain(rank=2), r"outputs \[\(None, 37\)\]"),
        (plain(dtype="int32"), r"of \['int32'\]"),
        (plain("softmax"), "ends in a softmax. Build it with activation=None"),
    ):
        with pytest.raises(ValueError, match=r"^`model` must .*" + received):
            token_scorer(model)
    with pytest.raises(ValueError, match="Build the model with bidirectional attention"):
        token_scorer(plain(), bidirectional=True)


def test_what_is_not_a_model_is_refused_with_the_mend():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
    preprocessor = hub.BertMaskedLMPreprocessor(hub.BertTokenizer(vocabulary=words), sequence_length=LENGTH)
    for wrong, mend in (
        ("bert_base_en", "from_preset"),
        (hub.BertMaskedLM, "not the class"),
        (None, "Give a KerasHub MaskedLM task"),
        (preprocessor, "Give a KerasHub MaskedLM task"),
        (keras.layers.Dense(2), "Give a KerasHub MaskedLM task"),
    ):
        with pytest.raises(TypeError, match=r"^`model` must be a keras.Model. Received .*" + re.escape(mend)):
            token_scorer(wrong)


def test_positions_do_not_depend_on_the_dtype_policy():
    layer = EveryPosition(dtype="mixed_float16")
    positions = layer(ops.zeros((2, 5), dtype="int32"))
    assert keras.backend.standardize_dtype(positions.dtype) == "int32"
    np.testing.assert_array_equal(ops.convert_to_numpy(positions), [list(range(5))] * 2)
    assert EveryPosition.from_config(layer.get_config()).dtype_policy.name == "mixed_float16"


def test_the_configuration_of_a_tied_scorer_follows_the_attention_of_its_backbone():
    backbone = llama3()
    layer = TiedTokenScorer(backbone, bidirectional=True)
    assert layer.get_config()["bidirectional"] is True
    causal_attention(backbone)
    assert layer.get_config()["bidirectional"] is False


def test_loading_without_keras_hub_says_what_to_install(tmp_path):
    token_scorer(gemma3(True)).save(tmp_path / "scorer.keras")
    script = f"""
import sys
sys.modules["keras_hub"] = None
import keras, keras_diffusion_opd.models
try:
    keras.models.load_model({str(tmp_path / "scorer.keras")!r})
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install 'keras-diffusion-opd[hub]'" in done.stdout
