"""Layers: the sites at which adapters act on a model that stays what it is.

- `BankedSite`: the factors of many adapters at one layer, chosen for each sample.
- `TrainedSite`: those of the one adapter that is being trained.
- `TimeEmbedding`: what a denoiser is told of the time.
"""

from keras_diffusion_opd.layers.banked_site import BankedSite
from keras_diffusion_opd.layers.time_embedding import TimeEmbedding
from keras_diffusion_opd.layers.trained_site import TrainedSite

__all__ = ["BankedSite", "TimeEmbedding", "TrainedSite"]
