"""A linear layer of any kind as a matrix: rows of features in, rows of features out.

Dense, EinsumDense and convolutions multiply `(rows, in_features)` by `(in_features, out_features)`; what differs is
how their inputs become rows and how rows become their outputs. An embedding looks up rows of its matrix instead.
An adapter is the same two factors everywhere, those of PEFT with input and output exchanged.
"""

import abc
import math
from typing import Any

import keras
import numpy as np
from keras import ops

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class SiteGeometry(abc.ABC):
    """How one layer is a matrix.

    Args:
        kernel_shape: of the layer's kernel.
        in_features: rows of the matrix.
        out_features: columns of the matrix.
    """

    looks_up = False  # inputs are ids
    form = "linear"  # what files of adapters call it

    def __init__(self, kernel_shape: tuple[int, ...], in_features: int, out_features: int) -> None:
        self.kernel_shape = tuple(int(size) for size in kernel_shape)
        self.in_features = int(in_features)
        self.out_features = int(out_features)

    @abc.abstractmethod
    def rows(self, x: Any) -> tuple[Any, tuple[Any, ...]]:
        """Inputs (batch, ...) as rows (batch, P, in_features), and what `restore` must know."""

    @abc.abstractmethod
    def restore(self, rows: Any, shape: tuple[Any, ...]) -> Any:
        """Rows (batch, P, out_features) in the form of the layer's outputs."""

    def matrix(self, kernel: np.ndarray) -> np.ndarray:
        """A kernel as (in_features, out_features)."""
        return kernel.reshape(self.in_features, self.out_features)

    def kernel(self, matrix: np.ndarray) -> np.ndarray:
        """The inverse of `matrix`."""
        return matrix.reshape(self.kernel_shape)

    def matrix_of(self, kernel: Any) -> Any:
        """`matrix` for a tensor, inside of a program."""
        return ops.reshape(kernel, (self.in_features, self.out_features))

    def bias(self, bias: Any) -> Any:
        """A bias so that it broadcasts against the outputs."""
        return bias


class DenseGeometry(SiteGeometry):
    """`keras.layers.Dense`: (batch, ..., in) -> (batch, ..., out)."""

    def __init__(self, kernel_shape: tuple[int, ...]) -> None:
        super().__init__(kernel_shape, *kernel_shape)

    def rows(self, x: Any) -> tuple[Any, tuple[Any, ...]]:
        """See the base class."""
        shape = tuple(ops.shape(x))
        return ops.reshape(x, (shape[0], _product(shape[1:-1]), self.in_features)), shape[1:-1]

    def restore(self, rows: Any, shape: tuple[Any, ...]) -> Any:
        """See the base class."""
        return ops.reshape(rows, (ops.shape(rows)[0], *shape, self.out_features))


class EinsumGeometry(SiteGeometry):
    """`keras.layers.EinsumDense`: contracted axes are the input features, new axes the output features.

    Args:
        equation: such as "abc,cde->abde"; the batch is the first axis of inputs and outputs.
        kernel_shape: of the kernel.
        input_rank: of the inputs, which an ellipsis leaves open.
    """

    def __init__(self, equation: str, kernel_shape: tuple[int, ...], input_rank: int) -> None:
        left, self._outputs = equation.replace(" ", "").split("->")
        self._inputs, kernel = left.split(",")
        if "..." in equation:
            rest = input_rank - len(self._inputs.replace("...", ""))
            hidden = "".join(letter for letter in _LETTERS if letter not in equation)[:rest]
            self._inputs, self._outputs = (side.replace("...", hidden) for side in (self._inputs, self._outputs))
        contracted = [x for x in kernel if x in self._inputs and x not in self._outputs]
        new = [x for x in kernel if x in self._outputs and x not in self._inputs]
        if len(contracted) + len(new) != len(kernel) or not self._inputs[:1] == self._outputs[:1] != "":
            raise ValueError(
                f"The equation {equation!r} is no matrix product of one kernel for all rows: every kernel axis must be "
                "either summed over or new, and the batch must come first. Leave this layer out of `targets`."
            )
        size = dict(zip(kernel, kernel_shape, strict=True))
        self._kernel, self._contracted, self._new = kernel, contracted, new
        self._kernel_sizes = size
        self._free = [x for x in self._inputs if x not in contracted]
        self._sizes = [size[x] for x in new]
        super().__init__(kernel_shape, math.prod(size[x] for x in contracted), math.prod(self._sizes))

    def rows(self, x: Any) -> tuple[Any, tuple[Any, ...]]:
        """See the base class."""
        order = [self._inputs.index(letter) for letter in (*self._free, *self._contracted)]
        x = ops.transpose(x, order) if order != sorted(order) else x
        free = tuple(ops.shape(x))[1 : len(self._free)]
        return ops.reshape(x, (ops.shape(x)[0], _product(free), self.in_features)), free

    def restore(self, rows: Any, shape: tuple[Any, ...]) -> Any:
        """See the base class."""
        y = ops.reshape(rows, (ops.shape(rows)[0], *shape, *self._sizes))
        letters = [*self._free, *self._new]
        order = [letters.index(letter) for letter in self._outputs]
        return ops.transpose(y, order) if order != sorted(order) else y

    def matrix(self, kernel: np.ndarray) -> np.ndarray:
        """See the base class."""
        order = [self._kernel.index(letter) for letter in (*self._contracted, *self._new)]
        return np.ascontiguousarray(kernel.transpose(order)).reshape(self.in_features, self.out_features)

    def matrix_of(self, kernel: Any) -> Any:
        """See the base class."""
        order = [self._kernel.index(letter) for letter in (*self._contracted, *self._new)]
        return ops.reshape(ops.transpose(kernel, order), (self.in_features, self.out_features))

    def kernel(self, matrix: np.ndarray) -> np.ndarray:
        """See the base class."""
        letters = [*self._contracted, *self._new]
        size = self._kernel_sizes
        wide = matrix.reshape([size[letter] for letter in letters])
        return np.ascontiguousarray(wide.transpose([letters.index(letter) for letter in self._kernel]))

    def unit_inputs(self) -> np.ndarray:
        """(in_features, ...): as many inputs, each with a single 1."""
        letters = [*self._free, *self._contracted]
        sizes = [self.in_features, *(1 for _ in self._free[1:]), *(self._kernel_sizes[x] for x in self._contracted)]
        units = np.eye(self.in_features, dtype="float32").reshape(sizes)
        return units.transpose([letters.index(letter) for letter in self._inputs])


class ConvGeometry(SiteGeometry):
    """`Conv1D`, `Conv2D`, `Conv3D`: the rows are the patches under the kernel.

    One kernel for each sample is no convolution; over patches it is a product of matrices. With `groups` every
    group of channels has rows of its own.

    Args:
        layer: the convolution, built.
    """

    def __init__(self, layer: Any) -> None:
        self.size, self.strides, self.dilation = layer.kernel_size, layer.strides, layer.dilation_rate
        self.padding, self.groups = layer.padding, int(layer.groups)
        self.last = layer.data_format == "channels_last"
        self.form = "grouped" if self.groups > 1 else f"conv:{'x'.join(map(str, self.size))}"
        shape = tuple(layer.kernel.shape)
        super().__init__(shape, math.prod(shape[:-1]), shape[-1])

    def rows(self, x: Any) -> tuple[Any, tuple[Any, ...]]:
        """See the base class."""
        rank = len(self.size)
        x = x if self.last else ops.transpose(x, (0, *range(2, rank + 2), 1))
        x = self._padded(x)
        channels = self.in_features // math.prod(self.size)
        taps = [self._tap(x, position) for position in np.ndindex(*self.size)]
        spatial = tuple(ops.shape(taps[0]))[1:-1]
        batch, points = ops.shape(x)[0], _product(spatial)
        # (batch, points, taps, groups, channels) -> (batch, points * groups, taps * channels)
        patches = ops.reshape(ops.stack(taps, axis=-2), (batch, points, len(taps), self.groups, channels))
        if self.groups > 1:
            patches = ops.transpose(patches, (0, 1, 3, 2, 4))
        return ops.reshape(patches, (batch, points * self.groups, self.in_features)), spatial

    def restore(self, rows: Any, shape: tuple[Any, ...]) -> Any:
        """See the base class."""
        batch = ops.shape(rows)[0]
        if self.groups > 1:  # the row of a group counts for the output channels of that group
            each = self.out_features // self.groups
            wide = ops.reshape(rows, (batch, _product(shape), self.groups, self.groups, each))
            rows = ops.stack([wide[:, :, group, group] for group in range(self.groups)], axis=2)
        y = ops.reshape(rows, (batch, *shape, self.out_features))
        return y if self.last else ops.transpose(y, (0, len(shape) + 1, *range(1, len(shape) + 1)))

    def bias(self, bias: Any) -> Any:
        """See the base class."""
        return bias if self.last else ops.reshape(bias, (-1, *(1 for _ in self.size)))

    def _padded(self, x: Any) -> Any:
        if self.padding == "valid":
            return x
        sizes = tuple(ops.shape(x))[1:-1]
        pads = [self._pad(size, axis) for axis, size in enumerate(sizes)]
        return ops.pad(x, [(0, 0), *pads, (0, 0)])

    def _pad(self, size: Any, axis: int) -> tuple[int, int]:
        reach = (self.size[axis] - 1) * self.dilation[axis]
        if self.padding == "causal":
            return reach, 0
        if self.strides[axis] == 1:
            return reach // 2, reach - reach // 2
        if not isinstance(size, int):
            raise ValueError(
                "An adapter of a strided convolution with padding='same' needs inputs of a known size. Received an "
                "input of unknown height or width. Leave this layer out of `targets`, or fix the size of the inputs."
            )
        total = max((math.ceil(size / self.strides[axis]) - 1) * self.strides[axis] + reach + 1 - size, 0)
        return total // 2, total - total // 2

    def _tap(self, x: Any, position: tuple[int, ...]) -> Any:
        """What one point of the kernel sees, at every place of the outputs."""
        cut: list[slice] = [slice(None)]
        for axis, at in enumerate(position):
            behind = (self.size[axis] - 1 - at) * self.dilation[axis]
            cut.append(slice(at * self.dilation[axis], -behind or None, self.strides[axis]))
        return x[tuple(cut)]


class EmbeddingGeometry(SiteGeometry):
    """`keras.layers.Embedding`: ids (batch, ...) -> (batch, ..., out); in reverse, features -> logits.

    Args:
        kernel_shape: (ids, features).
    """

    looks_up = True
    form = "embedding"

    def __init__(self, kernel_shape: tuple[int, ...]) -> None:
        super().__init__(kernel_shape, *kernel_shape)

    def rows(self, x: Any) -> tuple[Any, tuple[Any, ...]]:
        """See the base class."""
        shape = tuple(ops.shape(x))
        return ops.cast(ops.reshape(x, (shape[0], _product(shape[1:]))), "int32"), shape[1:]

    def restore(self, rows: Any, shape: tuple[Any, ...]) -> Any:
        """See the base class."""
        return ops.reshape(rows, (ops.shape(rows)[0], *shape, ops.shape(rows)[-1]))

    def reversed_rows(self, x: Any) -> tuple[Any, tuple[Any, ...]]:
        """Features (batch, ..., out) as rows, for a table that is used in reverse."""
        shape = tuple(ops.shape(x))
        return ops.reshape(x, (shape[0], _product(shape[1:-1]), self.out_features)), shape[1:-1]


_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
ADAPTABLE = (keras.layers.Dense, keras.layers.EinsumDense, *_CONVOLUTIONS, keras.layers.Embedding)


def geometry_of(layer: Any) -> SiteGeometry:
    """The geometry of a built layer.

    Args:
        layer: an instance of one of `ADAPTABLE`.

    Raises:
        ValueError: an equation that is no matrix product, or a layer that is not built.
    """
    if not layer.built:
        raise ValueError(f"The layer {layer.name!r} must be built first: call the model once.")
    if isinstance(layer, keras.layers.EinsumDense):
        rank = layer.input_spec.ndim if layer.input_spec is not None else len(layer.equation.split(",")[0])
        return EinsumGeometry(layer.equation, tuple(layer.kernel.shape), rank)
    if isinstance(layer, keras.layers.Dense):
        return DenseGeometry((int(layer.input_spec.axes[-1]), layer.units))
    if isinstance(layer, _CONVOLUTIONS):
        return ConvGeometry(layer)
    return EmbeddingGeometry((layer.input_dim, layer.output_dim))


def _product(shape: Any) -> Any:
    result: Any = 1
    for size in shape:
        result = result * size
    return result
