"""Files of every format: what was saved comes back, and what a file cannot say is refused."""

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_diffusion_opd.adapters import Adapter, AdapterPart
from keras_diffusion_opd.adapters.attribute_paths import layers_by_path
from keras_diffusion_opd.adapters.formats.archive import read_tensors, write_tensors
from keras_diffusion_opd.adapters.formats.module_names import ModuleNames
from keras_diffusion_opd.adapters.formats.modules import joined, split, trained_rank
from keras_diffusion_opd.provenance import Parent, Recipe, digest, write_json
from tests.adapters.hub_models import build
from tests.adapters.test_kinds import convolutional, tokens
from tests.adapters.tools import mlp, random_adapter

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return mlp()


def same_parts(a: Adapter, b: Adapter) -> None:
    assert list(a.parts) == list(b.parts)
    for path, part in a.parts.items():
        other = b.parts[path]
        assert part.a.tobytes() == other.a.tobytes() and part.b.tobytes() == other.b.tobytes(), path
        assert (part.alpha, part.rslora, part.form) == (other.alpha, other.rslora, other.form), path
        assert (part.magnitude is None) == (other.magnitude is None)
        assert part.magnitude is None or part.magnitude.tobytes() == other.magnitude.tobytes()


@pytest.mark.parametrize("more", [{"alpha": 8.0, "rank": 4}, {"rslora": True, "alpha": 3.3}, {"dora": True}], ids=str)
def test_peft_directory_comes_back_bit_for_bit(model: Any, more: dict[str, Any], tmp_path: Path) -> None:
    recipe = Recipe("test", parents=[Parent("base", "mlp", digest(model))], hyperparameters={"rate": 0.1}, seed=3)
    adapter = random_adapter("mlp", model, recipe=recipe, **more)
    adapter.save(tmp_path / "saved")
    loaded = Adapter.load(tmp_path / "saved", model)
    same_parts(adapter, loaded)
    assert (loaded.name, loaded.digest, loaded.base_digest) == ("mlp", adapter.digest, digest(model))
    assert loaded.recipe == recipe
    with pytest.raises(FileExistsError):
        adapter.save(tmp_path / "saved")
    assert Adapter.load(tmp_path / "saved", model, name="other").name == "other"


def test_each_layer_keeps_its_rank_and_alpha(model: Any, tmp_path: Path) -> None:
    adapter = Adapter.initial("p", model, ".*", alpha=0.7, rank_pattern={"head": 4}, alpha_pattern={"head": 9.0})
    adapter.save(tmp_path / "p")
    same_parts(adapter, Adapter.load(tmp_path / "p", model))
    config = json.loads((tmp_path / "p" / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"^head": 4} and config["alpha_pattern"] == {"^head": 9}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes_stay(model: Any, dtype: str, tmp_path: Path) -> None:
    a, b = (RNG.normal(size=shape).astype(np.dtype(dtype)) for shape in ((8, 2), (2, 4)))
    adapter = Adapter("x", {"head": AdapterPart(a, b, 2.0)})
    adapter.save(tmp_path / "x")
    loaded = Adapter.load(tmp_path / "x", model)
    assert loaded.parts["head"].a.dtype.name == dtype and loaded.digest == adapter.digest


def test_convolutions_and_embeddings_have_their_own_forms(tmp_path: Path) -> None:
    x = keras.Input((6, 6, 4))
    conv = keras.Model(x, keras.layers.Conv2D(8, (3, 2), name="c")(x))
    for name, base, keys in (
        ("conv", conv, {"c.lora_A.weight": (2, 4, 3, 2), "c.lora_B.weight": (8, 2, 1, 1)}),
        ("table", tokens(), {"table.lora_embedding_A": (2, 11), "table.lora_embedding_B": (6, 2)}),
    ):
        adapter = random_adapter(name, base)
        adapter.save(tmp_path / name)
        same_parts(adapter, Adapter.load(tmp_path / name, base))
        arrays, _ = read_tensors(tmp_path / name / "adapter_model.safetensors")
        for key, shape in keys.items():
            assert arrays[f"base_model.model.{key}"].shape == shape


def test_grouped_convolution_has_no_form_in_files(tmp_path: Path) -> None:
    x = keras.Input((6, 4))
    grouped = keras.Model(x, keras.layers.Conv1D(8, 2, groups=2, name="g")(x))
    with pytest.raises(ValueError, match="grouped"):
        random_adapter("g", grouped).save(tmp_path / "g")
    assert not list(tmp_path.iterdir())
    assert convolutional().name


@pytest.mark.parametrize("name", ["mmdit", "flux"])
@pytest.mark.parametrize("format", ["diffusers", "kohya", "peft"])
def test_image_models_come_back_through_split_and_fused_projections(name: str, format: str, tmp_path: Path) -> None:
    model, _, _ = build(name)
    names = ModuleNames(model, format)
    adapter = random_adapter("style", model, [*names.targets], rank=2, alpha=3.0)
    path = tmp_path / ("x" if format == "peft" else "x.safetensors")
    adapter.save(path, format=format, model=model)
    loaded = Adapter.load(path, model)
    assert list(loaded.parts) == list(adapter.parts)
    for key, part in adapter.parts.items():
        np.testing.assert_allclose(loaded.parts[key].delta(), part.delta(), rtol=1e-12, atol=1e-15)
    # What was loaded from a file goes back into it bit for bit: the blocks are found again.
    again = tmp_path / ("y" if format == "peft" else "y.safetensors")
    loaded.save(again, format=format, model=model)
    files = [p / "adapter_model.safetensors" if format == "peft" else p for p in (path, again)]
    first, second = (read_tensors(file)[0] for file in files)
    assert set(first) == set(second)
    assert all(first[k].tobytes() == second[k].tobytes() for k in first)


def test_every_layer_with_a_known_name_is_in_the_tables() -> None:
    missing = {}
    for name in ("mmdit", "flux"):
        model, _, _ = build(name)
        for format in ("diffusers", "kohya"):
            missing[name, format] = sorted(set(layers_by_path(model)) - set(ModuleNames(model, format).targets))
    # Modulations that diffusers keeps in another order.
    assert missing == {
        ("mmdit", "diffusers"): [
            "joint_blocks.1.context_block.ada_layer_norm.dense",
            "output_ada_layer_norm.dense",
        ],
        ("mmdit", "kohya"): [],
        ("flux", "diffusers"): ["final_layer.adaLN_modulation.layers.1"],
        ("flux", "kohya"): [],
    }


def test_split_modules_join_to_a_block_diagonal_and_come_apart_again() -> None:
    parts = [AdapterPart(RNG.normal(size=(6, r)), RNG.normal(size=(r, 6)), alpha) for r, alpha in ((2, 4.0), (3, 6.0))]
    whole = joined([parts[0], None, parts[1]], [6, 6, 6])
    dense = np.concatenate([parts[0].delta(), np.zeros((6, 6)), parts[1].delta()], axis=1)
    np.testing.assert_allclose(whole.delta(), dense, atol=1e-14)
    apart = split(whole, [6, 6, 6])
    for index, part in ((0, parts[0]), (2, parts[1])):
        assert apart[index].a.tobytes() == np.ascontiguousarray(part.a).tobytes() and apart[index].alpha == part.alpha
    # One A for three: only B is split.
    fused = AdapterPart(RNG.normal(size=(6, 3)), RNG.normal(size=(3, 18)), 1.5)
    pieces = split(fused, [6, 6, 6])
    assert all(np.array_equal(piece.a, fused.a) for piece in pieces)
    np.testing.assert_allclose(np.concatenate([p.delta() for p in pieces], axis=1), fused.delta(), atol=1e-15)
    np.testing.assert_allclose(joined(list(pieces), [6, 6, 6]).delta(), fused.delta(), atol=1e-14)


def test_unequal_scales_of_joined_modules_are_exact() -> None:
    parts = [AdapterPart(RNG.normal(size=(4, 2)), RNG.normal(size=(2, 4)), alpha) for alpha in (1.0, 5.0, 0.3)]
    dense = np.concatenate([part.delta() for part in parts], axis=1)
    np.testing.assert_allclose(joined(list(parts), [4, 4, 4]).delta(), dense, atol=1e-14)


def test_scale_of_a_fused_kohya_projection_is_that_of_the_trained_rank(tmp_path: Path) -> None:
    model, _, _ = build("flux")
    a = RNG.normal(size=(12, 16)).astype("float32")
    b = np.zeros((48, 12), "float32")
    for block in range(3):
        b[16 * block : 16 * block + 16, 4 * block : 4 * block + 4] = RNG.normal(size=(16, 4))
    at = "lora_unet_double_blocks_0_img_attn_qkv"
    tensors = {f"{at}.lora_down.weight": a, f"{at}.lora_up.weight": b, f"{at}.alpha": np.array(4.0, "float32")}
    write_tensors(tmp_path / "k.safetensors", tensors, {})
    (part,) = Adapter.load(tmp_path / "k.safetensors", model).parts.values()
    assert trained_rank(b.T, [16] * 3) == 4 and part.scale == 1.0
    np.testing.assert_allclose(part.delta(), (b.astype("float64") @ a).T, atol=1e-12)


def test_missing_alpha_is_the_rank_of_each_module_whatever_the_order_of_keys(tmp_path: Path) -> None:
    model, _, _ = build("flux")
    tensors = {}
    for name, rank in (("attn.to_out.0", 16), ("attn.to_add_out", 64)):
        at = f"transformer.transformer_blocks.0.{name}"
        tensors[f"{at}.lora_B.weight"] = RNG.normal(size=(16, rank)).astype("float32")
        tensors[f"{at}.lora_A.weight"] = RNG.normal(size=(rank, 16)).astype("float32")
    for order in (list(tensors), list(reversed(tensors))):
        write_tensors(tmp_path / "d.safetensors", {key: tensors[key] for key in order}, {})
        parts = Adapter.load(tmp_path / "d.safetensors", model).parts
        assert [part.scale for part in parts.values()] == [1.0, 1.0]
        assert sorted(part.rank for part in parts.values()) == [16, 64]


def peft_directory(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    folder.mkdir()
    write_tensors(folder / "adapter_model.safetensors", tensors, {})
    write_json(folder / "adapter_config.json", {"peft_type": "LORA", "r": 2, "lora_alpha": 2, **config})
    return folder


def factors(name: str, rank: int = 2, inputs: int = 8, outputs: int = 4) -> dict[str, np.ndarray]:
    return {
        f"base_model.model.{name}.lora_A.weight": RNG.normal(size=(rank, inputs)).astype("float32"),
        f"base_model.model.{name}.lora_B.weight": RNG.normal(size=(outputs, rank)).astype("float32"),
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"lora_bias": True}, "lora_bias"),
        ({"use_qalora": True}, "use_qalora"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"use_dora": True}, "magnitude"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"lora_alpha": "2"}, "lora_alpha"),
        ({"rank_pattern": {"head": 3}}, "rank 3"),
        ({"alpha_pattern": {"(a+)+b": 3}}, "too involved"),
        ({"alpha_pattern": {"(": 3}}, "does not read"),
        ({"alpha_pattern": [1]}, "object"),
    ],
    ids=str,
)
def test_what_peft_can_say_and_we_cannot_do_is_refused_by_name(
    model: Any, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        Adapter.load(peft_directory(tmp_path / "x", factors("head"), **config), model)


def test_keys_that_are_not_used_are_an_error_or_reported(model: Any, tmp_path: Path) -> None:
    path = peft_directory(tmp_path / "x", {**factors("head"), **factors("tail")})
    with pytest.raises(ValueError, match=r"2 of 4 keys .*tail"):
        Adapter.load(path, model)
    loaded = Adapter.load(path, model, strict=False)
    assert list(loaded.parts) == ["head"] and len(loaded.unused_keys) == 2
    nothing = peft_directory(tmp_path / "y", factors("tail"))
    with pytest.raises(ValueError, match="No key of y"):
        Adapter.load(nothing, model, strict=False)
    mapped = Adapter.load(nothing, model, key_map={"tail": "head"})
    assert list(mapped.parts) == ["head"]
    assert list(Adapter.load(nothing, model, key_map=lambda name: "head").parts) == ["head"]
    with pytest.raises(ValueError, match="does not have"):
        Adapter.load(nothing, model, key_map={"tail": "nowhere"})


def test_names_are_parsed_and_not_replaced(tmp_path: Path) -> None:
    x = keras.Input((8,))
    h = keras.layers.Dense(8, name="pair_weighted")(x)
    model = keras.Model(x, keras.layers.Dense(4, name="lora_A_weight")(h))
    for name in ("weight", "lora_A", "pair_weighted"):
        adapter = random_adapter(name, model)
        adapter.save(tmp_path / name)
        same_parts(adapter, Adapter.load(tmp_path / name, model))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": (2, 8), "b": (4, 3)}, "do not go together"),
        ({"a": (2, 9), "b": (4, 2)}, "does not fit"),
        ({"a": (2, 8)}, "no B"),
        ({"b": (4, 2)}, "no A"),
        ({"a": (0, 8), "b": (4, 0)}, "rank"),
        ({"a": (2, 8, 1), "b": (4, 2)}, "do not go together"),
    ],
    ids=str,
)
def test_factors_that_do_not_go_together_are_refused(
    model: Any, tensors: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    arrays = {
        f"base_model.model.head.lora_{k.upper()}.weight": np.ones(shape, "float32") for k, shape in tensors.items()
    }
    with pytest.raises(ValueError, match=message):
        Adapter.load(peft_directory(tmp_path / "x", arrays), model)


def test_rank_above_the_limit_is_refused(model: Any, tmp_path: Path) -> None:
    path = peft_directory(tmp_path / "x", factors("head", rank=9), r=9)
    with pytest.raises(ValueError, match="rank 9, and `max_rank` allows 8"):
        Adapter.load(path, model, max_rank=8)


def test_numbers_that_are_not_finite_are_refused(model: Any, tmp_path: Path) -> None:
    tensors = factors("head")
    next(iter(tensors.values()))[0, 0] = np.inf
    with pytest.raises(ValueError, match="head.*finite"):
        Adapter.load(peft_directory(tmp_path / "x", tensors), model)
