"""What others call the layers of KerasHub's models.

A row is a path, with `{}` for a number, and the names of its modules: several where others split what is one layer
here, in the order of the layer's outputs.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from keras_diffusion_opd.adapters.attribute_paths import layer_paths, layers_by_path
from keras_diffusion_opd.layers.site_geometry import SiteGeometry, geometry_of

_BERT = {
    "transformer_layers.{}._self_attention_layer.query_dense": "encoder.layer.{}.attention.self.query",
    "transformer_layers.{}._self_attention_layer.key_dense": "encoder.layer.{}.attention.self.key",
    "transformer_layers.{}._self_attention_layer.value_dense": "encoder.layer.{}.attention.self.value",
    "transformer_layers.{}._self_attention_layer.output_dense": "encoder.layer.{}.attention.output.dense",
    "transformer_layers.{}._feedforward_intermediate_dense": "encoder.layer.{}.intermediate.dense",
    "transformer_layers.{}._feedforward_output_dense": "encoder.layer.{}.output.dense",
    "pooled_dense": "pooler.dense",
    "token_embedding": "embeddings.word_embeddings",
    "embeddings.token_embedding": "embeddings.word_embeddings",
    "segment_embedding": "embeddings.token_type_embeddings",
}
_LLAMA = {
    "transformer_layers.{}._self_attention_layer._query_dense": "layers.{}.self_attn.q_proj",
    "transformer_layers.{}._self_attention_layer._key_dense": "layers.{}.self_attn.k_proj",
    "transformer_layers.{}._self_attention_layer._value_dense": "layers.{}.self_attn.v_proj",
    "transformer_layers.{}._self_attention_layer._output_dense": "layers.{}.self_attn.o_proj",
    "transformer_layers.{}._feedforward_gate_dense": "layers.{}.mlp.gate_proj",
    "transformer_layers.{}._feedforward_intermediate_dense": "layers.{}.mlp.up_proj",
    "transformer_layers.{}._feedforward_output_dense": "layers.{}.mlp.down_proj",
    "token_embedding": "embed_tokens",
}
_GEMMA = {
    "transformer_layers.{}.attention.query_dense": "layers.{}.self_attn.q_proj",
    "transformer_layers.{}.attention.key_dense": "layers.{}.self_attn.k_proj",
    "transformer_layers.{}.attention.value_dense": "layers.{}.self_attn.v_proj",
    "transformer_layers.{}.attention.output_dense": "layers.{}.self_attn.o_proj",
    "transformer_layers.{}.gating_ffw": "layers.{}.mlp.gate_proj",
    "transformer_layers.{}.gating_ffw_2": "layers.{}.mlp.up_proj",
    "transformer_layers.{}.ffw_linear": "layers.{}.mlp.down_proj",
    "token_embedding": "embed_tokens",
}


def _qkv(block: str, q: str = "to_q", k: str = "to_k", v: str = "to_v") -> str:
    return " ".join(f"{block}.{name}" for name in (q, k, v))


_ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")
_MMDIT_BLOCK, _SD3_BLOCK = "joint_blocks.{}", "transformer_blocks.{}"
# The last context block and the output have modulations that diffusers keeps in another order: left out.
_SD3_DIFFUSERS = {
    f"{_MMDIT_BLOCK}.x_block.attention_qkv": _qkv(f"{_SD3_BLOCK}.attn"),
    f"{_MMDIT_BLOCK}.x_block.attention_proj": f"{_SD3_BLOCK}.attn.to_out.0",
    f"{_MMDIT_BLOCK}.x_block.attention_qkv2": _qkv(f"{_SD3_BLOCK}.attn2"),
    f"{_MMDIT_BLOCK}.x_block.attention_proj2": f"{_SD3_BLOCK}.attn2.to_out.0",
    f"{_MMDIT_BLOCK}.context_block.attention_qkv": _qkv(f"{_SD3_BLOCK}.attn", *_ADDED),
    f"{_MMDIT_BLOCK}.context_block.attention_proj": f"{_SD3_BLOCK}.attn.to_add_out",
    f"{_MMDIT_BLOCK}.x_block.mlp.dense1": f"{_SD3_BLOCK}.ff.net.0.proj",
    f"{_MMDIT_BLOCK}.x_block.mlp.dense2": f"{_SD3_BLOCK}.ff.net.2",
    f"{_MMDIT_BLOCK}.context_block.mlp.dense1": f"{_SD3_BLOCK}.ff_context.net.0.proj",
    f"{_MMDIT_BLOCK}.context_block.mlp.dense2": f"{_SD3_BLOCK}.ff_context.net.2",
    f"{_MMDIT_BLOCK}.x_block.ada_layer_norm.dense": f"{_SD3_BLOCK}.norm1.linear",
    f"{_MMDIT_BLOCK}.context_block.ada_layer_norm.dense": f"{_SD3_BLOCK}.norm1_context.linear",
    "context_embedding": "context_embedder",
    "output_dense": "proj_out",
    "patch_embedding.patch_embedding": "pos_embed.proj",
    "timestep_embedding.mlp.dense1": "time_text_embed.timestep_embedder.linear_1",
    "timestep_embedding.mlp.dense2": "time_text_embed.timestep_embedder.linear_2",
    "vector_embedding.dense1": "time_text_embed.text_embedder.linear_1",
    "vector_embedding.dense2": "time_text_embed.text_embedder.linear_2",
}
_SD3_KOHYA = {
    **{
        f"{_MMDIT_BLOCK}.{block}.{ours}": f"{_MMDIT_BLOCK}.{block}.{theirs}"
        for block in ("x_block", "context_block")
        for ours, theirs in (
            ("attention_qkv", "attn.qkv"),
            ("attention_proj", "attn.proj"),
            ("attention_qkv2", "attn2.qkv"),
            ("attention_proj2", "attn2.proj"),
            ("mlp.dense1", "mlp.fc1"),
            ("mlp.dense2", "mlp.fc2"),
            ("ada_layer_norm.dense", "adaLN_modulation.1"),
        )
    },
    "context_embedding": "context_embedder",
    "output_dense": "final_layer.linear",
    "output_ada_layer_norm.dense": "final_layer.adaLN_modulation.1",
    "patch_embedding.patch_embedding": "x_embedder.proj",
    "timestep_embedding.mlp.dense1": "t_embedder.mlp.0",
    "timestep_embedding.mlp.dense2": "t_embedder.mlp.2",
    "vector_embedding.dense1": "y_embedder.mlp.0",
    "vector_embedding.dense2": "y_embedder.mlp.2",
}
_DOUBLE, _SINGLE = "double_blocks.{}", "single_blocks.{}"
_FLUX_BLOCK, _FLUX_SINGLE = "transformer_blocks.{}", "single_transformer_blocks.{}"
_FLUX_DIFFUSERS = {
    f"{_DOUBLE}.image_attn.qkv": _qkv(f"{_FLUX_BLOCK}.attn"),
    f"{_DOUBLE}.image_attn.proj": f"{_FLUX_BLOCK}.attn.to_out.0",
    f"{_DOUBLE}.text_attn.qkv": _qkv(f"{_FLUX_BLOCK}.attn", *_ADDED),
    f"{_DOUBLE}.text_attn.proj": f"{_FLUX_BLOCK}.attn.to_add_out",
    f"{_DOUBLE}.image_mlp.layers.0": f"{_FLUX_BLOCK}.ff.net.0.proj",
    f"{_DOUBLE}.image_mlp.layers.2": f"{_FLUX_BLOCK}.ff.net.2",
    f"{_DOUBLE}.text_mlp.layers.0": f"{_FLUX_BLOCK}.ff_context.net.0.proj",
    f"{_DOUBLE}.text_mlp.layers.2": f"{_FLUX_BLOCK}.ff_context.net.2",
    f"{_DOUBLE}.image_mod.linear_projection": f"{_FLUX_BLOCK}.norm1.linear",
    f"{_DOUBLE}.text_mod.linear_projection": f"{_FLUX_BLOCK}.norm1_context.linear",
    f"{_SINGLE}.linear1": _qkv(f"{_FLUX_SINGLE}.attn") + f" {_FLUX_SINGLE}.proj_mlp",
    f"{_SINGLE}.linear2": f"{_FLUX_SINGLE}.proj_out",
    f"{_SINGLE}.modulation.linear_projection": f"{_FLUX_SINGLE}.norm.linear",
    "image_input_embedder": "x_embedder",
    "text_input_embedder": "context_embedder",
    **{
        f"{ours}.{a}": f"time_text_embed.{theirs}.{b}"
        for ours, theirs in (
            ("time_input_embedder", "timestep_embedder"),
            ("guidance_input_embedder", "guidance_embedder"),
            ("vector_embedder", "text_embedder"),
        )
        for a, b in (("input_layer", "linear_1"), ("output_layer", "linear_2"))
    },
    "final_layer.linear": "proj_out",
}
_FLUX_KOHYA = {
    **{
        f"{_DOUBLE}.{ours}_{a}": f"{_DOUBLE}.{theirs}_{b}"
        for ours, theirs in (("image", "img"), ("text", "txt"))
        for a, b in (
            ("attn.qkv", "attn.qkv"),
            ("attn.proj", "attn.proj"),
            ("mlp.layers.0", "mlp.0"),
            ("mlp.layers.2", "mlp.2"),
            ("mod.linear_projection", "mod.lin"),
        )
    },
    f"{_SINGLE}.linear1": f"{_SINGLE}.linear1",
    f"{_SINGLE}.linear2": f"{_SINGLE}.linear2",
    f"{_SINGLE}.modulation.linear_projection": f"{_SINGLE}.modulation.lin",
    "image_input_embedder": "img_in",
    "text_input_embedder": "txt_in",
    **{
        f"{ours}.{a}": f"{theirs}.{b}"
        for ours, theirs in (
            ("time_input_embedder", "time_in"),
            ("guidance_input_embedder", "guidance_in"),
            ("vector_embedder", "vector_in"),
        )
        for a, b in (("input_layer", "in_layer"), ("output_layer", "out_layer"))
    },
    "final_layer.linear": "final_layer.linear",
    "final_layer.adaLN_modulation.layers.1": "final_layer.adaLN_modulation.1",
}
# The first family whose mark is a path of the model; then its tables by format.
_FAMILIES: tuple[tuple[str, dict[str, dict[str, str]]], ...] = (
    ("joint_blocks.{}.x_block.attention_qkv", {"diffusers": _SD3_DIFFUSERS, "kohya": _SD3_KOHYA}),
    ("double_blocks.{}.image_attn.qkv", {"diffusers": _FLUX_DIFFUSERS, "kohya": _FLUX_KOHYA}),
    ("transformer_layers.{}._feedforward_gate_dense", {"peft": _LLAMA}),
    ("transformer_layers.{}.gating_ffw", {"peft": _GEMMA}),
    ("transformer_layers.{}._feedforward_intermediate_dense", {"peft": _BERT}),
)


# What may stand before the name of a module: the wrappers that it was saved from.
_PREFIXES = frozenset(
    ["base_model", "model", "transformer", "bert", "roberta", "language_model", "text_model", "diffusion_model"]
)


class Target(NamedTuple):
    """A layer, and the modules that make it up.

    Args:
        path: of the layer.
        modules: their names, in the order of the layer's outputs.
        widths: outputs of each.
    """

    path: str
    modules: tuple[str, ...]
    widths: tuple[int, ...]


class ModuleNames:
    """The names that modules of a model have in a format, both ways.

    Args:
        model: the base.
        format: "peft", "diffusers" or "kohya".
        key_map: names of modules -> paths, instead of what is known.
    """

    def __init__(
        self, model: Any, format: str, key_map: Mapping[str, str] | Callable[[str], str | None] | None = None
    ) -> None:
        self.geometries: dict[str, SiteGeometry] = {}
        for path, layer in layers_by_path(model).items():
            try:
                self.geometries[path] = geometry_of(layer)
            except ValueError:  # no matrix product: nothing in a file can be meant for it
                continue
        self._aliases = {alias: first for first, aliases in layer_paths(model).items() for alias in aliases}
        self._key_map = key_map
        self.targets: dict[str, Target] = {}
        self._by_module: dict[str, tuple[Target, int]] = {}
        table = {} if callable(key_map) else _reverse(key_map) if key_map is not None else self._known(format)
        for path, modules in table.items():
            self._enter(path, modules.split())

    def find(self, module: str) -> tuple[Target, int] | None:
        """The layer of a module and its place among the layer's modules; None if there is none.

        A module of the file may have wrappers in front of its name, such as `model.` or `transformer.`.
        """
        if callable(self._key_map):
            path = self._key_map(module)
            return None if path is None else (self._whole(path, module), 0)
        parts = module.split(".")
        for start in range(len(parts)):
            name = ".".join(parts[start:])
            if name in self._by_module:
                return self._by_module[name]
            if parts[start] not in _PREFIXES:
                break
        return (self._whole(module, module), 0) if module in self._aliases else None

    def target_of(self, path: str) -> Target:
        """What a layer is called; its own path where nothing else is known."""
        return self.targets.get(path) or self._whole(path, path)

    def _whole(self, path: str, module: str) -> Target:
        first = self._aliases.get(path)
        if first not in self.geometries:
            raise ValueError(f"`key_map` gives {path!r} for {module!r}, which the model does not have.")
        assert first is not None
        return Target(first, (module,), (self.geometries[first].out_features,))

    def _known(self, format: str) -> dict[str, str]:
        for mark, tables in _FAMILIES:
            if any(_numbers(mark, path) is not None for path in self.geometries):
                # A transformer of diffusers that PEFT saved itself has the names of diffusers.
                return self._filled(tables.get(format) or tables.get("diffusers", {}))
        return {}

    def _filled(self, table: dict[str, str]) -> dict[str, str]:
        filled = {}
        for path, geometry in self.geometries.items():
            for pattern, modules in table.items():
                numbers = _numbers(pattern, path)
                if numbers is not None:
                    count = geometry.out_features // max(geometry.in_features, 1)
                    if "ada_layer_norm" in pattern and "norm1" in modules and count < 6:
                        continue
                    filled[path] = " ".join(module.format(*numbers) for module in modules.split())
        return filled

    def _enter(self, path: str, modules: list[str]) -> None:
        first = self._aliases.get(path)
        if first is None or first not in self.geometries:
            raise ValueError(f"`key_map` names {path!r}, which the model does not have.")
        geometry = self.geometries[first]
        widths = [geometry.out_features]
        if len(modules) > 1:  # queries, keys and values are as wide as the inputs; what is left is the rest
            widths = [geometry.in_features] * 3
            widths += [geometry.out_features - sum(widths)] * (len(modules) - 3)
        target = Target(first, tuple(modules), tuple(widths))
        self.targets[first] = target
        for index, module in enumerate(modules):
            if module in self._by_module:
                raise ValueError(f"`key_map` gives two layers for {module!r}.")
            self._by_module[module] = (target, index)


def fused_widths(path: str, geometry: SiteGeometry) -> list[int]:
    """Outputs of what is trained on its own within a layer that holds several projections."""
    name, wide = path.rsplit(".", 1)[-1], geometry.in_features
    if name in ("attention_qkv", "attention_qkv2", "qkv") and geometry.out_features == 3 * wide:
        return [wide] * 3
    if name == "linear1" and geometry.out_features > 3 * wide:
        return [wide, wide, wide, geometry.out_features - 3 * wide]
    return [geometry.out_features]


def _numbers(pattern: str, path: str) -> list[str] | None:
    """The numbers in place of `{}`, if `path` ends as the pattern says."""
    found = re.fullmatch(r"(?:.*\.)?" + re.escape(pattern).replace(r"\{\}", r"(\d+)"), path)
    return None if found is None else list(found.groups())


def _reverse(key_map: Mapping[str, str]) -> dict[str, str]:
    paths: dict[str, list[str]] = {}
    for module, path in key_map.items():
        paths.setdefault(path, []).append(module)
    return {path: " ".join(modules) for path, modules in paths.items()}
