"""`ControlledModel`: a denoiser under one or several ControlNets, for training, sampling and serving alike."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_diffusion_opd.layers.wrapped_calls import WrappedCalls, in_force, innermost
from keras_diffusion_opd.models.control_net import ControlNet
from keras_diffusion_opd.models.controlled_architectures import architecture_of
from keras_diffusion_opd.provenance import digest
from keras_diffusion_opd.validation import finite_real

_KEYS = {"inputs", "controls", "strengths"}


class _Tuple(tuple[Any, ...]):
    """Keras makes lists and tuples that are attributes its own; this one it leaves alone."""


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class ControlledModel(keras.Model):
    """A denoiser whose rows follow controls, each with a strength of its own.

    The base is not changed: the `call` of its first blocks is wrapped on the instance and adds
    `sum over controls of strengths[name][i] * control_net(inputs, control)` to the hidden states of row i. A row of
    strength 0 keeps the bits of the base, whatever its control holds. Its trainable variables are those of the
    ControlNets; the base runs as in inference and stays what it is to the last bit. One forward serves training and
    sampling, and it runs within the scope of an `AdapterBank` of the same base.

    Args:
        base: the denoiser, as for `ControlNet.from_backbone`.
        control_nets: dict of name -> `ControlNet`.
        check_base: bool, whether a ControlNet of a base with another digest is refused.
        name: of the model.

    Call arguments:
        inputs: dict of `inputs` (those of the base), `controls` (name -> float (batch, *control_shape)) and
            `strengths` (name -> float (batch,)); `select` makes the last two of rows. A ControlNet that neither
            names does not run.

    Raises:
        ValueError: a ControlNet of another base, or, in a call, a strength without its control or the reverse.

    Example:

    ```python
    import numpy as np
    from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT
    from keras_diffusion_opd.models import ControlledModel, ControlNet

    denoiser = MMDiT(
        patch_size=2, hidden_dim=8, num_layers=2, num_heads=2, position_size=4,
        latent_shape=(4, 4, 2), context_shape=(None, 6), pooled_projection_shape=(5,),
    )
    edges = ControlNet.from_backbone(denoiser, control_shape=(4, 4, 1), blocks=1)
    model = ControlledModel(denoiser, {"edges": edges})
    inputs = {
        "latent": np.ones((2, 4, 4, 2), "float32"), "context": np.ones((2, 3, 6), "float32"),
        "pooled_projection": np.ones((2, 5), "float32"), "timestep": np.ones((2, 1), "float32"),
    }
    rows = [{"edges": (np.ones((4, 4, 1)), 0.5)}, {}]  # the second row is the base
    velocity = model({"inputs": inputs, **model.select(rows)})
    assert velocity.shape == (2, 4, 4, 2)
    ```
    """

    def __init__(
        self, base: Any, control_nets: Mapping[str, ControlNet], *, check_base: bool = True, name: str | None = None
    ) -> None:
        super().__init__(name=name, autocast=False)  # the base casts what it is given itself
        kind = architecture_of(base)
        if not control_nets or not all(isinstance(net, ControlNet) for net in control_nets.values()):
            raise ValueError(f"`control_nets` must name at least one ControlNet. Received {control_nets!r:.200}.")
        known = digest(base) if check_base else None
        for key, net in control_nets.items():
            if net.architecture != kind.name or known not in (None, net.base_digest):
                raise ValueError(
                    f"The ControlNet {key!r} belongs to a base of digest {net.base_digest[:12]} ({net.architecture}), "
                    f"and this one has {str(known)[:12]} ({kind.name}). Load that base, or pass check_base=False for "
                    "another one of the same architecture."
                )
        self.base = base
        self.control_nets = dict(sorted(control_nets.items()))
        deepest = max(net.blocks for net in control_nets.values())
        self._calls = _Tuple(
            WrappedCalls(block, self._adding(index)) for index, block in enumerate(kind.blocks(base)[:deepest])
        )
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """See the class."""
        if not isinstance(inputs, dict) or set(inputs) != _KEYS:
            found = sorted(inputs) if isinstance(inputs, dict) else type(inputs).__name__
            raise ValueError(f"`inputs` must be a dict of {sorted(_KEYS)}. Received {found}.")
        x, controls, strengths = inputs["inputs"], inputs["controls"], inputs["strengths"]
        self._check(controls, strengths)
        added: list[list[tuple[Any, Any]]] = []  # block -> (residual, strength) of each ControlNet
        for key in sorted(controls):
            strength = ops.cast(ops.convert_to_tensor(strengths[key]), "float32")
            for index, residual in enumerate(self.control_nets[key](x, controls[key])):
                if index == len(added):
                    added.append([])
                added[index].append((residual, strength))
        with in_force(self, added):
            return self.base(x, training=False)

    def select(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, np.ndarray]]:
        """The controls of a batch, of what each row asks for.

        Args:
            rows: for each row, name of a ControlNet -> control, or (control, strength); `{}` is the base.

        Returns:
            `controls` and `strengths`, for a call. Rows that do not name a ControlNet have zeros and strength 0.

        Raises:
            ValueError: a name without its control, a control of another shape or not finite, or no rows.
            KeyError: a ControlNet that is not there.
        """
        if not rows:
            raise ValueError("`rows` must hold a mapping of controls for each row. Received none.")
        controls = {key: np.zeros((len(rows), *net.control_shape), "float32") for key, net in self.control_nets.items()}
        strengths = {key: np.zeros(len(rows), "float32") for key in self.control_nets}
        for row, wanted in enumerate(rows):
            for key, value in wanted.items():
                if key not in self.control_nets:
                    raise KeyError(f"Row {row} names the ControlNet {key!r}. There are {list(self.control_nets)}.")
                control, strength = value if isinstance(value, tuple) else (value, 1.0)
                if control is None:
                    raise ValueError(f"Row {row} names {key!r} and has no control for it. Pass one, or leave it out.")
                array, shape = np.asarray(control, "float32"), self.control_nets[key].control_shape
                if array.shape != shape or not np.isfinite(array).all():
                    raise ValueError(
                        f"The control {key!r} of row {row} must be finite and of shape {shape}. Received {array.shape}."
                    )
                controls[key][row], strengths[key][row] = array, finite_real("strength", strength)
        return {"controls": controls, "strengths": strengths}

    def detach(self) -> None:
        """Give the base's blocks their own `call` back; this model adds nothing from then on."""
        for calls in self._calls:
            calls.detach()

    # What the base's variables are marked as does not matter here.

    @property
    def trainable_variables(self) -> list[Any]:
        """Those of the ControlNets."""
        return [v for net in self.control_nets.values() for v in net.trainable_variables] if self.trainable else []

    @property
    def non_trainable_variables(self) -> list[Any]:
        """All others."""
        trained = {id(v) for v in self.trainable_variables}
        return [v for v in self.variables if id(v) not in trained]

    @property
    def trainable_weights(self) -> list[Any]:
        """Those of the ControlNets."""
        return self.trainable_variables

    @property
    def non_trainable_weights(self) -> list[Any]:
        """All others."""
        return self.non_trainable_variables

    def get_config(self) -> dict[str, Any]:
        """A view of a base has no configuration."""
        raise NotImplementedError("A ControlledModel is a view. Save the base as it is, and each ControlNet.")

    def _check(self, controls: Any, strengths: Any) -> None:
        unknown = sorted((set(controls) | set(strengths)) - set(self.control_nets))
        if unknown:
            raise ValueError(f"There are no ControlNets {unknown}. There are {list(self.control_nets)}.")
        if set(controls) != set(strengths):
            raise ValueError(
                f"Each ControlNet that is named needs its control and its strengths. `controls` has {sorted(controls)}"
                f", `strengths` has {sorted(strengths)}."
            )

    def _adding(self, index: int) -> Any:
        def around(original: Any, args: Any, kwargs: Any) -> Any:
            y, added = original(*args, **kwargs), innermost(self)
            if added is None or index >= len(added):
                return y
            states = y[0] if isinstance(y, tuple | list) else y
            for residual, strength in added[index]:
                used = ops.reshape(strength, (-1, 1, 1))
                moved = states + ops.cast(ops.cast(used, residual.dtype) * residual, states.dtype)
                states = ops.where(used == 0, states, moved)  # a base row keeps its bits, whatever its control holds
            return (states, *y[1:]) if isinstance(y, tuple | list) else states

        return around
