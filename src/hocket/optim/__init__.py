"""Optimizers of fused models: torch's, with hyper-parameters that are one number, or one for each model.

    >>> import torch
    >>> weights = torch.nn.Parameter(torch.ones(3, 4))          # of 3 models; hocket.fuse makes such parameters
    >>> optimizer = SGD([weights], lr=[0.1, 0.2, 0.3], momentum=0.9, num_models=3)
    >>> weights.sum().backward()
    >>> optimizer.step()

Each model gets exactly what an optimizer of its own would give it. `unfuse` gives B plain state dicts that torch.optim
loads, `load_unfused` takes them. `freeze` leaves a model as it is until `unfreeze`, and `ModelSlots` drops, moves and
refills models in mid-training, in the array and in all that trains it.
"""

from __future__ import annotations

from hocket.optim.adam import Adam, Adamax, AdamW, NAdam, RAdam
from hocket.optim.base import FusedOptimizer
from hocket.optim.clip import clip_grad_norm_, clip_grad_value_
from hocket.optim.grad_scaler import GradScaler
from hocket.optim.model_slots import ModelSlots, TrainedModel
from hocket.optim.sgd import SGD, Adadelta, Adagrad, RMSprop

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "FusedOptimizer", "GradScaler", "ModelSlots"]
__all__ += ["NAdam", "RAdam", "RMSprop", "TrainedModel", "clip_grad_norm_", "clip_grad_value_"]
