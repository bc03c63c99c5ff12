"""Draws block_diffusion_mask.png: python docs/images/block_diffusion_mask.py."""

from pathlib import Path

import matplotlib
import numpy as np

from keras_diffusion_opd.models import block_diffusion_mask

LENGTH, SIZE = 6, 2
NOISED, CLEAN = "#3b6fb6", "#e0a33a"

matplotlib.use("agg")
from matplotlib import pyplot as plt  # noqa: E402

mask = block_diffusion_mask(LENGTH, SIZE)
colours = np.ones((2 * LENGTH, 2 * LENGTH, 3))
for half, colour in ((slice(0, LENGTH), NOISED), (slice(LENGTH, None), CLEAN)):
    colours[:, half][mask[:, half]] = matplotlib.colors.to_rgb(colour)
figure, axes = plt.subplots(figsize=(5.2, 5.2), layout="constrained")
axes.imshow(colours, extent=(0, 2 * LENGTH, 2 * LENGTH, 0))
for place in range(2 * LENGTH + 1):
    width = 2.0 if place == LENGTH else 1.0 if place % SIZE == 0 else 0.25
    axes.axhline(place, color="black", linewidth=width)
    axes.axvline(place, color="black", linewidth=width)
names = [f"{name}{i}" for name in ("x", "c") for i in range(LENGTH)]
places = np.arange(2 * LENGTH) + 0.5
axes.set_xticks(places, names)
axes.set_yticks(places, names)
axes.xaxis.tick_top()
axes.tick_params(length=0)
axes.xaxis.set_label_position("top")
axes.set_xlabel("seen: noised tokens x (blue), clean tokens c (orange)")
axes.set_ylabel("who sees")
figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)
