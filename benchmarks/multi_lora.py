"""Many adapters in one batch against the plain model, and against other ways to serve them.

    KERAS_BACKEND=jax python benchmarks/multi_lora.py --sides keras
    KERAS_BACKEND=torch python benchmarks/multi_lora.py --sides keras peft

`K` adapters of rank 8 are spread over 8 rows of a batch. Forward and training step of a stack of Dense layers (256
tokens, 512 wide) and of a small MMDiT. Sides:

- `plain`: the model without adapters.
- `ours`: the bank; the selection is an argument of the compiled program.
- `einsum`: the whole bank multiplied for every row, and the rows' own picked out of it.
- `merged`: one kernel for each adapter, the rows of each run by themselves, one after the other.
- `peft`: PEFT's `adapter_names` of a mixed batch, on torch, eager, for the Dense stack.

All turns of a round follow one another, in an order that is reversed from round to round; what is reported is the
median of the ratios of each round. Before anything is timed, all sides must give the same outputs.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from _common import RESULTS, alternate, machine, ratios, spread, table, versions, write_json
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.adapters import Adapter, AdapterBank
from keras_diffusion_opd.adapters.attribute_paths import chosen_paths, layers_by_path

ROWS, LENGTH, WIDTH, RANK, DEPTH = 8, 256, 512, 8, 2
TOLERANCE = 2e-4  # relative to the largest output: float32 sums of 512 products, merged and not


def dense_stack() -> tuple[Any, Any]:
    keras.utils.set_random_seed(0)
    x = keras.Input((LENGTH, WIDTH))
    h = x
    for index in range(DEPTH):
        h = keras.layers.Dense(WIDTH, activation="relu", name=f"dense_{index}")(h)
    return keras.Model(x, h), np.random.default_rng(0).normal(size=(ROWS, LENGTH, WIDTH)).astype("float32")


def small_mmdit() -> tuple[Any, Any]:
    from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT

    keras.utils.set_random_seed(0)
    model = MMDiT(
        patch_size=2,
        hidden_dim=256,
        num_layers=2,
        num_heads=4,
        position_size=16,
        mlp_ratio=4.0,
        latent_shape=(16, 16, 16),
        context_shape=(None, 128),
        pooled_projection_shape=(64,),
    )
    rng = np.random.default_rng(0)
    sizes = {"latent": (16, 16, 16), "context": (16, 128), "pooled_projection": (64,)}
    x = {key: rng.normal(size=(ROWS, *size)).astype("float32") for key, size in sizes.items()}
    return model, {**x, "timestep": rng.uniform(0, 1000, (ROWS, 1)).astype("float32")}


MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "dense": (dense_stack, ".*"),
    "mmdit": (small_mmdit, r"joint_blocks.*(qkv|proj|dense\d)"),
}


def adapters_of(model: Any, targets: Any, count: int) -> list[Adapter]:
    """`count` adapters of normal factors."""
    paths = sizes_of(model, targets)
    rng = np.random.default_rng(1)
    result = []
    for index in range(count):
        arrays = {
            path: (
                (rng.normal(size=(i, RANK)) / np.sqrt(i)).astype("float32"),
                (0.1 * rng.normal(size=(RANK, o))).astype("float32"),
            )
            for path, (i, o) in paths.items()
        }
        result.append(Adapter.from_arrays(f"a{index}", model, arrays))
    return result


def sizes_of(model: Any, targets: Any) -> dict[str, tuple[int, int]]:
    """path -> (in, out) of the targets, all of them Dense."""
    layers = layers_by_path(model)
    return {path: tuple(map(int, layers[path].kernel.shape)) for path in chosen_paths(model, targets)}


class EinsumLayer:
    """The whole bank at one Dense: what a multiplication by one-hot rows costs."""

    def __init__(self, layer: Any, a: np.ndarray, b: np.ndarray) -> None:
        self.a = keras.Variable(a, trainable=False, name="a")  # (K, in, r)
        self.b = keras.Variable(b, trainable=False, name="b")  # (K, r, out)
        self.gates: Any = None
        original = layer.call

        def call(x: Any, *args: Any, **kwargs: Any) -> Any:
            activation, layer.activation = layer.activation, None
            y = original(x, *args, **kwargs)
            layer.activation = activation
            wide = x if len(x.shape) == 3 else ops.expand_dims(x, 1)
            hidden = ops.einsum("bti,kir->btkr", wide, self.a)
            delta = ops.einsum("btkr,kro,bk->bto", hidden, self.b, self.gates)
            return (activation or (lambda v: v))(y + ops.reshape(delta, ops.shape(y)))

        layer.call = call


def forward_turns(kind: str, count: int) -> dict[str, Callable[[], Any]]:
    """Turns by side, which return outputs."""
    make, targets = MODELS[kind]
    model, x = make()
    adapters = adapters_of(model, targets, count)
    names = [f"a{row % count}" for row in range(ROWS)]
    bank = AdapterBank(model, targets, slots=count, max_rank=RANK, max_stack=1)
    for adapter in adapters:
        bank.add(adapter)
    selection = bank.select(names)

    def ours(x: Any, selection: Any) -> Any:
        with bank.scope(selection):
            return model(x, training=False)

    def plain(x: Any) -> Any:
        return model(x, training=False)

    run_ours, run_plain = bank.compiled(ours), backend.compiled(plain, [model])
    turns = {"plain": lambda: run_plain(x), "ours": lambda: run_ours(x, selection)}

    einsum_model, _ = make()
    copy_weights(model, einsum_model)
    pieces = []
    for path in bank.paths:
        a, b = (np.stack([getattr(adapter.parts[path], part) for adapter in adapters]) for part in "ab")
        pieces.append(EinsumLayer(layers_by_path(einsum_model)[path], a, b))
    gates = np.eye(count, dtype="float32")[[row % count for row in range(ROWS)]]

    def with_gates(x: Any, gates: Any) -> Any:
        for piece in pieces:
            piece.gates = gates
        return einsum_model(x, training=False)

    held = Held(einsum_model.variables + [v for piece in pieces for v in (piece.a, piece.b)])
    run_einsum = backend.compiled(with_gates, [held])
    turns["einsum"] = lambda: run_einsum(x, gates)

    merged_model, _ = make()
    copy_weights(model, merged_model)
    kernels = [layers_by_path(merged_model)[path].kernel for path in bank.paths]
    saved = [ops.copy(kernel.value) for kernel in kernels]
    deltas = [[ops.convert_to_tensor(a.parts[p].delta().astype("float32")) for p in bank.paths] for a in adapters]
    run_merged = backend.compiled(lambda x: merged_model(x, training=False), [merged_model])

    def merged() -> Any:
        outputs: list[Any] = [None] * ROWS
        for index in range(min(count, ROWS)):
            for kernel, base, delta in zip(kernels, saved, deltas[index], strict=True):
                kernel.assign(base + delta)
            rows = list(range(index, ROWS, count))
            part = keras.tree.map_structure(lambda leaf, rows=rows: leaf[rows], x)
            for row, y in zip(rows, run_merged(part), strict=True):
                outputs[row] = y
        return ops.stack(outputs)

    turns["merged"] = merged
    return turns


class Held:
    """Variables for `compiled`."""

    def __init__(self, variables: list[Any]) -> None:
        self.variables = variables


def copy_weights(source: Any, target: Any) -> None:
    for a, b in zip(source.variables, target.variables, strict=True):
        b.assign(ops.convert_to_numpy(a.value))


def train_turns(kind: str, count: int) -> dict[str, Callable[[], Any]]:
    """A step of SGD: all weights of the plain model, against one adapter beside `count - 1` frozen ones."""
    make, targets = MODELS[kind]
    turns: dict[str, Callable[[], Any]] = {}
    for side in ("plain, adapted layers", "ours"):
        model, x = make()
        y = np.zeros(tuple(ops.shape(model(keras.tree.map_structure(ops.convert_to_tensor, x)))), "float32")
        if side == "ours":
            bank = AdapterBank(model, targets, slots=count, max_rank=RANK, max_stack=1)
            for adapter in adapters_of(model, targets, count):
                bank.add(adapter)
            chosen = bank.select([f"a{row % count}" for row in range(ROWS)])
            trained, inputs = bank.trainable("a0"), {"inputs": x, "slots": chosen.slots, "weights": chosen.weights}
        else:
            trained, inputs = model, x
        trained.compile(keras.optimizers.SGD(1e-6), "mse", jit_compile=backend.BACKEND != "torch")
        turns[side] = lambda trained=trained, inputs=inputs, y=y: trained.train_on_batch(inputs, y)
    return turns


def peft_turns(count: int) -> dict[str, Callable[[], Any]]:
    """PEFT's mixed batch and ours, both eager in torch, on the same Dense stack."""
    import peft
    import torch

    model, x = dense_stack()
    adapters = adapters_of(model, ".*", count)
    bank = AdapterBank(model, ".*", slots=count, max_rank=RANK, max_stack=1)
    for adapter in adapters:
        bank.add(adapter)
    names = [f"a{row % count}" for row in range(ROWS)]
    selection = bank.select(names)

    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index in range(DEPTH):
                setattr(self, f"dense_{index}", torch.nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Any) -> Any:
            for index in range(DEPTH):
                x = torch.relu(getattr(self, f"dense_{index}")(x))
            return x

    base = Stack()
    for index in range(DEPTH):
        kernel, bias = (torch.tensor(w) for w in model.get_layer(f"dense_{index}").get_weights())
        getattr(base, f"dense_{index}").weight.data, getattr(base, f"dense_{index}").bias.data = kernel.T, bias
    tensor = torch.tensor(x)
    targets = [f"dense_{index}" for index in range(DEPTH)]
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets)
    theirs = peft.get_peft_model(base, config, adapter_name="a0")
    for adapter in adapters[1:]:
        theirs.add_adapter(adapter.name, config)
    for adapter in adapters:
        for path, part in adapter.parts.items():
            layer = getattr(theirs.base_model.model, path)
            layer.lora_A[adapter.name].weight.data = torch.tensor(part.a.T.copy())
            layer.lora_B[adapter.name].weight.data = torch.tensor(part.b.T.copy())
    theirs.eval()

    def run_ours() -> Any:
        with torch.no_grad(), bank.scope(selection):
            return model(tensor, training=False)

    def run_peft() -> Any:
        with torch.no_grad():
            return theirs(tensor, adapter_names=names)

    return {"ours": run_ours, "peft": run_peft, "plain": lambda: plain_of(model, tensor)}


def plain_of(model: Any, x: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(x, training=False)


def timed(turns: dict[str, Callable[[], Any]], rounds: int, against: str, check: bool) -> dict[str, Any]:
    """Ratios to `against` of every side, by the clock and in processor time."""
    outputs = {name: np.asarray(ops.convert_to_numpy(turn())) if check else turn() for name, turn in turns.items()}
    if check:
        reference = outputs["ours"]
        for name in set(outputs) - {"plain", "ours"}:
            apart = np.abs(outputs[name] - reference).max() / np.abs(reference).max()
            if not apart <= TOLERANCE:
                raise AssertionError(f"{name} is {apart:.1e} away from ours.")
    waiting = {name: (lambda turn=turn: wait(turn())) for name, turn in turns.items()}
    for turn in waiting.values():
        turn()
    times = alternate(waiting, rounds)
    return {
        name: {
            "seconds": spread(found.wall),
            "ratio": ratios(found.wall, times[against].wall),
            "processor_ratio": ratios(found.processor, times[against].processor),
        }
        for name, found in times.items()
    }


def wait(value: Any) -> None:
    if hasattr(value, "block_until_ready"):
        value.block_until_ready()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for count in options.adapters:
        if "keras" in options.sides:
            for kind in options.models:
                found = timed(forward_turns(kind, count), options.rounds, "plain", True)
                results.append({"what": "forward", "model": kind, "adapters": count, "sides": found})
                print(_line(results[-1]), flush=True)
                if options.train:
                    found = timed(train_turns(kind, count), options.rounds, "plain, adapted layers", False)
                    results.append({"what": "training step", "model": kind, "adapters": count, "sides": found})
                    print(_line(results[-1]), flush=True)
        if "peft" in options.sides:
            found = timed(peft_turns(count), options.rounds, "plain", True)
            results.append({"what": "forward, eager torch", "model": "dense", "adapters": count, "sides": found})
            print(_line(results[-1]), flush=True)
    return results


def _line(result: dict[str, Any]) -> str:
    sides = ", ".join(f"{name} {side['ratio']['median']:.2f}" for name, side in result["sides"].items())
    return f"{result['what']}, {result['model']}, K = {result['adapters']}: {sides}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sides", nargs="+", choices=("keras", "peft"), default=["keras"])
    parser.add_argument("--train", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    results = measure(options)
    rows = [
        [
            r["what"],
            r["model"],
            r["adapters"],
            name,
            f"{s['ratio']['median']:.2f}",
            f"{s['processor_ratio']['median']:.2f}",
        ]
        for r in results
        for name, s in r["sides"].items()
    ]
    print(table(["what", "model", "K", "side", "time / plain", "processor time / plain"], rows))
    settings = {"rows": ROWS, "length": LENGTH, "width": WIDTH, "rank": RANK, "depth": DEPTH, "rounds": options.rounds}
    path = options.output or RESULTS / f"multi_lora_{backend.BACKEND}.json"
    named = versions("keras", backend.BACKEND, "numpy", "keras-hub", "peft")
    write_json(
        path,
        {"settings": settings, "machine": machine(), "versions": named, "results": results},
    )


if __name__ == "__main__":
    main()
