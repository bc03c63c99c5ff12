"""Prepared batches, teacher targets, corruption, datasets."""

from keras_diffusion_opd.data.concatenation import concatenate_batches
from keras_diffusion_opd.data.corruption import BlockCorruption, MaskedCorruption
from keras_diffusion_opd.data.dataset import PreparedDataset, StaleBatchError
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.data.targets import DenseTargets, TeacherTargets
from keras_diffusion_opd.data.token_corruption import CorruptedTokens, TokenCorruption
from keras_diffusion_opd.data.top_k_targets import TopKTargets
from keras_diffusion_opd.data.uniform_corruption import UniformCorruption
from keras_diffusion_opd.data.violations import violations

__all__ = [
    "BlockCorruption",
    "CorruptedTokens",
    "DenseTargets",
    "MaskedCorruption",
    "PreparedBatch",
    "PreparedDataset",
    "StaleBatchError",
    "Stamp",
    "TeacherTargets",
    "TokenCorruption",
    "TopKTargets",
    "UniformCorruption",
    "concatenate_batches",
    "violations",
]
