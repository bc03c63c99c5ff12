"""Does the output follow the control? A small denoiser of real digits, then a ControlNet for 4x4 thumbnails.

    KERAS_BACKEND=jax python benchmarks/controlnet_digits.py

An MMDiT of KerasHub learns to draw scikit-learn's 8x8 digits without any condition. A ControlNet then learns, with that
denoiser frozen, to draw the digit whose 4x4 thumbnail (means of 2x2 pixels) it is shown. Measured on unseen digits:
the correlation of the thumbnail of what is drawn with the thumbnail that was shown, over samples; before
training, after it, and after it where each row is shown the thumbnail of another row and keeps its noise. Then the
drawing must follow the new thumbnail and leave the old one.
"""

import argparse
import time
from typing import Any

import keras
import numpy as np
from _common import RESULTS, machine, versions, write_json

import keras_diffusion_opd as kdo

DRAWS, SAMPLES, STEPS = 48, 360, 20


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images in [-1, 1]: to learn from, and held out."""
    from sklearn.datasets import load_digits

    images = (load_digits().images / 8.0 - 1.0).astype("float32")[..., None]
    order = np.random.default_rng(0).permutation(len(images))
    return images[order[SAMPLES:]], images[order[:SAMPLES]]


def thumbnails(images: np.ndarray) -> np.ndarray:
    """(batch, 8, 8, 1) -> (batch, 4, 4, 1): means of 2x2 pixels."""
    return images.reshape(-1, 4, 2, 4, 2, 1).mean((2, 4))


def denoiser(seed: int) -> Any:
    """A small MMDiT."""
    from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT

    keras.utils.set_random_seed(seed)
    return MMDiT(
        patch_size=2,
        hidden_dim=48,
        num_layers=3,
        num_heads=3,
        position_size=4,
        latent_shape=(8, 8, 1),
        context_shape=(1, 4),
        pooled_projection_shape=(4,),
        qk_norm="rms_norm",
    )


def inputs(latent: np.ndarray, time: np.ndarray) -> dict[str, np.ndarray]:
    """What the denoiser takes at times in [0, 1], without a condition."""
    rows = len(latent)
    empty = {"context": np.zeros((rows, 1, 4), "float32"), "pooled_projection": np.zeros((rows, 4), "float32")}
    return {"latent": latent, "timestep": 1000.0 * time.reshape(-1, 1).astype("float32"), **empty}


def noised(images: np.ndarray, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Inputs, velocities (noise - image) and the clean images of `DRAWS` draws for each image."""
    rng = np.random.default_rng(seed)
    clean = np.tile(images, (DRAWS, 1, 1, 1))
    noise = rng.normal(size=clean.shape).astype("float32")
    t = rng.uniform(size=(len(clean), 1, 1, 1)).astype("float32")
    return inputs((1 - t) * clean + t * noise, t), noise - clean, clean


def sample(model: Any, controls: dict[str, Any] | None, seed: int) -> np.ndarray:
    """Euler from noise to images."""
    x = np.random.default_rng(seed).normal(size=(SAMPLES, 8, 8, 1)).astype("float32")
    for step in range(STEPS, 0, -1):
        given: Any = inputs(x, np.full(SAMPLES, step / STEPS))
        given = given if controls is None else {"inputs": given, **controls}
        x = x - model.predict(given, batch_size=SAMPLES, verbose=0) / STEPS
    return x


def correlation(images: np.ndarray, shown: np.ndarray) -> float:
    """Mean over samples of the correlation over the pixels of two thumbnails."""
    a, b = (v.reshape(len(v), -1) for v in (thumbnails(images), shown))
    a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
    return float(np.mean((a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))))


def run(seed: int, epochs: int) -> dict[str, float]:
    """Everything for one seed."""
    learn, held_out = digits()
    base = denoiser(seed)
    x, velocity, clean = noised(learn, seed)
    base.compile(keras.optimizers.Adam(1e-3), "mse")
    base_loss = base.fit(x, velocity, batch_size=128, epochs=epochs, verbose=0).history["loss"][-1]
    before = kdo.provenance.digest(base)

    net = kdo.models.ControlNet.from_backbone(base, control_shape=(4, 4, 1), blocks=2)
    model = kdo.models.ControlledModel(base, {"thumbnail": net})
    shown = thumbnails(held_out)
    asked = model.select([{"thumbnail": image} for image in shown])
    other = np.roll(shown, 1, axis=0)
    swapped = model.select([{"thumbnail": image} for image in other])
    alone = sample(base, None, seed)
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    untrained = sample(model, asked, seed)
    rows = {"controls": {"thumbnail": thumbnails(clean)}, "strengths": {"thumbnail": np.ones(len(clean), "float32")}}
    history = model.fit({"inputs": x, **rows}, velocity, batch_size=128, epochs=epochs, verbose=0).history["loss"]
    trained, moved = sample(model, asked, seed), sample(model, swapped, seed)
    assert kdo.provenance.digest(base) == before, "the base has changed"
    return {
        "base_loss": base_loss,
        "control_loss": history[-1],
        "before_training": correlation(untrained, shown),
        "largest_difference_to_base_before_training": float(np.abs(untrained - alone).max()),
        "after_training": correlation(trained, shown),
        "swapped_with_what_is_shown_now": correlation(moved, other),
        "swapped_with_what_was_shown_before": correlation(moved, shown),
        "thumbnails_of_two_rows": correlation(held_out, other),
    }


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    start, found = time.perf_counter(), []
    for seed in range(options.seeds):
        found.append(run(seed, options.epochs))
        print({key: round(value, 4) for key, value in found[-1].items()})
    record = {
        "backend": keras.backend.backend(),
        "machine": machine(),
        "versions": versions("keras", "keras-hub", "jax", "tensorflow", "torch", "numpy", "scikit-learn"),
        "settings": {"draws": DRAWS, "samples": SAMPLES, "steps": STEPS, "epochs": options.epochs},
        "seconds": time.perf_counter() - start,
        "seeds": found,
    }
    write_json(RESULTS / f"controlnet_digits_{keras.backend.backend()}.json", record)


if __name__ == "__main__":
    main()
