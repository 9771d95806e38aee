"""C functions that take plain numbers only, and those that ask a number for its value."""

from __future__ import annotations

import io
import math
import os
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from hocket.pystate.strict import reads_text, reads_text_by, strict_function
from support.steps import update
from support.twins import Program, captured


class _Registry(dict[str, Any]):
    """Class of a library that overrides a C function in Python, and calls it."""

    __module__ = "some_library.registry"

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, default)


class _Ordered(OrderedDict[str, Any]):
    __module__ = "some_library.ordered"

    def pop(self, key: str, default: Any = None) -> Any:
        return super().pop(key, default)


@pytest.mark.parametrize(
    "function", [super(_Registry, _Registry()).get, _Registry().pop, super(_Ordered, _Ordered()).pop]
)
def test_a_c_function_belongs_to_the_class_that_has_it_in_c(function: Any) -> None:
    assert strict_function(function) == ""


def test_a_c_function_of_another_library_is_strict() -> None:
    library = pytest.importorskip("safetensors._safetensors_rust")
    assert strict_function(library.serialize) == "safetensors.serialize"


def test_a_step_that_counts_and_looks_up_in_such_a_registry_is_planned() -> None:
    def make() -> Program:
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        registry, meter = _Registry(scale=2.0), {"sum": 0.0, "count": 0}

        def step(batch: torch.Tensor) -> torch.Tensor:
            loss = update(optimizer, model(batch).square().mean() * registry.get("scale"))
            meter["sum"] += loss.item() * len(batch)
            meter["count"] += len(batch)
            return loss.detach()

        return Program(step, model, optimizer, state=lambda: meter)

    captured(make, lambda number: torch.randn(3, 4), 40)


@pytest.mark.parametrize("function", [",".join, "a".startswith, open, ord, io.StringIO().write, np.array, os.stat])
def test_c_functions_that_read_text(function: Any) -> None:
    assert reads_text(function)


@pytest.mark.parametrize("function", [len, [].append, {}.get, "{}".format, torch.add, torch.ones(1).add_, math.exp])
def test_c_functions_that_read_none_or_only_by_its_methods(function: Any) -> None:
    assert not reads_text(function)


def test_code_that_may_read_text_out_of_sight() -> None:
    looks: tuple[Any, ...] = (lambda t: t in "ab", lambda t, x: t in x, lambda t: bytes(t, "utf8"))
    assert all(reads_text_by(look.__code__) for look in looks)
    others: tuple[Any, ...] = (lambda t: t in ("a", "b"), lambda t: "a" in t, lambda t: "a" in t.names, lambda t: t + 1)
    assert not any(reads_text_by(look.__code__) for look in others)
