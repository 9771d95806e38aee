"""Code for one model that would do something else, or nothing, to stacked ones.

Some functions of torch take one number over all tensors, and so couple the models.

An update that goes element by element serves any number of models, and so do most of torch's optimizers. These do not:
a norm over all gradients, a line search, averages over rows and columns of a parameter.
"""

from __future__ import annotations

import warnings
from types import FrameType

import torch
from torch.nn.modules import module
from torch.nn.utils import clip_grad
from torch.optim import optimizer

from hocket.pystate.origins import is_user_code, level_of_user

OPTIMIZERS = {
    torch.optim.LBFGS: "one direction and one length of a step for all parameters",
    torch.optim.Adafactor: "averages over the axes of a parameter, of which the first one is the models'",
    torch.optim.Muon: "a matrix as a whole, and rows of stacked vectors are models",
}


def warn_of_coupling(reader: FrameType) -> None:
    """Warn where what asks for the parameters of fused models is one of these functions or optimizers of torch."""
    code = reader.f_code
    if code.co_name == "clip_grad_norm_" and code.co_filename == clip_grad.__file__:
        message = (
            "torch.nn.utils.clip_grad_norm_ takes one norm over all models, so that each is scaled by the others' "
            "gradients too; hocket.optim.clip_grad_norm_ clips each model on its own"
        )
    elif code.co_filename == optimizer.__file__:  # `__init__`, or `add_param_group`
        kind = type(reader.f_locals.get("self"))
        found = next((what for each, what in OPTIMIZERS.items() if issubclass(kind, each)), None)
        if found is None:
            return
        message = f"torch.optim.{kind.__name__} takes {found}: fused models would not train as they do alone"
    else:
        return
    warnings.warn(message, UserWarning, stacklevel=3)


def warn_of_layers(reader: FrameType | None) -> None:
    """Warn where code of the user's, or torch's `update_bn`, looks for layers among the modules of fused models."""
    while reader is not None and reader.f_code.co_filename == module.__file__:  # an array inside of another module
        if reader.f_code.co_name == "_named_members":  # it is tensors that are asked for
            return
        reader = reader.f_back
    if reader is None or not (is_user_code(reader.f_code) or reader.f_code.co_name == "update_bn"):
        return
    warnings.warn(
        "fused models have no layers among modules(), so that nothing is found and nothing set there: array.apply(fn) "
        'goes over those of each model, array.set_attribute("drop.training", True) sets it, unfuse() gives plain ones',
        stacklevel=level_of_user(),
    )
