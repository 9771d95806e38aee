"""Objects outside of its model that a forward reads and writes: generators, tables, numbers, settings of torch."""

from __future__ import annotations

import copy
import functools
import importlib.util
import random
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from tests.fusion.oracle import assert_each, made
from torch import nn

import hocket

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
CODE = """
import torch
from torch import nn

SCALE = 2.0
RANDOM = torch.Generator().manual_seed(0)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * SCALE


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn(3, generator=RANDOM)
"""


def imported(folder, name, monkeypatch):
    """The code above as a module of this name."""
    path = folder / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("where", ["", "site-packages"])
@pytest.mark.parametrize("name", ["scaled", "profile"])  # the latter is called like one of Python's
def test_a_number_that_a_module_holds_is_looked_at(name, where, tmp_path, monkeypatch):
    module = imported(tmp_path / where, name, monkeypatch)
    models = [module.Scaled(3, 3) for _ in range(2)]
    array = hocket.fuse(models, shared=True, strict=True)
    for module.SCALE in (2.0, 2.0, 5.0, 5.0, 0.5):
        torch.testing.assert_close(array(X), torch.stack([model(X) for model in models]))


@pytest.mark.filterwarnings("ignore:hocket.fuse")
@pytest.mark.parametrize("backend", ["rule", "auto"])
def test_a_forward_goes_on_with_the_generator_that_it_finds(backend, tmp_path, monkeypatch):
    sides = []
    for name in ("fused", "plain"):
        torch.manual_seed(0)
        module = imported(tmp_path, name, monkeypatch)
        sides.append([module.Noisy(3, 3) for _ in range(2)])
    array = hocket.fuse(sides[0], shared=True, backend=backend)
    for _ in range(4):
        torch.testing.assert_close(array(X), torch.stack([model(X) for model in sides[1]]))


class Timed(nn.Linear):
    def forward(self, x):
        return super().forward(x) * time.perf_counter()


def test_a_forward_that_asks_a_clock_asks_it_in_each_call():
    array, x = hocket.fuse([Timed(3, 3).double() for _ in range(2)], shared=True), X.double()
    with pytest.warns(UserWarning, match="it asks the clock"):
        assert len({array(x).sum().item() for _ in range(4)}) == 4


class Draws(nn.Linear):
    """Draws from everywhere."""

    def forward(self, x):
        random.random()
        np.random.random()  # noqa: NPY002
        return super().forward(x) * torch.rand(())


@pytest.mark.filterwarnings("ignore:hocket.fuse")
def test_what_draws_by_default_draws_what_it_would_have_drawn():
    array = hocket.fuse([Draws(3, 3), Draws(3, 3)], shared=True)
    drawn = []
    for models in ([array], array.unfuse()):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        for _ in range(2):
            for model in models:
                model(X)
        drawn.append((float(torch.rand(())), random.random(), np.random.random()))  # noqa: NPY002
    assert drawn[0] == drawn[1]


@functools.lru_cache
def table(length, device):
    return torch.arange(length, device=device).float()


class ByTable(nn.Linear):
    """Keeps a table for all models."""

    def forward(self, x):
        return super().forward(x) * table(x.shape[1], x.device)


class Doubled(nn.Linear):
    """Hooks and decorators around a forward are part of a model."""

    def __call__(self, x):
        return 2 * super().__call__(x)


@pytest.mark.filterwarnings("ignore:hocket.fuse")  # nobody sees what a cache of Python's holds
@pytest.mark.parametrize("backend", ["rule", "auto"])
@pytest.mark.parametrize("make", [ByTable, Doubled, lambda *sizes: nn.Sequential(Doubled(*sizes))])
def test_kept_tables_and_calls_of_their_own_are_followed(make, backend):
    table.cache_clear()
    models = [make(3, 3) for _ in range(2)]
    array = hocket.fuse(models, shared=True, backend=backend)
    for _ in range(4):
        torch.testing.assert_close(array(X), torch.stack([model(X) for model in models]))
    assert type(table(3, X.device)) is torch.Tensor
    assert array._calls.programs.made()


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
    "matmul": (
        lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
        torch._C._set_cublas_allow_fp16_accumulation,
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
