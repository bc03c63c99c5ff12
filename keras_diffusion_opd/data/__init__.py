"""Prepared batches, teacher targets, corruption, datasets."""

from keras_diffusion_opd.data.corruption import CorruptedTokens, MaskedCorruption
from keras_diffusion_opd.data.dataset import PreparedDataset, StaleBatchError
from keras_diffusion_opd.data.hidden_targets import HiddenTargets
from keras_diffusion_opd.data.output_head import OutputHead
from keras_diffusion_opd.data.prepared_batch import PreparedBatch, concatenate_batches
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.data.targets import DenseTargets, TeacherTargets
from keras_diffusion_opd.data.top_k_targets import TopKTargets
from keras_diffusion_opd.data.violations import violations

__all__ = [
    "CorruptedTokens",
    "DenseTargets",
    "HiddenTargets",
    "MaskedCorruption",
    "OutputHead",
    "PreparedBatch",
    "PreparedDataset",
    "StaleBatchError",
    "Stamp",
    "TeacherTargets",
    "TopKTargets",
    "concatenate_batches",
    "violations",
]
