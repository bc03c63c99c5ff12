"""What a ControlNet must know of a denoiser: its blocks, and how inputs become hidden states.

One class for each architecture. A ControlNet is the first blocks of the denoiser once more, with all that lies before.
"""

import abc
from typing import Any

import keras


class Architecture(abc.ABC):
    """How one kind of denoiser is cut into parts."""

    name: str

    @staticmethod
    @abc.abstractmethod
    def model_class() -> Any:
        """The class of the denoiser."""

    @abc.abstractmethod
    def blocks(self, backbone: Any) -> list[Any]:
        """The blocks that can be controlled, in order."""

    @abc.abstractmethod
    def shortened(self, config: dict[str, Any], blocks: int) -> dict[str, Any]:
        """The configuration of a denoiser whose first `blocks` blocks are those of `config`."""

    @abc.abstractmethod
    def embedders(self, backbone: Any) -> list[Any]:
        """The layers before the blocks, in a fixed order."""

    @abc.abstractmethod
    def width(self, backbone: Any) -> int:
        """Features of the hidden states."""

    @abc.abstractmethod
    def grid(self, backbone: Any) -> tuple[int, int] | None:
        """Rows and columns of the hidden states, or None where the denoiser sees tokens only."""

    @abc.abstractmethod
    def tokens(self, backbone: Any) -> int | None:
        """Number of the hidden states, or None where it may vary."""

    @abc.abstractmethod
    def hidden_states(
        self, embedders: list[Any], blocks: list[Any], config: dict[str, Any], inputs: Any, added: Any
    ) -> list[Any]:
        """The hidden states (batch, tokens, width) after each block, where `added` is added before the first."""


class _MMDiT(Architecture):
    """The denoiser of Stable Diffusion 3 and 3.5 in KerasHub."""

    name = "mmdit"

    @staticmethod
    def model_class() -> Any:
        from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT  # KerasHub does not export it

        return MMDiT

    def blocks(self, backbone: Any) -> list[Any]:
        return list(backbone.joint_blocks)

    def shortened(self, config: dict[str, Any], blocks: int) -> dict[str, Any]:
        # The last block of a denoiser is made without a projection of the context: one more than is copied.
        return {**config, "num_layers": min(blocks + 1, config["num_layers"])}

    def embedders(self, backbone: Any) -> list[Any]:
        names = ("patch_embedding", "position_embedding", "context_embedding", "vector_embedding", "timestep_embedding")
        return [getattr(backbone, name) for name in names]

    def width(self, backbone: Any) -> int:
        return int(backbone.hidden_dim)

    def grid(self, backbone: Any) -> tuple[int, int]:
        height, width = backbone.latent_shape[:2]
        return height // backbone.patch_size, width // backbone.patch_size

    def tokens(self, backbone: Any) -> int:
        rows, columns = self.grid(backbone)
        return rows * columns

    def hidden_states(
        self, embedders: list[Any], blocks: list[Any], config: dict[str, Any], inputs: Any, added: Any
    ) -> list[Any]:
        patch, position, context_of, vector, time = embedders
        height, width = (size // config["patch_size"] for size in config["latent_shape"][:2])
        x = patch(inputs["latent"])
        x = x + position(x, height=height, width=width)
        x = x + keras.ops.cast(added, x.dtype)
        context = context_of(inputs["context"])
        embedding = time(inputs["timestep"]) + vector(inputs["pooled_projection"])
        found = []
        for block in blocks:
            if block.use_context_projection:
                x, context = block(x, context, embedding)
            else:
                x = block(x, context, embedding)
            found.append(x)
        return found


class _Flux(Architecture):
    """Flux in KerasHub: its double blocks are controlled."""

    name = "flux"

    @staticmethod
    def model_class() -> Any:
        import keras_hub

        return keras_hub.models.FluxBackbone

    def blocks(self, backbone: Any) -> list[Any]:
        return list(backbone.double_blocks)

    def shortened(self, config: dict[str, Any], blocks: int) -> dict[str, Any]:
        return {**config, "depth": blocks, "depth_single_blocks": 0}

    def embedders(self, backbone: Any) -> list[Any]:
        names = ["image_input_embedder", "text_input_embedder", "time_input_embedder", "vector_embedder"]
        names += ["positional_embedder", "timestep_embedding"]
        names += ["guidance_input_embedder"] if backbone.guidance_embed else []
        return [getattr(backbone, name) for name in names]

    def width(self, backbone: Any) -> int:
        return int(backbone.hidden_size)

    def grid(self, backbone: Any) -> None:
        return None

    def tokens(self, backbone: Any) -> int | None:
        return backbone.image_shape[0]

    def hidden_states(
        self, embedders: list[Any], blocks: list[Any], config: dict[str, Any], inputs: Any, added: Any
    ) -> list[Any]:
        image_of, text_of, time, vector, position, waves = embedders[:6]
        image = image_of(inputs["image"])
        image = image + keras.ops.cast(added, image.dtype)
        text = text_of(inputs["text"])
        modulation = time(waves(inputs["timesteps"], dim=256))
        if config["guidance_embed"]:
            modulation = modulation + embedders[6](waves(inputs["guidance"], dim=256))
        modulation = modulation + vector(inputs["y"])
        positions = position(keras.ops.concatenate((inputs["text_ids"], inputs["image_ids"]), axis=1))
        found = []
        for block in blocks:
            image, text = block(image=image, text=text, modulation_encoding=modulation, positional_encoding=positions)
            found.append(image)
        return found


ARCHITECTURES: dict[str, Architecture] = {kind.name: kind for kind in (_MMDiT(), _Flux())}


def architecture_of(backbone: Any) -> Architecture:
    """The architecture of a denoiser.

    Raises:
        ValueError: one that is not known.
    """
    for kind in ARCHITECTURES.values():
        try:
            if isinstance(backbone, kind.model_class()):
                return kind
        except ImportError:
            continue
    inner = " Pass its `diffuser`." if hasattr(backbone, "diffuser") else ""
    raise ValueError(f"`backbone` must be KerasHub's MMDiT or FluxBackbone. Received {type(backbone).__name__}.{inner}")
