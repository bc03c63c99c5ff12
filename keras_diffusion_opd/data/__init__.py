"""Prepared batches, teacher targets, corruption, datasets."""

from keras_diffusion_opd.data.alignment import AlignmentError, TargetFit, check_alignment, target_fit
from keras_diffusion_opd.data.concatenation import concatenate_batches
from keras_diffusion_opd.data.corruption import BlockCorruption, MaskedCorruption
from keras_diffusion_opd.data.dataset import PreparedDataset, StaleBatchError
from keras_diffusion_opd.data.flow_batch import FlowBatch
from keras_diffusion_opd.data.hidden_targets import HiddenTargets
from keras_diffusion_opd.data.output_head import OutputHead
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.reward_batch import RewardBatch
from keras_diffusion_opd.data.row_digests import require_rows, row_digests
from keras_diffusion_opd.data.sampled_targets import SampledTargets
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.data.store import (
    PackedDense,
    PackedHidden,
    PackedSampled,
    PackedTopK,
    StoreError,
    TargetPacking,
    TeacherStore,
)
from keras_diffusion_opd.data.targets import DenseTargets, TeacherTargets
from keras_diffusion_opd.data.teacher_checks import DegenerateTeacherError, check_teacher
from keras_diffusion_opd.data.token_corruption import CorruptedTokens, TokenCorruption
from keras_diffusion_opd.data.top_k_targets import TopKTargets
from keras_diffusion_opd.data.uniform_corruption import UniformCorruption
from keras_diffusion_opd.data.violations import violations
from keras_diffusion_opd.data.vocabularies import fit_vocabulary

__all__ = [
    "AlignmentError",
    "BlockCorruption",
    "CorruptedTokens",
    "DegenerateTeacherError",
    "DenseTargets",
    "FlowBatch",
    "HiddenTargets",
    "MaskedCorruption",
    "OutputHead",
    "PackedDense",
    "PackedHidden",
    "PackedSampled",
    "PackedTopK",
    "PreparedBatch",
    "PreparedDataset",
    "RewardBatch",
    "SampledTargets",
    "StaleBatchError",
    "Stamp",
    "StoreError",
    "TargetFit",
    "TargetPacking",
    "TeacherStore",
    "TeacherTargets",
    "TokenCorruption",
    "TopKTargets",
    "UniformCorruption",
    "check_alignment",
    "check_teacher",
    "concatenate_batches",
    "fit_vocabulary",
    "require_rows",
    "row_digests",
    "target_fit",
    "violations",
]
