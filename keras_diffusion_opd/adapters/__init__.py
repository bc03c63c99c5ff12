"""Adapters: LoRA and DoRA over one resident base, chosen for each sample, trained, exchanged and fused.

- `Adapter`, `AdapterPart`: one adapter, immutable, known by its digest; PEFT, diffusers and kohya files.
- `AdapterBank`: adapters in slots beside a model; `Stack`: which of them a row gets, and how much of each.
- `AdaptedModel`: base and adapters as one Keras model, with one adapter's variables to train.
- `save_to_preset`, `list_preset`, `load_from_preset`, `verify_preset`: adapters within a KerasHub preset.
- `Lease`, `Selection`: what pins adapters, and what a batch has chosen.
"""

from keras_diffusion_opd.adapters.adapted_model import AdaptedModel
from keras_diffusion_opd.adapters.adapter import Adapter
from keras_diffusion_opd.adapters.adapter_part import AdapterPart
from keras_diffusion_opd.adapters.bank import AdapterBank
from keras_diffusion_opd.adapters.presets import list_preset, load_from_preset, save_to_preset, verify_preset
from keras_diffusion_opd.adapters.selection import Selection
from keras_diffusion_opd.adapters.slots import Lease
from keras_diffusion_opd.adapters.stack import Stack

__all__ = [
    "AdaptedModel",
    "Adapter",
    "AdapterBank",
    "AdapterPart",
    "Lease",
    "Selection",
    "Stack",
    "list_preset",
    "load_from_preset",
    "save_to_preset",
    "verify_preset",
]
