"""Contracts: what Keras asks of every layer, model, loss and metric, for this library's and for yours.

Each runner takes a class and its arguments, runs named checks in order, and raises a `ContractError`
that says which failed, what was expected, what was received and how to mend it. A check may be left
out by name, with a reason. They run on the backend of the process and need no test framework.
"""

from keras_diffusion_opd.testing.contract import ContractError, Report
from keras_diffusion_opd.testing.layers import check_layer_contract
from keras_diffusion_opd.testing.losses import check_loss_contract
from keras_diffusion_opd.testing.metrics import check_metric_contract
from keras_diffusion_opd.testing.models import check_model_contract

__all__ = [
    "ContractError",
    "Report",
    "check_layer_contract",
    "check_loss_contract",
    "check_metric_contract",
    "check_model_contract",
]
