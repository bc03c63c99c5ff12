"""The teacher store: prepared rows with a teacher's targets on disk."""

from keras_diffusion_opd.data.store.packed_dense import PackedDense
from keras_diffusion_opd.data.store.packed_hidden import PackedHidden
from keras_diffusion_opd.data.store.packed_sampled import PackedSampled
from keras_diffusion_opd.data.store.packed_top_k import PackedTopK
from keras_diffusion_opd.data.store.packing import TargetPacking
from keras_diffusion_opd.data.store.teacher_store import TeacherStore
from keras_diffusion_opd.provenance.row_shard import StoreError

__all__ = ["PackedDense", "PackedHidden", "PackedSampled", "PackedTopK", "StoreError", "TargetPacking", "TeacherStore"]
