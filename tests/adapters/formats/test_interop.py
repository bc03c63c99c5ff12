"""Files that PEFT and diffusers themselves write and read, both ways, on tiny torch models."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_diffusion_opd.adapters import Adapter, AdapterBank
from keras_diffusion_opd.adapters.formats.module_names import ModuleNames
from tests.adapters.hub_models import build
from tests.adapters.tools import random_adapter, run

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft", reason="PEFT is in the extra `interop`")
diffusers = pytest.importorskip("diffusers", reason="diffusers is in the extra `interop`")

CLOSE = {"atol": 2e-6, "rtol": 0}
IDS = np.random.default_rng(0).integers(0, 11, (3, 5)).astype("int32")


def torch_model() -> Any:
    """Embedding, convolution, two products: named as the Keras model below."""

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(11, 6)
            self.conv = torch.nn.Conv1d(6, 8, 3, padding=1)
            self.hidden = torch.nn.Linear(8, 8)
            self.head = torch.nn.Linear(8, 4)

        def forward(self, ids: Any) -> Any:
            h = self.conv(self.table(ids).transpose(1, 2)).transpose(1, 2)
            return self.head(torch.tanh(self.hidden(h)))

    torch.manual_seed(0)
    return Small().eval()


def keras_model(source: Any) -> keras.Model:
    ids = keras.Input((5,), dtype="int32")
    h = keras.layers.Embedding(11, 6, name="table")(ids)
    h = keras.layers.Conv1D(8, 3, padding="same", name="conv")(h)
    h = keras.layers.Dense(8, activation="tanh", name="hidden")(h)
    model = keras.Model(ids, keras.layers.Dense(4, name="head")(h))
    state = {name: value.detach().numpy() for name, value in source.state_dict().items()}
    model.get_layer("table").set_weights([state["table.weight"]])
    model.get_layer("conv").set_weights([state["conv.weight"].transpose(2, 1, 0), state["conv.bias"]])
    for name in ("hidden", "head"):
        model.get_layer(name).set_weights([state[f"{name}.weight"].T, state[f"{name}.bias"]])
    return model


def randomise(module: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, value in module.named_parameters():
        if "lora_magnitude" in name:
            value.data = value.data * (0.5 + torch.rand(value.shape, generator=generator))
        elif "lora_" in name:
            value.data = 0.3 * torch.randn(value.shape, generator=generator)


def torch_output(module: Any) -> np.ndarray:
    with torch.no_grad():
        return module(torch.tensor(IDS, dtype=torch.long)).numpy()


CONFIGS = {
    "patterns": {"r": 4, "lora_alpha": 9, "rank_pattern": {"head": 2}, "alpha_pattern": {"hid.*": 3}},
    "rslora": {"r": 3, "lora_alpha": 5, "use_rslora": True},
    "dora": {"r": 2, "lora_alpha": 4, "use_dora": True, "target_modules": ["conv", "hidden", "head"]},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_peft_both_ways(name: str, tmp_path: Path) -> None:
    source = torch_model()
    base = keras_model(source)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(base(IDS)), torch_output(source), **CLOSE)
    arguments = {"target_modules": ["table", "conv", "hidden", "head"], **CONFIGS[name]}
    theirs = peft.get_peft_model(source, peft.LoraConfig(**arguments)).eval()
    randomise(theirs)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    loaded = Adapter.load(tmp_path / "theirs", base)
    assert len(loaded.parts) == len(arguments["target_modules"])
    bank = AdapterBank(base, list(loaded.parts), slots=2, max_rank=4, max_stack=1, dora=True)
    bank.add(loaded)
    np.testing.assert_allclose(run(bank, IDS, [loaded.name] * 3), torch_output(theirs), **CLOSE)
    ours = random_adapter("ours", base, list(loaded.parts), rank=3, alpha=7.0, dora=name == "dora", size=0.2)
    bank.add(ours)
    ours.save(tmp_path / "ours")
    read = peft.PeftModel.from_pretrained(torch_model(), str(tmp_path / "ours")).eval()
    np.testing.assert_allclose(torch_output(read), run(bank, IDS, ["ours"] * 3), **CLOSE)


def transformer(name: str) -> Any:
    """The model of diffusers whose layers are those of `build(name)`."""
    torch.manual_seed(0)
    heads = {"attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 12, "pooled_projection_dim": 8}
    if name == "flux":
        more = {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True, "axes_dims_rope": (2, 2, 4)}
        return diffusers.FluxTransformer2DModel(patch_size=1, in_channels=4, **heads, **more)
    return diffusers.SD3Transformer2DModel(
        **heads,
        sample_size=4,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        caption_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def pipeline(name: str) -> Any:
    return {"flux": diffusers.FluxPipeline, "mmdit": diffusers.StableDiffusion3Pipeline}[name]


def deltas(module: Any) -> dict[str, np.ndarray]:
    """What each adapted layer adds to its matrix, (in, out), by the name of the module."""
    found = {}
    for name, layer in module.named_modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            (adapter,) = layer.scaling
            with torch.no_grad():
                delta = layer.get_delta_weight(adapter).numpy()
            found[name] = delta.transpose(2, 3, 1, 0).reshape(-1, delta.shape[0]) if delta.ndim == 4 else delta.T
    return found


def our_deltas(adapter: Adapter, names: ModuleNames) -> dict[str, np.ndarray]:
    found = {}
    for path, part in adapter.parts.items():
        target, column = names.target_of(path), 0
        for module, width in zip(target.modules, target.widths, strict=True):
            found[module] = part.delta()[:, column : column + width]
            column += width
    return found


@pytest.mark.parametrize("name", ["mmdit", "flux"])
def test_diffusers_both_ways(name: str, tmp_path: Path) -> None:
    base, _, _ = build(name)
    names = ModuleNames(base, "diffusers")
    modules = sorted(module for target in names.targets.values() for module in target.modules)
    theirs = transformer(name)
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=modules)
    theirs.add_adapter(config)
    randomise(theirs)
    state = peft.get_peft_model_state_dict(theirs)
    pipeline(name).save_lora_weights(
        str(tmp_path / "theirs"),
        transformer_lora_layers=state,
        transformer_lora_adapter_metadata=theirs.peft_config["default"].to_dict(),
    )
    expected = deltas(theirs)
    assert sorted(expected) == modules
    found = our_deltas(Adapter.load(tmp_path / "theirs", base), names)
    assert sorted(found) == modules
    for module in modules:
        np.testing.assert_allclose(found[module], expected[module], **CLOSE)

    ours = random_adapter("ours", base, list(names.targets), rank=3, alpha=2.0)
    ours.save(tmp_path / "pytorch_lora_weights.safetensors", format="diffusers", model=base)
    read = transformer(name)
    file = "pytorch_lora_weights.safetensors"
    read.load_lora_adapter(str(tmp_path), prefix="transformer", weight_name=file, use_safetensors=True)
    expected, found = our_deltas(ours, names), deltas(read)
    assert sorted(found) == modules
    for module in modules:
        np.testing.assert_allclose(found[module], expected[module], **CLOSE)
