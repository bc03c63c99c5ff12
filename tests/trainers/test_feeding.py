"""`fit` takes what people have: arrays, generators, PyDatasets, tf.data, grain, torch DataLoaders."""

import importlib.util

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from tests.students import V, fit, make_batches, make_trainer, same_bits, weights_of

BATCHES = make_batches([(2, 6)] * 4)


def expected_weights():
    trainer = make_trainer(accumulation_steps=2)
    fit(trainer, BATCHES)
    return weights_of(trainer.student)


class Batches(keras.utils.PyDataset):
    def __init__(self, as_tuples):
        super().__init__()
        self.as_tuples = as_tuples

    def __len__(self):
        return len(BATCHES)

    def __getitem__(self, index):
        return BATCHES[index].as_fit() if self.as_tuples else BATCHES[index]


def tf_data():
    import tensorflow as tf

    signature = keras.tree.map_structure(
        lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype.name), BATCHES[0].as_fit()
    )
    return tf.data.Dataset.from_generator(lambda: (b.as_fit() for b in BATCHES), output_signature=signature)


def grain_map(as_tuples):
    import grain

    return grain.MapDataset.source([b.as_fit() if as_tuples else b for b in BATCHES])


def torch_loader(as_tuples):
    import torch

    items = [b.as_fit() if as_tuples else b for b in BATCHES]
    return torch.utils.data.DataLoader(items, batch_size=None, collate_fn=lambda item: item)


def arrays():
    return kdo.data.concatenate_batches(BATCHES)


SOURCES = {
    "list": lambda: BATCHES,
    "generator": lambda: (b for b in BATCHES),
    "generator_of_tuples": lambda: (b.as_fit() for b in BATCHES),
    "pydataset": lambda: Batches(False),
    "pydataset_of_tuples": lambda: Batches(True),
    "prepared_dataset_of_rows": lambda: kdo.data.PreparedDataset(arrays(), batch_size=2),
    "tf_data": tf_data,
    "grain": lambda: grain_map(False),
    "grain_of_tuples": lambda: grain_map(True),
    "grain_iter": lambda: grain_map(False).to_iter_dataset(),
    "torch_loader": lambda: torch_loader(False),
    "torch_loader_of_tuples": lambda: torch_loader(True),
}
NEEDS = {"tf": "tensorflow", "grain": "grain", "torch": "torch"}


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_windows(name):
    package = NEEDS.get(name.split("_")[0])
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed beside this backend")
    trainer = make_trainer(accumulation_steps=2)
    source = SOURCES[name]()
    steps = {"steps_per_epoch": 4} if name in ("tf_data", "grain_iter") or name.startswith("generator") else {}
    trainer.fit(source, shuffle=False, verbose=0, **steps)
    assert same_bits(weights_of(trainer.student), expected_weights())


@pytest.mark.parametrize("form", ["batch", "arrays"])
def test_rows_given_whole_are_cut_into_batches(form):
    trainer = make_trainer(accumulation_steps=2)
    whole = arrays()
    given = {"x": whole}
    if form == "arrays":
        x, y, weights = whole.as_fit()
        given = {"x": x, "y": y, "sample_weight": weights}
    trainer.fit(**given, batch_size=2, shuffle=False, verbose=0)
    assert same_bits(weights_of(trainer.student), expected_weights())


def test_validation_data_takes_the_same_forms():
    results = []
    for held_out in (arrays(), BATCHES, arrays().as_fit(), kdo.data.PreparedDataset(arrays(), batch_size=3)):
        trainer = make_trainer(optimizer=keras.optimizers.SGD(0.0))
        results.append(trainer.fit(BATCHES, validation_data=held_out, verbose=0).history["val_loss"][0])
    np.testing.assert_allclose(results, results[0], rtol=1e-6)


def test_batches_of_a_third_length_are_taken():
    trainer = make_trainer()
    history = fit(trainer, make_batches([(2, 6), (2, 6), (1, 3)]))
    assert trainer.policy_version == 3
    assert np.isfinite(history.history["loss"][0])


def test_shuffled_order_is_a_function_of_seed_and_epoch_and_drives_training():
    orders = []

    def trained(seed, epochs):
        trainer = make_trainer()
        dataset = kdo.data.PreparedDataset(BATCHES, shuffle=True, seed=seed)
        trainer.fit(dataset, epochs=epochs, verbose=0)
        return weights_of(trainer.student)

    for _ in range(2):
        orders.append(trained(seed=3, epochs=2))
    assert same_bits(*orders)
    assert not same_bits(orders[0], trained(seed=4, epochs=2))


def test_initial_epoch_continues_the_order_of_an_uninterrupted_run():
    straight, resumed = make_trainer(), make_trainer()

    def rows():
        return kdo.data.PreparedDataset(BATCHES, shuffle=True, seed=3)

    straight.fit(rows(), epochs=3, verbose=0)
    resumed.fit(rows(), epochs=1, verbose=0)
    resumed.fit(rows(), epochs=3, initial_epoch=1, verbose=0)
    assert same_bits(weights_of(straight.student), weights_of(resumed.student))


def test_adapter_is_called_once_for_each_batch_drawn_with_the_identical_object():
    raw = [object() for _ in BATCHES]
    seen = []

    def adapter(item):
        seen.append(item)
        return BATCHES[raw.index(item)]

    trainer = make_trainer(loss=kdo.losses.TokenCrossEntropyLoss())
    start = weights_of(trainer.student)
    history = trainer.fit(kdo.data.PreparedDataset(raw, adapter=adapter), verbose=0)
    drawn = seen[-len(raw) :]
    assert all(a is b for a, b in zip(drawn, raw, strict=True))
    # Keras and TensorFlow may look at the first batch to learn its structure, no more.
    assert len(seen) - len(raw) <= 2 and all(item is raw[0] for item in seen[: -len(raw)])
    assert np.isfinite(history.history["loss"][0])
    assert not same_bits(start, weights_of(trainer.student))


@pytest.mark.parametrize("kind", ["tuple", "nested", "single"])
def test_any_nest_of_inputs_reaches_the_student(kind):
    ids, noise = keras.Input((6,), dtype="int32"), keras.Input((), dtype="float32")
    h = keras.layers.Embedding(V, 8)(ids) + keras.ops.reshape(noise, (-1, 1, 1))
    out = keras.layers.Dense(V)(h)
    tokens, levels = BATCHES[0].model_inputs["token_ids"], np.array([0.1, 0.9], "float32")
    shapes = {"tuple": (ids, noise), "nested": {"a": [ids], "b": {"c": noise}}, "single": ids}
    values = {"tuple": (tokens, levels), "nested": {"a": [tokens], "b": {"c": levels}}, "single": tokens}
    student = keras.Model(
        shapes[kind], out if kind != "single" else keras.layers.Dense(V)(keras.layers.Embedding(V, 8)(ids))
    )
    batch = kdo.data.PreparedBatch.create(
        model_inputs=values[kind],
        target_ids=BATCHES[0].target_ids,
        loss_weights=np.ones((2, 6), bool),
        teacher=BATCHES[0].teacher,
    )
    trainer = make_trainer(student)
    losses = fit(trainer, [batch], epochs=3).history["loss"]
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(trainer.evaluate([batch], verbose=0, return_dict=True)["loss"], losses[-1], rtol=0.5)
