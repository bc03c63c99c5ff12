"""`ControlNet`: the first blocks of a denoiser once more, which turn an image into what is added to its own."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_diffusion_opd.models.controlled_architectures import ARCHITECTURES, architecture_of
from keras_diffusion_opd.provenance import check_digest, digest
from keras_diffusion_opd.validation import positive_int


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class ControlNet(keras.Model):
    """Copies of the first blocks of a denoiser that read a control, and projections of what they compute.

    Made by `from_backbone`. The embedding of the control and the projections begin at zero: a new ControlNet adds
    exactly nothing. Used by `ControlledModel`. Saved as a `.keras` file, which carries the digest of its base.

    Args:
        architecture: str, "mmdit" or "flux".
        config: dict, configuration of the base.
        control_shape: tuple, of one control: (height, width, channels) of an image whose sides are whole multiples of
            the denoiser's grid, or (tokens, features).
        blocks: int, how many are copied.
        base_digest: str, of the base.
        name: of the model.

    Call arguments:
        inputs: dict, those of the denoiser.
        control: float (batch, *control_shape).

    Returns of a call: list of `blocks` arrays (batch, tokens, width): what is added after each block of the base.

    Source: Zhang et al., "Adding Conditional Control to Text-to-Image Diffusion Models", 2023, arXiv:2302.05543.

    Example:

    ```python
    import keras, numpy as np
    from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT
    from keras_diffusion_opd.models import ControlNet

    denoiser = MMDiT(
        patch_size=2, hidden_dim=8, num_layers=2, num_heads=2, position_size=4,
        latent_shape=(4, 4, 2), context_shape=(None, 6), pooled_projection_shape=(5,),
    )
    control_net = ControlNet.from_backbone(denoiser, control_shape=(8, 8, 1), blocks=1)
    inputs = {
        "latent": np.ones((2, 4, 4, 2)), "context": np.ones((2, 3, 6)),
        "pooled_projection": np.ones((2, 5)), "timestep": np.ones((2, 1)),
    }
    (added,) = control_net(inputs, np.ones((2, 8, 8, 1)))
    assert added.shape == (2, 4, 8) and not keras.ops.convert_to_numpy(added).any()
    ```
    """

    def __init__(
        self,
        architecture: str,
        config: dict[str, Any],
        *,
        control_shape: tuple[int, ...],
        blocks: int,
        base_digest: str,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if architecture not in ARCHITECTURES:
            raise ValueError(f"`architecture` must be one of {list(ARCHITECTURES)}. Received {architecture!r}.")
        self.architecture, self.config = architecture, dict(config)
        self.control_shape = tuple(positive_int("control_shape", size) for size in control_shape)
        self.blocks = positive_int("blocks", blocks)
        self.base_digest = check_digest(base_digest, "base_digest")
        kind = ARCHITECTURES[architecture]
        # A denoiser that is as short as it can be; what lies behind its copied blocks is dropped.
        short = kind.model_class()(**kind.shortened(self.config, self.blocks))
        self.embedders = kind.embedders(short)
        self.copied_blocks = kind.blocks(short)[: self.blocks]
        width = kind.width(short)
        self.control_embedding = self._embedding(width, kind.grid(short), kind.tokens(short))
        self.projections = [
            keras.layers.Dense(width, kernel_initializer="zeros", name=f"projection_{index}", dtype="float32")
            for index in range(self.blocks)
        ]
        for projection in self.projections:
            projection.build((None, None, width))
        self.built = True

    @classmethod
    def from_backbone(
        cls, backbone: Any, *, control_shape: tuple[int, ...], blocks: int | None = None, name: str | None = None
    ) -> "ControlNet":
        """A ControlNet that begins as the denoiser itself, and adds nothing yet.

        Args:
            backbone: KerasHub's MMDiT (the `diffuser` of Stable Diffusion 3) or FluxBackbone. It is not changed.
            control_shape: tuple, of one control; see the class.
            blocks: int, how many are copied; None for half of them, at least one.
            name: of the model.

        Returns:
            The ControlNet, with the digest of `backbone` as its `base_digest`.

        Raises:
            ValueError: another kind of model, more blocks than there are, a shape that does not fit the grid, or a
                quantised base.
        """
        kind = architecture_of(backbone)
        there = len(kind.blocks(backbone))
        blocks = max(there // 2, 1) if blocks is None else positive_int("blocks", blocks)
        if blocks > there:
            raise ValueError(f"`blocks` must be at most {there}, which the denoiser has. Received {blocks}.")
        config = {k: v for k, v in backbone.get_config().items() if k not in ("name", "trainable", "dtype")}
        if kind.name == "mmdit":
            config["dtype"] = backbone.patch_embedding.dtype_policy.name
        made = cls(
            kind.name, config, control_shape=control_shape, blocks=blocks, base_digest=digest(backbone), name=name
        )
        theirs = [*kind.embedders(backbone), *kind.blocks(backbone)[:blocks]]
        for copy, original in zip([*made.embedders, *made.copied_blocks], theirs, strict=True):
            _copy_variables(copy, original)
        return made

    def call(self, inputs: Any, control: Any) -> list[Any]:
        """See the class."""
        kind = ARCHITECTURES[self.architecture]
        control = ops.convert_to_tensor(control)
        if tuple(control.shape[1:]) != self.control_shape:
            raise ValueError(
                f"`control` must be (batch, {', '.join(map(str, self.control_shape))}). Received "
                f"{tuple(control.shape)}."
            )
        added = self.control_embedding(control)
        if len(self.control_shape) == 3:
            added = ops.reshape(added, (ops.shape(added)[0], -1, added.shape[-1]))
        states = kind.hidden_states(self.embedders, self.copied_blocks, self.config, inputs, added)
        return [project(state) for project, state in zip(self.projections, states, strict=True)]

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        names = ("architecture", "config", "control_shape", "blocks", "base_digest", "name")
        return {name: getattr(self, name) for name in names}

    def _embedding(self, width: int, grid: tuple[int, int] | None, tokens: int | None) -> Any:
        shape = self.control_shape
        zeros: dict[str, Any] = {"kernel_initializer": "zeros", "name": "control_embedding", "dtype": "float32"}
        if len(shape) == 2 and tokens in (None, shape[0]):
            layer = keras.layers.Dense(width, **zeros)
        elif len(shape) == 3 and grid and shape[0] % grid[0] == 0 and shape[1] % grid[1] == 0:
            stride = (shape[0] // grid[0], shape[1] // grid[1])
            layer = keras.layers.Conv2D(width, stride, strides=stride, data_format="channels_last", **zeros)
        else:
            image = f", or (height, width, channels) with sides that are multiples of {grid}" if grid else ""
            raise ValueError(
                f"`control_shape` must be (tokens, features) with {tokens or 'any number of'} tokens{image}. "
                f"Received {shape}."
            )
        layer.build((None, *shape))
        return layer


def _copy_variables(copy: Any, original: Any) -> None:
    ours, theirs = copy.variables, original.variables
    if [tuple(v.shape) for v in ours] != [tuple(v.shape) for v in theirs]:
        raise ValueError(
            f"The layer {original.name!r} of the base has other variables than a fresh one: a quantised or changed "
            "base cannot be copied. Make the ControlNet of the base in full precision."
        )
    for variable, value in zip(ours, theirs, strict=True):
        # Through NumPy: on JAX `assign` of a variable would share its buffer, and training donates buffers.
        variable.assign(np.array(ops.convert_to_numpy(ops.cast(value.value, "float32"))))
