"""Is a value of a tensor baked into a captured op? Tried: captured with some values, replayed with others.

Samples come from torch's own tests (`op_db`), from the schemas of ops that those leave out, and from a table.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler_legacy
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from hocket.errors import CaptureError
from hocket.execution.base import below_autograd
from hocket.tracing import capture
from hocket.tracing.captured import Captured
from support.captures import run_action

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
MAX_ELEMENTS = 20_000
# Errors of ops for values or shapes that they do not take; others are subclasses of these.
_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)


@dataclass(frozen=True)
class Sample:
    """A call of an op: ``function(values)``, and other values of the same shapes."""

    name: str
    function: Callable[[Sequence[torch.Tensor]], Any]
    values: tuple[torch.Tensor, ...]
    others: tuple[tuple[torch.Tensor, ...], ...]


def op_db() -> list[Any]:
    """Torch's descriptions of its ops; they import a package for tests that need not be installed."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    found: list[Any] = importlib.import_module("torch.testing._internal.common_methods_invocations").op_db
    # Other tests set its flags as a user does, which this module has forbidden.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True  # type: ignore[attr-defined]
    # To find the test that asks for samples, torch looks up the source of every frame: longer than the op takes.
    sys.modules["torch.testing._internal.common_utils"].extract_test_fn = lambda: None  # type: ignore[attr-defined]
    return found


def samples_of(info: Any, most: int) -> Iterator[Sample]:
    """Some calls for each type of numbers, each with values that another seed gives."""
    for dtype in DTYPES:
        known = info.supported_dtypes("cpu")
        if dtype not in known or (dtype.is_complex and torch.float32 in known):
            continue
        drawn = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            drawn.append(list(info.sample_inputs("cpu", dtype, requires_grad=False, set_seed=False)))
        found = 0
        for first, second in zip(*drawn, strict=False):  # a few draw how many samples there are
            sample = _sample_of(info, first, second)
            if sample is not None and found < most:
                found += 1
                yield sample


def _sample_of(info: Any, first: Any, second: Any) -> Sample | None:
    one, other = ([(each.input, *each.args), each.kwargs] for each in (first, second))
    values, others = map(_tensors, (one, other))
    if any(value.layout is not torch.strided for value in values) or sum(v.numel() for v in values) > MAX_ELEMENTS:
        return None
    drawn = others if _alike(tree_leaves(one), tree_leaves(other)) else values
    return Sample(info.formatted_name, _refilled(info, one), values, (drawn, *_changed(drawn)))


def _tensors(tree: Any) -> tuple[torch.Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _refilled(function: Any, arguments: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
    """A call of the function with other tensors in place of those among its args and kwargs."""

    def call(values: Sequence[torch.Tensor]) -> Any:
        following = iter(values)
        args, kwargs = tree_map_only(torch.Tensor, lambda _: next(following), arguments)
        return function(*args, **kwargs)

    return call


def _alike(first: list[Any], second: list[Any]) -> bool:
    """Return True if two calls differ in the values of tensors alone."""
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
                return False
        elif repr(a) != repr(b):
            return False
    return True


def _changed(values: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same with one tensor changed that torch's samples spell out: sizes, indices, masks, single numbers."""
    for place, value in enumerate(values):
        if value.dtype is torch.bool:
            forms = [~value]
        elif not (value.dtype.is_floating_point or value.is_complex()):
            forms = [value.flip(tuple(range(value.dim()))), value - 1, value + 1, value * 0, value // 2]
        else:
            forms = [value * 0.5 + 0.25] if value.numel() == 1 else []
        for form in forms:
            yield (*values[:place], form.to(value.dtype).contiguous(), *values[place + 1 :])


def outcomes(sample: Sample) -> set[str]:
    """Capture the call and replay it with other values.

    ``refused``; ``guarded``: stale for them; ``follows``; ``same``: they make no difference; ``baked``: the replay
    computes something else than the op; ``shape``: it has another shape than the one that was captured.
    """
    try:
        expected = sample.function(_copies(sample.values))
    except _ERRORS:
        return set()
    found = _replayed(sample, expected, held=False)
    if "guarded" in found:
        # The same on values that are not the batch's has to be refused.
        found |= {f"held: {what}" for what in _replayed(sample, expected, held=True) - {"refused"}}
    return found


class _Holder(torch.nn.Module):
    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        super().__init__()
        for place, value in enumerate(values):
            self.register_buffer(f"value{place}", value)


def _replayed(sample: Sample, expected: Any, *, held: bool) -> set[str]:
    holder = _Holder(_copies(sample.values)) if held else None
    buffers: dict[str, Any] = {} if holder is None else holder._buffers
    try:
        if held:
            captured = capture(lambda batch: sample.function(list(buffers.values())), holder, None, [])
        else:
            captured = capture(sample.function, None, None, _copies(sample.values))
    except CaptureError:
        return {"refused"}
    found = set()
    for values in sample.others:
        torch.manual_seed(3)
        try:
            wanted = sample.function(_copies(values))
        except _ERRORS:
            continue  # values that the op does not take
        torch.manual_seed(3)
        buffers.update(zip(tuple(buffers), _copies(values), strict=False))
        result, stale = _run(captured, [] if held else _copies(values))
        if stale:
            found.add("guarded")
        elif not _equal(result, wanted):
            found.add("baked")
        elif _shapes(wanted) != _shapes(expected):
            found.add("shape")
        else:
            found.add("same" if _equal(wanted, expected) else "follows")
    return found


def _run(captured: Captured, batch: list[torch.Tensor]) -> tuple[Any, bool]:
    frame = captured.begin(batch)
    if frame is None:
        return None, True
    with below_autograd():
        for action in captured.program.actions:
            run_action(action, frame.values, frame.numbers)
    return captured.finish(frame), False


def _copies(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [value.detach().clone() for value in values]


def _shapes(result: Any) -> list[Any]:
    return [getattr(leaf, "shape", None) for leaf in tree_flatten(result)[0]]


def _equal(first: Any, second: Any) -> bool:
    """Equal within rounding: torch computes a few things otherwise while a mode is there (eigenvalues alone)."""
    ours, theirs = tree_flatten(first)[0], tree_flatten(second)[0]
    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(a, torch.Tensor):
            if not (a == b or (a != a and b != b)):
                return False
        elif a.shape != b.shape or a.dtype != b.dtype:
            return False
        elif a.numel():
            wide = torch.complex128 if a.is_complex() else torch.float64
            x, y = a.detach().to(wide), b.detach().to(wide)
            if not torch.allclose(x, y, rtol=1e-3, atol=1e-4, equal_nan=True):
                return False
    return True


def ops_called_by(sample: Sample) -> set[str]:
    """Names of all ops that run, those included that torch takes apart in C++."""
    with profiler_legacy.profile() as profile, suppress(*_ERRORS):
        sample.function(_copies(sample.values))
    return {event.name.removeprefix("aten::") for event in profile.function_events}


def sample_with(name: str, function: Callable[..., Any], *values: torch.Tensor) -> Sample:
    """A sample of given values; the others are the same in another order, and changed ones."""
    others = tuple(value.flip(0) if value.dim() and value.dtype.is_floating_point else value for value in values)
    return Sample(name, lambda given: function(*given), values, (others, *_changed(values)))


def composite_ops() -> dict[str, list[Any]]:
    """The ops on tensors that torch takes apart in C++, by name, without those that write a given result."""
    found: dict[str, list[Any]] = {}
    for full in torch._C._dispatch_get_all_op_names():
        if not full.startswith("aten::"):
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd"):
            continue
        name, _, overload = full.partition("::")[2].partition(".")
        op = getattr(getattr(torch.ops.aten, name), overload or "default")
        takes_tensors = any("Tensor" in str(argument.type) for argument in op._schema.arguments)
        if takes_tensors and not any(argument.is_out for argument in op._schema.arguments):
            found.setdefault(name, []).append(op)
    return found


def samples_by_schema(op: Any) -> Iterator[Sample]:
    """Calls with the plainest arguments that the op takes: float, integer and truth values, matrices and vectors."""
    name = op._schema.name.partition("::")[2]
    function = next((f for f in (getattr(place, name, None) for place in _PLACES) if f is not None), op)
    for kind in ("float", "int", "bool"):
        for shape in ((3, 3), (3,)):
            drawn = []
            for seed in (1, 2):
                torch.manual_seed(seed)
                drawn.append([_argument(a, kind, shape) for a in op._schema.arguments if not a.has_default_value()])
            values, others = map(_tensors, drawn)
            yield Sample(name, _refilled(function, (drawn[0], {})), values, (others, *_changed(others)))


_PLACES = (torch, torch.special, torch.linalg, torch.Tensor, torch._C._nn)


def _argument(argument: Any, kind: str, shape: tuple[int, ...]) -> Any:
    text = str(argument.type)
    if "Tensor" in text:
        value = torch.rand(shape) + 0.1
        value = {"float": value, "int": (value * 10).long(), "bool": value > 0.5}[kind]
        return [value, value.clone()] if text.startswith("List") else value
    plain = {"number": 2, "int": 1, "float": 0.5, "bool": False}
    return plain.get(text, [1] if text.startswith("List[int]") else None)
