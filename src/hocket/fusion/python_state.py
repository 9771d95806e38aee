"""What a forward may read that is no tensor of the model: attributes, closures, globals.

A graph stands for a forward only as long as this stays as it was when the forward was traced. A forward that changes it
itself (a counter, a list, a random generator of Python or numpy) has no graph.
"""

from __future__ import annotations

import os
import pickle
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

from hocket.fusion.random_sources import default_sources, is_random_source

__all__ = ["Globals", "attributes", "changes", "has_own_code", "held", "held_by", "held_by_functions"]

DEPTH = 8  # of containers in containers
GLOBAL_DEPTH = 3  # the same of globals, which are looked at in each call
PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device)
OPAQUE = (type, FunctionType, MethodType, ModuleType, nn.Module, fx.Proxy)
MACHINERY = frozenset(vars(nn.Module())) - {"training"}
_INSTALLED = ("<frozen", *{sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib")})
Leaf = tuple[tuple[int, Any], str, Any]  # where it lies (an object and a key), its path, and the value


def attributes(model: nn.Module, deep: bool = True) -> list[Leaf]:
    """Attributes of a model's modules but their tensors and submodules; unless `deep`, objects as they are."""
    found: list[Leaf] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in MACHINERY:
                found += _leaves(value, (id(module), key), f"{name}.{key}" if name else key, DEPTH, seen, deep)
    return found


def held_by(function: Any) -> list[Any]:
    """What a function has in its closure and defaults."""
    cells = [_value(cell, None) for cell in getattr(function, "__closure__", None) or ()]
    named = (getattr(function, "__kwdefaults__", None) or {}).values()
    return [*cells, *(getattr(function, "__defaults__", None) or ()), *named]


def held_by_functions(model: nn.Module) -> list[tuple[str, Any]]:
    """What functions in a model's attributes hold in closures and defaults, which a copy of the model shares."""
    return [(path, each) for _, path, value in attributes(model) for each in held(value)]


def held(value: Any, depth: int = DEPTH) -> Iterator[Any]:
    """What a function holds in closures and defaults, with what functions in these hold."""
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, FunctionType) and depth:
        for each in held_by(value):
            yield each
            yield from held(each, depth - 1)
    elif isinstance(value, partial):
        yield from held(value.func, depth)


def changes(before: list[Leaf], after: list[Leaf]) -> list[tuple[str, Any]]:
    """What there is now and was not before, by path, and what is gone; lengths of containers apart."""
    known, now = {where: value for where, _, value in before}, {where for where, _, _ in after}
    gone = [(path, None) for where, path, _ in before if where not in now]
    new = [(path, value) for where, path, value in after if where not in known or not _is_same(known[where], value)]
    return gone + new


class Globals:
    """What the functions of some models find outside of the models: globals, closures, attributes of classes.

    Of installed libraries the numbers and strings that their code names are looked at, not what their containers hold:
    those of transformers have 26,000 entries, and looking at them took ten times as long as a small BERT's step.

    Args:
        models: modules; what their classes' and attributes' functions name is looked up, functions in it included.

    Attributes:
        random_sources: generators of random numbers among it, and torch's, Python's and numpy's own.
        iterator: the name of something that gives another value each time, or None.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self._seen: set[int] = set()
        self._watched: set[tuple[int, Any]] = set()
        self._places: list[tuple[Any, Any]] = []
        self._numbers: list[tuple[Any, Any, Any]] = []  # places of numbers and the like, and what is there
        for kind in {type(module): None for model in models for module in model.modules()}:
            self._visit_class(kind)
        for model in models:
            for _, _, value in attributes(model):
                self._visit(value, DEPTH)
        now = self._now()
        self._known = {where: value for where, _, value in now}
        self.random_sources = [*default_sources(), *(value for _, _, value in now if is_random_source(value))]
        self._numbers_of_the_user = [
            place for holder, key in self._places for place in _numbers(holder, key, GLOBAL_DEPTH)
        ]
        self.iterator = next((path for _, path, value in now if hasattr(type(value), "__next__")), None)

    def changed(self) -> str | None:
        """The name of a number, string or the like that is not what it was when this object was made, or None."""
        for holder, key, old in self._numbers:
            value = holder.get(key)
            if value is not old and isinstance(value, PLAIN) and not _is_same(old, value):
                return f"the variable {key}"
        if not self._places:
            return None
        for where, path, value in self._now():
            old = self._known.get(where, self)
            if isinstance(value, PLAIN) and isinstance(old, PLAIN) and not _is_same(old, value):
                return path
        return None

    def put_back(self) -> None:
        """Set numbers, strings and the like to what they were when this object was made.

        A trace calls the forwards, which may count their calls. What they put into containers stays there.
        """
        for holder, key, old in self._numbers_of_the_user:
            value = _value(holder, key)
            if isinstance(value, PLAIN) and not _is_same(old, value):
                if isinstance(holder, (dict, list)):
                    holder[key] = old
                elif key is None:
                    holder.cell_contents = old
                else:
                    setattr(holder, key, old)

    def _now(self) -> list[Leaf]:
        found: list[Leaf] = []
        for number, (holder, key) in enumerate(self._places):
            path = f"the variable {key} ({number})"
            found += _leaves(_value(holder, key), (id(holder), key), path, GLOBAL_DEPTH, set(), deep=False)
        return found

    def _visit_class(self, kind: type) -> None:
        for base in kind.__mro__:
            file = getattr(sys.modules.get(base.__module__), "__file__", None)
            if not _is_left_out(base.__module__, file) and id(base) not in self._seen:
                self._seen.add(id(base))
                is_installed = _is_installed(file)
                for key, value in list(vars(base).items()):
                    if isinstance(value, (PLAIN, Tensor, list, dict, set)) and not key.startswith("__"):
                        self._watch(base, key, value, is_installed)
                    self._visit(getattr(value, "__func__", value), DEPTH)

    def _visit(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or isinstance(value, (PLAIN, Tensor)) or not depth:
            return
        if isinstance(value, MethodType):
            self._visit(value.__func__, depth)
        elif isinstance(value, FunctionType):
            self._seen.add(id(value))
            # What wraps a function may hold it in its closure.
            if value.__closure__ or not _is_left_out(value.__module__, value.__code__.co_filename):
                self._visit_function(value, depth)
        elif isinstance(value, partial):
            self._visit(value.func, depth - 1)
        elif isinstance(value, type) and not issubclass(value, (Tensor, PLAIN[:6])):
            self._visit_class(value)

    def _visit_function(self, function: FunctionType, depth: int) -> None:
        names = set(_names(function.__code__))
        is_installed = _is_installed(function.__code__.co_filename)
        for cell in function.__closure__ or ():
            self._place(cell, None, depth, is_installed)
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            if is_installed and id(value) in self._seen:
                continue
            if not isinstance(value, ModuleType):
                self._place(function.__globals__, name, depth, is_installed)
            elif _is_left_out(value.__name__, file := getattr(value, "__file__", None)):
                self._seen.add(id(value))
            else:
                of_library = is_installed or _is_installed(file)
                for inner in names & vars(value).keys():
                    self._place(vars(value), inner, depth, of_library)

    def _place(self, holder: Any, key: Any, depth: int, is_installed: bool) -> None:
        value = _value(holder, key)
        self._visit(value, depth - 1)
        self._watch(holder, key, value, is_installed)

    def _watch(self, holder: Any, key: Any, value: Any, is_installed: bool) -> None:
        if (id(holder), key) in self._watched:
            return
        self._watched.add((id(holder), key))
        if not is_installed or (key is None and isinstance(value, PLAIN)):
            self._places.append((holder, key))
        elif key is not None and isinstance(value, PLAIN):
            self._numbers.append((holder if isinstance(holder, dict) else vars(holder), key, value))


def _is_left_out(module: str | None, file: str | None) -> bool:
    """Whether code is of Python itself, torch or numpy, in which nobody sets numbers to change a model.

    A module of the user's own may be called like one of Python's, so its file counts.
    """
    name = (module or "torch").split(".")[0]
    is_of_python = name in sys.stdlib_module_names and (file is None or _is_installed(file))
    return is_of_python or name in ("torch", "numpy")


def _is_installed(file: str | None) -> bool:
    """Whether a file belongs to an installed library, or to Python."""
    return file is not None and file.startswith(_INSTALLED)


def _value(holder: Any, key: Any) -> Any:
    if isinstance(holder, dict):
        return holder.get(key)
    if isinstance(holder, list):
        return holder[key] if key < len(holder) else None
    if key is not None:
        return vars(holder).get(key)
    try:
        return holder.cell_contents
    except ValueError:  # not assigned yet
        return None


def _numbers(holder: Any, key: Any, depth: int) -> Iterator[tuple[Any, Any, Any]]:
    """The places of numbers, strings and the like in a value and in its containers, and what is there."""
    value = _value(holder, key)
    if isinstance(value, PLAIN):
        yield holder, key, value
    elif depth and not isinstance(value, (*OPAQUE, Tensor)):
        inside = value if isinstance(value, (dict, list)) else getattr(value, "__dict__", None)
        keys = range(len(inside)) if isinstance(inside, list) else list(inside or ())
        for each in keys:
            yield from _numbers(inside, each, depth - 1)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _leaves(
    value: Any, where: tuple[int, Any], path: str, depth: int, seen: set[int], deep: bool = True
) -> Iterator[Leaf]:
    """A value as what cannot be taken apart any more; what is in objects that were met before is not repeated."""
    if isinstance(value, Tensor):
        yield where, path, value
        yield (*where, "content"), f"{path} (content)", 0 if value.is_inference() else value._version  # type: ignore[misc]
    elif isinstance(value, (*PLAIN, *OPAQUE, partial)) or not depth:
        yield where, path, value
    elif isinstance(value, (dict, list, tuple)) or (getattr(value, "__dict__", None) and not is_random_source(value)):
        yield where, path, type(value)
        if id(value) in seen:
            return
        seen.add(id(value))
        items = enumerate(value) if isinstance(value, (list, tuple)) else _items(value)
        for key, each in items:
            yield from _leaves(each, (id(value), key), f"{path}[{key!r}]", depth - 1, seen, deep)
    elif deep:  # a generator, a counter, an array, ...
        try:
            yield where, path, pickle.dumps(value)
        except Exception:  # noqa: BLE001  (whatever a class raises that cannot be pickled)
            yield where, path, value
    else:
        yield where, path, value


def _items(value: Any) -> Any:
    return list((value if isinstance(value, dict) else vars(value)).items())


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return type(a) is type(b) and (isinstance(a, PLAIN) or type(a) is tuple) and bool(a == b or a != a)


def has_own_code(model: nn.Module) -> bool:
    """Whether a layer of a model is of the user's, or has a forward of its own."""
    return any(
        not type(layer).__module__.startswith("torch.nn.modules.") or "forward" in vars(layer)
        for layer in model.modules()
    )
