"""Where weights come from, in a form that a program can check.

`digest` names a model or data by content. A `Recipe` says how a model was made, a `Lineage` chains recipes
from the first model to the last, a `RunRecord` keeps one run, a `ModelCard` shows it to people. Nothing here
needs more than the standard library and NumPy, and everything is read without running code from files.
"""

from keras_diffusion_opd.provenance.canonical import (
    RESERVED_KEYS,
    canonical_json,
    check_digest,
    plain_json,
)
from keras_diffusion_opd.provenance.digests import (
    LeafDigest,
    digest,
    digest_of_leaves,
    leaf_digests,
    text_digest,
)
from keras_diffusion_opd.provenance.environment import installed_versions, machine
from keras_diffusion_opd.provenance.files import (
    file_digest,
    new_directory,
    read_json,
    write_bytes,
    write_json,
)
from keras_diffusion_opd.provenance.lineage import Lineage, Link
from keras_diffusion_opd.provenance.model_card import ModelCard, lineage_diagram, markdown_table
from keras_diffusion_opd.provenance.recipe import Parent, Recipe
from keras_diffusion_opd.provenance.run_record import RunRecord
from keras_diffusion_opd.provenance.verify import Verified, record_files, verify_path

__all__ = [
    "RESERVED_KEYS",
    "LeafDigest",
    "Lineage",
    "Link",
    "ModelCard",
    "Parent",
    "Recipe",
    "RunRecord",
    "Verified",
    "canonical_json",
    "check_digest",
    "digest",
    "digest_of_leaves",
    "file_digest",
    "installed_versions",
    "leaf_digests",
    "lineage_diagram",
    "machine",
    "markdown_table",
    "new_directory",
    "plain_json",
    "read_json",
    "record_files",
    "text_digest",
    "verify_path",
    "write_bytes",
    "write_json",
]
