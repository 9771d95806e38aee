"""Settings of the process that a step or a forward may ask for: how they are read, and the names that code uses.

Those that choose kernels, or the order in which these add, belong to the signature of every call
(`hocket.tracing.switches`). All are guarded where code of the user's names them (`hocket.pystate.walk`).
"""

from __future__ import annotations

import gc
import locale
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class ProcessSetting:
    """One setting, or several that are read together."""

    name: str  # for messages
    read: Callable[[], Any]  # returns its value
    further: tuple[str, ...] = ()  # names by which code asks for it or changes it, besides the last part of `name`

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset((self.name.rpartition(".")[-1], *self.further))


_PRECISIONS = [(backend, op) for backend in ("mkldnn", "cuda") for op in ("matmul", "conv", "rnn")]
_MATMUL = (
    *("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
    "allow_fp16_accumulation",
)
_ATTENTIONS = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")


def _precisions() -> tuple[str, ...]:
    """The precisions of float32 that kernels ask for. `torch.get_float32_matmul_precision` raises where they differ."""
    return tuple([torch._C._get_fp32_precision_getter(backend, op) for backend, op in _PRECISIONS])


def _matmul() -> tuple[Any, ...]:
    return tuple([getattr(torch._C, f"_get_cublas_{name}")() for name in _MATMUL])


def _enabled() -> tuple[Any, ...]:
    return torch.backends.mkldnn.enabled, torch._C._get_nnpack_enabled(), torch.backends.cudnn.enabled


def _current_gpu() -> int:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


def _einsum() -> tuple[Any, ...]:
    return torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy


KERNELS = (
    ProcessSetting("torch.set_num_threads", torch.get_num_threads, ("get_num_threads",)),
    ProcessSetting(
        "torch.set_float32_matmul_precision", _precisions, ("get_float32_matmul_precision", "fp32_precision")
    ),
    ProcessSetting(
        "torch.use_deterministic_algorithms",
        torch.get_deterministic_debug_mode,
        (
            *("set_deterministic_debug_mode", "get_deterministic_debug_mode", "are_deterministic_algorithms_enabled"),
            "is_deterministic_algorithms_warn_only_enabled",
        ),
    ),
    ProcessSetting("torch.backends.enabled", _enabled),
    ProcessSetting("torch.backends.cudnn.benchmark", lambda: torch.backends.cudnn.benchmark),
    ProcessSetting("torch.backends.cudnn.deterministic", lambda: torch.backends.cudnn.deterministic),
    ProcessSetting("torch.backends.cuda.matmul", _matmul, _MATMUL),
    ProcessSetting("torch.backends.quantized.engine", lambda: torch.backends.quantized.engine),
    ProcessSetting(
        "torch.backends.cuda.flash_sdp_enabled",
        lambda: tuple([getattr(torch.backends.cuda, f"{name}_enabled")() for name in _ATTENTIONS]),
        tuple([form for name in _ATTENTIONS for form in (f"{name}_enabled", f"enable_{name}")]),
    ),
)
OTHERS = (
    ProcessSetting("torch.cuda.set_device", _current_gpu, ("current_device", "cuda")),
    ProcessSetting("torch.backends.opt_einsum", _einsum, ("einsum",)),  # the order in which it contracts
    ProcessSetting("torch.set_default_device", torch.get_default_device, ("get_default_device",)),
    ProcessSetting("torch.initial_seed", torch.initial_seed),
    ProcessSetting("torch.set_anomaly_enabled", torch.is_anomaly_enabled, ("is_anomaly_enabled", "set_detect_anomaly")),
    ProcessSetting("torch.set_printoptions", lambda: repr(torch._tensor_str.PRINT_OPTS), ("PRINT_OPTS",)),
    ProcessSetting("warnings.filters", lambda: tuple(warnings.filters), ("warn", "warn_explicit")),
    ProcessSetting("numpy.seterr", lambda: repr(np.geterr()), ("geterr",)),
    ProcessSetting("numpy.set_printoptions", lambda: repr(np.get_printoptions()), ("get_printoptions",)),
    ProcessSetting("sys.set_int_max_str_digits", sys.get_int_max_str_digits, ("get_int_max_str_digits",)),
    ProcessSetting("sys.setrecursionlimit", sys.getrecursionlimit, ("getrecursionlimit",)),
    ProcessSetting("sys.setswitchinterval", sys.getswitchinterval, ("getswitchinterval",)),
    ProcessSetting("gc.set_threshold", gc.get_threshold, ("get_threshold",)),
    ProcessSetting("locale.setlocale", lambda: locale.setlocale(locale.LC_ALL), ("getlocale", "localeconv")),
)
NAMES = frozenset(name for setting in (*KERNELS, *OTHERS) for name in setting.names)
