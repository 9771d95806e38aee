"""The functions of `math` follow live numbers, which they would otherwise ask for their plain value.

Those of torch that are given lists of floats get plain ones: C++ takes no live whole number in such a list, and
computes sizes of scales.

A function that was imported by its name (``from math import sqrt``) is not exchanged here: it asks the live number for
its value, which then has to be the same in later steps.
"""

from __future__ import annotations

import builtins
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._C import _nn
from torch.nn.modules import batchnorm

from hocket.pystate.exchange import as_float
from hocket.pystate.places import ABSENT
from hocket.tracing.scalars.live import Late, Live, computed, plain_tree

# It multiplies what it is given, as Python does, and so needs no help.
_FOLLOWS_ALREADY = ("prod",)
_pow = pow


@contextmanager
def exchanged(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """While this lasts, attributes of classes and modules have other values: owner, name and value of each."""
    others = list(attributes)
    usual = [(owner, name, vars(owner).get(name, ABSENT)) for owner, name, _ in others]
    try:
        for owner, name, value in others:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in usual:
            if value is ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def wherever_held(others: Mapping[Any, Any]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Other values for functions, for `exchanged`, in all modules that hold these, by whatever names."""
    by_address = {id(own): other for own, other in others.items()}
    for module in list(sys.modules.values()):
        # Most modules hold none of them, which is asked without a step of Python's for each name.
        if isinstance(module, ModuleType) and not by_address.keys().isdisjoint(map(id, vars(module).values())):
            held = list(vars(module).items())
            yield from ((module, name, by_address[id(value)]) for name, value in held if id(value) in by_address)


def followed_math() -> AbstractContextManager[None]:
    """While this lasts, the functions of `math` follow live numbers, and those with lists of floats get plain ones."""
    functions = {name: value for name, value in vars(math).items() if callable(value) and not name.startswith("_")}
    followed = [
        (math, name, _followed(function, asks=name.startswith("is") and name != "isqrt"))
        for name, function in functions.items()
        if name not in _FOLLOWS_ALREADY
    ]
    listing = [(_nn, name) for name in vars(_nn) if "upsample" in name] + [(torch, "histogram"), (torch, "histogramdd")]
    plain = [(owner, name, _plainly(vars(owner)[name])) for owner, name in listing]
    # A layer without a momentum divides 1.0 by its count of batches.
    others = [(builtins, "pow", _power), (batchnorm, "float", as_float)]
    return exchanged([*followed, *others, *plain])


def _plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def plainly(*args: Any, **kwargs: Any) -> Any:
        return function(*plain_tree(args), **plain_tree(kwargs))

    return plainly


def _power(base: Any, exp: Any, mod: Any = None) -> Any:
    """`pow`, which asks no third operand, nor a second one beside it, what it can do."""
    return base**exp if mod is None else _pow(*plain_tree((base, exp, mod)))


def _followed(function: Callable[..., Any], asks: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def followed(*operands: Any, **options: Any) -> Any:
        if any(isinstance(operand, Iterator) for operand in operands):
            operands = tuple(list(operand) if isinstance(operand, Iterator) else operand for operand in operands)
        numbers = [each for each in operands if isinstance(each, (Live, Late))]
        if numbers and not options:
            tape = max(numbers, key=lambda each: isinstance(each, Late)).tape
            if asks:
                return tape.guard(function, *operands)
            if isinstance(computed(function, operands), (int, float)):
                return tape.apply(function, *operands)
        # Any other function (of a list of numbers, or with a pair as its result) gets their plain values.
        return function(*plain_tree(operands), **plain_tree(options))

    return followed
