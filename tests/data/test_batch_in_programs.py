"""Prepared batches under abstract evaluation, inside compiled functions, as trees, and sharded."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from tests.batches import fields
from tests.oracles import BACKEND, compiled, numpy, tensor

from keras_diffusion_opd.data import DenseTargets, PreparedBatch, Stamp

jax_only = pytest.mark.skipif(BACKEND != "jax", reason="jax.eval_shape, ShapeDtypeStruct and trees are JAX's")
torch_only = pytest.mark.skipif(BACKEND != "torch", reason="torch's own trees")


def batch(**changes):
    return PreparedBatch.create(**fields(**changes))


def abstract(make):
    """The sound batch with every array replaced by `make(shape, dtype)`."""
    arrays = PreparedBatch(**fields(teacher=DenseTargets(np.zeros((2, 3, 5), "float32"))))
    return arrays.map(lambda x: make(x.shape, x.dtype.name))


# ---- abstract arrays -----------------------------------------------------------------------------------


def test_symbolic_keras_tensors_are_validated_without_values():
    symbolic = abstract(keras.KerasTensor)
    assert symbolic.validate() is symbolic
    assert symbolic.rows == 2


def test_symbolic_tensors_of_unknown_length_are_taken():
    symbolic = PreparedBatch.create(
        model_inputs=keras.KerasTensor((None, 4), "int32"),
        target_ids=keras.KerasTensor((None, None), "int32"),
        loss_weights=keras.KerasTensor((None, None), "float32"),
    )
    assert symbolic.rows is None
    symbolic.validate_logits(keras.KerasTensor((None, None, 8), "float32"))


def test_static_rules_hold_for_abstract_arrays_too():
    broken = abstract(lambda shape, dtype: keras.KerasTensor(shape, "float32"))
    with pytest.raises(TypeError, match="`target_ids` must have an integer dtype"):
        broken.validate()


@jax_only
def test_validation_works_on_shape_dtype_structs_and_under_eval_shape():
    import jax

    structs = abstract(jax.ShapeDtypeStruct)
    assert structs.validate() is structs
    logits = jax.ShapeDtypeStruct((2, 3, 8), "float32")
    assert structs.validate_logits(logits) is logits
    shapes = jax.eval_shape(lambda b: b.validate(), batch())
    assert isinstance(shapes, PreparedBatch)
    assert shapes.target_ids.shape == (2, 3) and str(shapes.target_ids.dtype) == "int32"


# ---- trees ---------------------------------------------------------------------------------------------


@jax_only
def test_batch_of_two_inputs_has_four_leaves_and_five_with_a_teacher():
    import jax

    assert len(jax.tree.leaves(batch())) == 4
    assert len(jax.tree.leaves(batch(teacher=DenseTargets(np.zeros((2, 3, 5), "float32"))))) == 5
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch())]
    assert paths == [".model_inputs['input_tokens']", ".model_inputs['noise_levels']", ".target_ids", ".loss_weights"]


def flatten_and_back(whole):
    """`(leaves, rebuild)` by the backend's own trees."""
    if BACKEND == "jax":
        import jax

        leaves, tree = jax.tree.flatten(whole)
        return leaves, lambda children: jax.tree.unflatten(tree, children)
    from torch.utils import _pytree

    leaves, tree = _pytree.tree_flatten(whole)
    return leaves, lambda children: _pytree.tree_unflatten(children, tree)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="tf.nest has no open registry; as_fit() is the way there")
def test_tree_round_trip_keeps_everything_and_does_not_validate():
    whole = batch(teacher=DenseTargets(np.zeros((2, 3, 5), "float32")), stamp=Stamp(policy_version=3))
    leaves, rebuild = flatten_and_back(whole)
    back = rebuild(leaves)
    assert back.stamp == whole.stamp and back.teacher.logits is whole.teacher.logits
    assert back.model_inputs.keys() == whole.model_inputs.keys() and back.target_ids is whole.target_ids
    assert rebuild(["no array"] * len(leaves)).loss_weights == "no array"


@jax_only
def test_batch_is_an_argument_and_a_result_of_jit():
    import jax

    whole = batch(teacher=DenseTargets(np.zeros((2, 3, 5), "float32")), stamp=Stamp(policy_version=3))
    back, products = jax.jit(lambda b: (b.validate(), b.target_ids * b.loss_weights))(whole)
    np.testing.assert_array_equal(products, whole.target_ids * whole.loss_weights)
    assert isinstance(back, PreparedBatch) and isinstance(back.teacher, DenseTargets) and back.stamp == whole.stamp


def test_batch_passes_a_compiled_function_as_what_fit_takes():
    seen = []

    def program(x, y, sample_weight):
        inside = PreparedBatch.from_fit(x, y, sample_weight).validate()
        seen.append(inside)
        return keras.ops.cast(inside.target_ids, "float32") * inside.loss_weights

    whole = batch(teacher=DenseTargets(np.zeros((2, 3, 5), "float32"))).map(keras.ops.convert_to_tensor)
    products = compiled(program)(*whole.as_fit())
    np.testing.assert_array_equal(numpy(products), fields()["target_ids"] * fields()["loss_weights"])
    assert isinstance(seen[0].teacher, DenseTargets)


def test_static_rules_raise_inside_a_compiled_function():
    def program(weights):
        return PreparedBatch(**fields(loss_weights=weights)).validate().loss_weights

    with pytest.raises(ValueError, match=r"`loss_weights` must match target_ids shape \(2, 3\)"):
        compiled(program)(tensor(np.ones((2, 4))))


@pytest.mark.skipif(BACKEND == "torch", reason="torch trains eagerly: its values can be read and are")
def test_values_are_not_read_inside_a_compiled_function():
    def program(weights):
        return PreparedBatch(**fields(loss_weights=weights)).validate().loss_weights

    assert np.isnan(numpy(compiled(program)(tensor(np.full((2, 3), np.nan))))).all()


def test_scorer_gives_float32_logits_inside_a_compiled_function():
    def program(tokens, levels):
        inputs = {"input_tokens": tokens, "noise_levels": levels}
        hot = keras.ops.one_hot(inputs["input_tokens"], 8) * keras.ops.reshape(inputs["noise_levels"], (-1, 1, 1))
        return PreparedBatch(**fields(model_inputs=inputs)).validate().validate_logits(hot)

    inputs = fields()["model_inputs"]
    logits = compiled(program)(tensor(inputs["input_tokens"], "int32"), tensor(inputs["noise_levels"]))
    assert tuple(logits.shape) == (2, 3, 8) and keras.backend.standardize_dtype(logits.dtype) == "float32"


# ---- sharding --------------------------------------------------------------------------------------------

SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.batches import fields
from keras_diffusion_opd.data import DenseTargets, PreparedBatch

mesh = Mesh(np.array(jax.devices()), ("data",))
sharding = NamedSharding(mesh, PartitionSpec("data"))
whole = PreparedBatch.create(**fields(teacher=DenseTargets(np.zeros((2, 3, 5), "float32"))))
spread = jax.device_put(whole, sharding)
leaves = jax.tree.leaves(spread)
assert len(leaves) == 5 and all(len(x.sharding.device_set) == 2 for x in leaves)
assert all(x.addressable_shards[0].data.shape[0] == 1 for x in leaves)
back = jax.jit(lambda b: b.validate(), out_shardings=sharding)(spread.validate())
np.testing.assert_array_equal(back.loss_weights, whole.loss_weights)
"""


@jax_only
def test_every_leaf_shards_over_the_data_axis():
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
