"""Settings of torch and of the process that a forward asks for: a graph stands for them as they were."""

from __future__ import annotations

import copy
import sys
from contextlib import contextmanager

import pytest
import torch
from tests.fusion.oracle import assert_each, made
from torch import nn

import hocket

NOW = torch.get_num_threads()
# how a forward asks, what changes the setting, and to which values
SETTINGS = {
    "threads": (lambda: torch.get_num_threads(), torch.set_num_threads, (NOW, NOW + 1)),
    "deterministic": (
        lambda: torch.are_deterministic_algorithms_enabled(),
        torch.use_deterministic_algorithms,
        (False, True),
    ),
    "debug mode": (lambda: torch.get_deterministic_debug_mode(), torch.set_deterministic_debug_mode, (0, 1)),
    "precision": (
        lambda: len(torch.get_float32_matmul_precision()),
        torch.set_float32_matmul_precision,
        ("highest", "high"),
    ),
    "mkldnn": (
        lambda: torch.backends.mkldnn.enabled,
        torch._C._set_mkldnn_enabled,  # torch's testing module, once imported, freezes the attribute
        (True, False),
    ),
    "benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        torch._C._set_cudnn_benchmark,
        (False, True),
    ),
    "attention": (lambda: torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.enable_flash_sdp, (True, False)),
    "device": (lambda: torch.get_default_device().type == "meta", torch.set_default_device, (None, "meta")),
    "recursion": (lambda: sys.getrecursionlimit() % 2, sys.setrecursionlimit, (3000, 3001)),
    "interval": (lambda: sys.getswitchinterval() * 100, sys.setswitchinterval, (0.005, 0.01)),
}


class Asks(nn.Module):
    """Has a scale that depends on a setting."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(3, 2), kind

    def forward(self, x):
        return self.fc(x) * (1 + SETTINGS[self.kind][0]())


@contextmanager
def setting(change, values):
    try:
        yield
    finally:
        change(values[0])


@pytest.mark.parametrize("backend", ["rule", "auto"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_forward_that_asks_for_a_setting_sees_it_change(kind, backend):
    ask, change, values = SETTINGS[kind]
    models = made(lambda: Asks(kind), 3)
    array = hocket.fuse([copy.deepcopy(model) for model in models], backend=backend, shared=True)
    x = torch.randn(4, 3, dtype=torch.float64)
    scales = set()
    with setting(change, values):
        for value in (values[0], values[1], values[0]):
            change(value)
            scales.add(float(ask()))
            for _ in range(3):
                assert_each(array(x), [model(x) for model in models])
    assert len(scales) == 2
