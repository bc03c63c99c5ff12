"""ControlNets over KerasHub's MMDiT and Flux as they are."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.adapters import AdapterBank
from keras_diffusion_opd.models import ControlledModel, ControlNet
from tests.adapters.hub_models import ROWS, build
from tests.adapters.tools import random_adapter, same_bits, values

SHAPES = {"mmdit": (8, 8, 1), "flux": (4, 5)}


def to_tensors(tree: Any) -> Any:
    return keras.tree.map_structure(lambda x: ops.convert_to_tensor(x, "float32"), tree)


def numbers(y: Any) -> np.ndarray:
    return np.array(ops.convert_to_numpy(y))


def awaken(net: ControlNet, seed: int = 0) -> None:
    """Give the embedding of the control and the projections values that are not zero."""
    rng = np.random.default_rng(seed)
    for layer in (net.control_embedding, *net.projections):
        for variable in layer.variables:
            variable.assign(0.2 * rng.normal(size=variable.shape).astype("float32"))


def rerun(base: Any, x: Any, residuals: list[Any]) -> np.ndarray:
    """MMDiT written out over its layers, with what is added after each block."""
    h = base.patch_embedding(x["latent"])
    h = h + base.position_embedding(h, height=2, width=2)
    context = base.context_embedding(x["context"])
    time = base.timestep_embedding(x["timestep"]) + base.vector_embedding(x["pooled_projection"])
    for index, block in enumerate(base.joint_blocks):
        if block.use_context_projection:
            h, context = block(h, context, time)
        else:
            h = block(h, context, time)
        h = h + residuals[index] if index < len(residuals) else h
    return numbers(base.unpatch(base.output_dense(base.output_ada_layer_norm(h, time)), height=2, width=2))


@pytest.fixture(scope="module", params=("mmdit", "flux"))
def world(request: Any) -> Any:
    name = request.param
    base, inputs, _ = build(name)
    x = to_tensors(inputs)
    before, plain = values(base), numbers(base(x, training=False))
    nets = {
        key: ControlNet.from_backbone(base, control_shape=SHAPES[name], blocks=blocks)
        for key, blocks in (("edges", 1), ("pose", len(base.joint_blocks) if name == "mmdit" else 1))
    }
    model = ControlledModel(base, nets)
    rng = np.random.default_rng(1)
    images = rng.normal(size=(ROWS, *SHAPES[name])).astype("float32")
    fresh = numbers(model({"inputs": x, **to_tensors(model.select([{"edges": image} for image in images]))}))
    for seed, net in enumerate(nets.values()):
        awaken(net, seed)
    yield {"base": base, "x": x, "before": before, "plain": plain, "model": model, "images": images, "fresh": fresh}
    model.detach()


def run(world: Any, rows: list[Any]) -> np.ndarray:
    return numbers(world["model"]({"inputs": world["x"], **to_tensors(world["model"].select(rows))}))


def test_new_control_net_adds_exactly_nothing_and_the_base_outside_is_what_it_was(world: Any) -> None:
    assert same_bits([world["fresh"]], [world["plain"]])
    assert same_bits([numbers(world["base"](world["x"], training=False))], [world["plain"]])
    assert same_bits(values(world["base"]), world["before"])
    assert world["model"].control_nets["edges"].base_digest == world["model"].control_nets["pose"].base_digest


def test_rows_follow_their_own_control_where_it_is_and_as_much_as_they_ask_for(world: Any) -> None:
    images, plain = world["images"], world["plain"]
    first = run(world, [{"edges": image} for image in images])
    assert all(np.abs(first[row] - plain[row]).max() > 1e-3 for row in range(ROWS))
    # Another image in row 1, strength 0 in row 2, half in row 3: rows that ask for the same keep their bits.
    rows = [{"edges": images[0]}, {"edges": images[1][::-1]}, {"edges": (images[2], 0.0)}, {"edges": (images[3], 0.5)}]
    second = run(world, rows)
    assert same_bits([second[0]], [first[0]]) and same_bits([second[2]], [plain[2]])
    assert np.abs(second[1] - first[1]).max() > 1e-3  # the same mean, elsewhere
    assert np.abs(second[3] - first[3]).max() > 1e-4 and np.abs(second[3] - plain[3]).max() > 1e-4
    # A control of NaN reaches its own row alone, and no row at strength 0.
    chosen = world["model"].select(rows)
    chosen["controls"]["edges"][1:3] = np.nan
    third = numbers(world["model"]({"inputs": world["x"], **to_tensors(chosen)}))
    assert same_bits([third[[0, 2, 3]]], [second[[0, 2, 3]]]) and np.isnan(third[1]).all()


def test_missing_controls_are_errors(world: Any) -> None:
    model, image = world["model"], world["images"][0]
    with pytest.raises(ValueError, match="Row 1 names 'edges' and has no control"):
        model.select([{}, {"edges": (None, 1.0)}])
    with pytest.raises(KeyError, match="depth"):
        model.select([{"depth": image}])
    with pytest.raises(ValueError, match=r"must be finite and of shape"):
        model.select([{"edges": image[:1]}])
    chosen = to_tensors(model.select([{"edges": image}] * ROWS))
    for key in ("controls", "strengths"):
        with pytest.raises(ValueError, match="needs its control and its strengths"):
            model({"inputs": world["x"], **chosen, key: {}})
    with pytest.raises(ValueError, match="must be a dict of"):
        model(world["x"])


def test_several_at_once_equal_the_denoiser_written_out_beside_an_adapter_bank() -> None:
    base, inputs, _ = build("mmdit")
    x = to_tensors(inputs)
    nets = {
        "edges": ControlNet.from_backbone(base, control_shape=(8, 8, 1)),
        "pose": ControlNet.from_backbone(base, control_shape=(4, 3), blocks=2),
    }
    for seed, net in enumerate(nets.values()):
        awaken(net, seed)
    model = ControlledModel(base, nets)
    bank = AdapterBank(base, r".*attention_(qkv|proj)", slots=1, max_rank=2, max_stack=1)
    bank.add(random_adapter("a", base, [*bank.paths]))
    rng = np.random.default_rng(2)
    edges, pose = rng.normal(size=(ROWS, 8, 8, 1)), rng.normal(size=(ROWS, 4, 3))
    rows = [{"edges": edges[0]}, {"edges": edges[1], "pose": (pose[1], -0.5)}, {"pose": pose[2]}, {}]
    chosen = to_tensors(model.select(rows))
    residuals: list[Any] = [0.0, 0.0]
    for key, net in nets.items():
        for index, added in enumerate(net(x, chosen["controls"][key])):
            residuals[index] = residuals[index] + added * ops.reshape(chosen["strengths"][key], (-1, 1, 1))
    # The same sums in another order.
    np.testing.assert_allclose(numbers(model({"inputs": x, **chosen})), rerun(base, x, residuals), atol=2e-6)
    with bank.scope(bank.select(["a", None, "a", "a"])):
        both, wanted = numbers(model({"inputs": x, **chosen})), rerun(base, x, residuals)
        adapted = numbers(base(x, training=False))
    np.testing.assert_allclose(both, wanted, atol=2e-6)
    assert same_bits([both[3]], [adapted[3]])
    assert same_bits([both[1]], [numbers(model({"inputs": x, **chosen}))[1]])
    model.detach()
    assert same_bits([numbers(model({"inputs": x, **chosen}))], [numbers(base(x, training=False))])


def test_fit_trains_the_control_net_alone_and_its_file_continues(tmp_path: Path) -> None:
    base, inputs, _ = build("mmdit")
    net = ControlNet.from_backbone(base, control_shape=(8, 8, 1), blocks=1)
    model = ControlledModel(base, {"edges": net})
    rng = np.random.default_rng(3)
    rows = [{"edges": rng.normal(size=(8, 8, 1))} for _ in range(ROWS)]
    batch = {"inputs": inputs, **model.select(rows)}
    target = rng.normal(size=(ROWS, 4, 4, 4)).astype("float32")
    before, flags = values(base), [v.trainable for v in base.variables]
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    losses = model.fit(batch, target, batch_size=ROWS, epochs=12, verbose=0).history["loss"]
    # The first loss is that of the base: one forward for training and for all else.
    np.testing.assert_allclose(losses[0], np.mean((numbers(base(to_tensors(inputs))) - target) ** 2), rtol=1e-5)
    assert losses[-1] < 0.9 * losses[0]
    assert same_bits(values(base), before) and [v.trainable for v in base.variables] == flags
    assert np.abs(numbers(net.control_embedding.kernel)).max() > 0

    net.save(tmp_path / "edges.keras")
    loaded = keras.saving.load_model(tmp_path / "edges.keras")
    x, control = to_tensors(inputs), to_tensors(batch["controls"]["edges"])
    assert loaded.base_digest == net.base_digest
    assert same_bits([numbers(r) for r in loaded(x, control)], [numbers(r) for r in net(x, control)])
    base.output_dense.bias.assign(np.ones(base.output_dense.bias.shape))
    with pytest.raises(ValueError, match="belongs to a base of digest"):
        ControlledModel(base, {"edges": loaded})
    ControlledModel(base, {"edges": loaded}, check_base=False).detach()


def test_arguments_that_do_not_fit_are_refused() -> None:
    base, _, _ = build("mmdit")
    with pytest.raises(ValueError, match="multiples of"):
        ControlNet.from_backbone(base, control_shape=(7, 8, 1))
    with pytest.raises(ValueError, match="at most 2"):
        ControlNet.from_backbone(base, control_shape=(4, 3), blocks=3)
    with pytest.raises(ValueError, match="must be KerasHub's MMDiT"):
        ControlNet.from_backbone(keras.Sequential([keras.layers.Dense(2)]), control_shape=(4, 3))
    with pytest.raises(ValueError, match="at least one ControlNet"):
        ControlledModel(base, {})
