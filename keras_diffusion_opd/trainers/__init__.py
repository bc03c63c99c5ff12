"""Trainers: `X(student, ...).compile(...).fit(dataset)`, then `.student`."""

from keras_diffusion_opd.trainers.diffusion_nft_trainer import DiffusionNFTTrainer
from keras_diffusion_opd.trainers.flow_matching_trainer import FlowMatchingTrainer
from keras_diffusion_opd.trainers.prepared_trainer import PreparedTrainer

__all__ = ["DiffusionNFTTrainer", "FlowMatchingTrainer", "PreparedTrainer"]
