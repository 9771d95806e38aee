"""Optimizers for which torch has kernels that make the whole update."""

from __future__ import annotations

import torch
from torch.optim import optimizer as torch_optimizer

__all__ = ["can_fuse", "has_fused_kernels"]

# The optimizers with fused kernels for CPU, the state of which is as without them. SGD's is wrong for bfloat16 in torch
# 2.13 (with momentum, parameters of 1e28 after five steps), so only these dtypes have them.
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
_FUSED_DTYPES = (torch.float32, torch.float64)


def has_fused_kernels(optimizer: torch.optim.Optimizer) -> bool:
    """True if torch has kernels for the whole update of this optimizer, which it does not use yet."""
    if type(optimizer) not in _FUSED:
        return False
    for group in optimizer.param_groups:
        if group.get("fused") is not None or any(group.get(o) for o in ("foreach", "differentiable", "capturable")):
            return False
        if any(p.dtype not in _FUSED_DTYPES or p.device.type != "cpu" for p in group["params"]):
            return False
    return True


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """True if an update by these kernels leaves out nothing: no hook runs at its beginning or end."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return has_fused_kernels(optimizer) and not any(hooks)
