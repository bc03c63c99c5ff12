"""The README's lines run, with small presets from disk in place of the large ones."""

import pathlib
import re

import keras
import numpy as np
import pytest

keras_hub = pytest.importorskip("keras_hub", reason="KerasHub is the extra `hub`")

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()


def preset(directory, hidden, seed):
    """A tiny BERT with a masked-language head, written as a preset."""
    keras.utils.set_random_seed(seed)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=120,
        num_layers=1,
        num_heads=2,
        hidden_dim=hidden,
        intermediate_dim=2 * hidden,
        max_sequence_length=16,
        dropout=0.0,
    )
    task = keras_hub.models.BertMaskedLM(backbone)
    task.save_to_preset(str(directory))
    return task


def lines_of_the_readme():
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "BertMaskedLM" in block]
    assert len([line for line in code.splitlines() if line.strip()]) <= 22
    return code


def test_twenty_lines_distil_a_keras_hub_masked_lm_loaded_from_presets(tmp_path, monkeypatch):
    preset(tmp_path / "teacher", hidden=8, seed=1)
    before = preset(tmp_path / "student", hidden=4, seed=2)
    code = lines_of_the_readme()
    for name, size in (("bert_base_en_uncased", "teacher"), ("bert_tiny_en_uncased", "student")):
        assert name in code
        code = code.replace(name, str(tmp_path / size))
    code = code.replace("epochs=3", "epochs=2, verbose=0")
    monkeypatch.chdir(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 100, (160, 6)).astype("int32")
    scope = {"token_ids": tokens}
    exec(compile(code, "README.md", "exec"), scope)
    history = scope["trainer"].history.history
    assert history["loss"][1] < history["loss"][0]
    # 5 batches in windows of 4: two updates an epoch.
    assert scope["trainer"].policy_version == 4
    inputs = {"token_ids": tokens[:2], "segment_ids": 0 * tokens[:2], "padding_mask": 0 * tokens[:2] + 1}
    loaded = keras.models.load_model(tmp_path / "student.keras")
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(loaded(inputs)),
        keras.ops.convert_to_numpy(scope["student"](inputs)),
        rtol=1e-5,
        atol=1e-6,
    )
    start, end = before.backbone.get_weights(), scope["student"].layers[-1].backbone.get_weights()
    assert max(np.abs(a - b).max() for a, b in zip(start, end, strict=True)) > 0
