"""Torch's switches: what a step computes depends on them, and so does whether it can be captured at all.

Some choose kernels, or the order in which these add: they belong to the signature of a call, and each setting has a
capture of its own. Others put Python code of the user's, or checks of torch's, between the step and its ops, where no
planned step would pass: under those a call is eager. ``native/signature.cpp`` compares the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._device import DeviceContext

from hocket.pystate.settings import KERNELS

_SMALLEST, _ONE = 5e-324, 1.0


def switches() -> tuple[Any, ...]:
    """The settings that a capture stands for."""
    cpu_cuda = [torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in ("cpu", "cuda")]
    return (
        *cpu_cuda,
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]  # a property of the module
        *(setting.read() for setting in KERNELS),
        _default_device(),
        _flushes_denormals(),
    )


def obstacle() -> str:
    """Describe what intercepts a step's ops now, such as a mode. Empty if nothing does."""
    for position in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(position)
        if not isinstance(mode, DeviceContext):
            return f"a {type(mode).__name__} sees every torch function"
    if torch._C._len_torch_dispatch_stack():
        return f"a {type(torch._C._get_dispatch_stack_at(0)).__name__} sees every op"
    if torch.is_anomaly_enabled():
        return "torch.autograd looks for anomalies (torch.autograd.set_detect_anomaly)"
    if torch.is_inference_mode_enabled():
        return "inference mode is on"
    if torch._C._functorch.maybe_current_level() is not None:
        return "it is called within a transform of torch.func"
    if torch._C._dispatch_tls_is_dispatch_key_included("VmapMode"):
        return "many gradients are taken at once (is_grads_batched=True)"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks on saved tensors are set (torch.autograd.graph.saved_tensors_hooks)"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "the current stream captures a CUDA graph"
    return ""


def _default_device() -> Any:
    stack = range(torch._C._len_torch_function_stack())
    return tuple(str(torch._C._get_function_stack_at(position).device) for position in stack)


def _flushes_denormals() -> bool:
    """Return True if this thread treats denormal numbers as zero (torch.set_flush_denormal)."""
    return _SMALLEST * _ONE == 0.0
