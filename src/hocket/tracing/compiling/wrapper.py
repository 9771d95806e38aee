"""Record the calls of Inductor's Python wrapper as a list of events. Used in the compiling process only.

The wrapper is straight-line code: it allocates buffers, takes views, calls kernels and ops of torch. Its function
``call`` is run once on fake tensors, with stand-ins for all the names that it may use. Any other name is an error, so
what is not understood is never left out.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hocket.errors import CaptureError
from hocket.tracing.compiling.arguments import encoded, op_text
from hocket.tracing.compiling.functional import plain_op
from hocket.tracing.recording.op_arguments import written_arguments

_aten = torch.ops.aten
# Products, by the names that the wrapper has for them. They write into `out`.
_INTO = {"mm": _aten.mm.out, "addmm": _aten.addmm.out, "bmm": _aten.bmm.out, "baddbmm": _aten.baddbmm.out}


@dataclass(frozen=True)
class WrittenKernel:
    """A kernel as it is written: the types of its arguments, and C++."""

    types: tuple[str, ...]
    source: str


@dataclass
class RecordedCalls:
    """Events in their order, on numbered values."""

    values: list[torch.Tensor] = field(default_factory=list)  # of each value its tensor, which has a layout and no data
    # the calls, see `hocket.tracing.compiling.listing.Listing`
    events: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)  # the values that the step leaves
    _known: dict[int, int] = field(default_factory=dict)
    _first: dict[int, int] = field(default_factory=dict)

    def new(self, tensor: torch.Tensor) -> int:
        self.values.append(tensor)
        self._known[id(tensor)] = len(self.values) - 1
        self._first.setdefault(tensor.untyped_storage()._cdata, len(self.values) - 1)
        return len(self.values) - 1

    def value(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._known:
            raise CaptureError("the wrapper uses a tensor that nothing made")
        return self._known[id(tensor)]

    def values_in(self, tree: Any) -> list[int]:
        return [self.value(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

    def root(self, value: int) -> int:
        """The first value of the same memory."""
        return self._first[self.values[value].untyped_storage()._cdata]

    def op(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Note a call, and what it made."""

        def reference(leaf: Any) -> dict[str, int] | None:
            return {"value": self.value(leaf)} if isinstance(leaf, torch.Tensor) else None

        texts = [encoded(each, reference) for each in args]
        keywords = {key: encoded(each, reference) for key, each in kwargs.items()}
        given = self.values_in((args, kwargs))
        written = self.values_in(list(written_arguments(func, list(args), kwargs)))
        if isinstance(result, torch.Tensor):
            outs = [] if id(result) in self._known else [[-1, self.new(result)]]
        else:
            outs = [[n, self.new(each)] for n, each in enumerate(result or ()) if isinstance(each, torch.Tensor)]
        event = {"op": op_text(func), "args": texts, "kwargs": keywords}
        self.events.append({**event, "outs": outs, "given": given, "written": written})

    def view(self, base: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int, made: Any) -> None:
        """Note a view, which begins `offset` elements behind its base, wherever that lies at the time."""
        given = self.value(base)
        args = [{"value": given}, list(size), list(stride), offset]
        event = {"op": "hocket.part.default", "args": args, "kwargs": {}}
        self.events.append({**event, "outs": [[-1, self.new(made)]], "given": [given], "written": []})


def kernels_of(source: str) -> dict[str, WrittenKernel]:
    """The kernels that a wrapper's source defines."""
    found = {}
    for node in ast.parse(source).body:
        call = node.value if isinstance(node, ast.Assign) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "cpp_pybinding":
            assert isinstance(node, ast.Assign)
            assert isinstance(node.targets[0], ast.Name)
            types, text = (ast.literal_eval(argument) for argument in call.args)
            found[node.targets[0].id] = WrittenKernel(tuple(types), text)
    return found


def recorded(source: str, given: Sequence[torch.Tensor]) -> RecordedCalls:
    """Run a wrapper's ``call`` on fake tensors, one for each argument, inside their mode. Note what it does."""
    calls = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == "call"]
    if len(calls) != 1:
        raise CaptureError(f"the wrapper has {len(calls)} functions named call")
    (function,) = calls
    function.decorator_list.clear()
    notes = RecordedCalls()
    for tensor in given:
        notes.new(tensor)
    names: dict[str, Any] = {"__builtins__": {}, **_stand_ins(notes, kernels_of(source))}
    exec(compile(ast.Module([function], []), "<wrapper>", "exec"), names)
    arguments: list[Any] = [list(given)]
    if function.args.args[0].arg == "self":
        arguments.insert(0, None)
    try:
        result = names["call"](*arguments)
    except CaptureError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever it is: a name without a stand-in, a method of a tensor, other arguments
        raise CaptureError(f"the wrapper does what is not known: {error}") from None
    for tensor in result:
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(f"the wrapper returns a {type(tensor).__name__}")
        notes.outputs.append(notes.value(tensor))
    return notes


def _stand_ins(notes: RecordedCalls, kernels: dict[str, WrittenKernel]) -> dict[str, Any]:
    def allocated(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty_strided(size, stride, dtype=dtype)
        notes.op(_aten.empty_strided.default, (list(size), list(stride)), {"dtype": dtype}, made)
        return made

    def view(base: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
        made = torch.as_strided(base, size, stride, int(base.storage_offset()) + offset)
        notes.view(base, size, stride, offset, made)
        return made

    found: dict[str, Any] = {
        "empty_strided_cpu": allocated,
        "reinterpret_tensor": view,
        "assert_size_stride": lambda *_, **__: None,
        "assert_alignment": lambda *_, **__: None,
        "extern_kernels": _Products(notes),
        "torch": _Torch(notes),
        "aten": _Ops(notes, torch.ops.aten),
        "inf": float("inf"),
        "nan": float("nan"),
        "device": torch.device,
    }
    found |= {name: _kernel(notes, name, kernel) for name, kernel in kernels.items()}
    return found


def _kernel(notes: RecordedCalls, name: str, kernel: WrittenKernel) -> Callable[..., None]:
    def call(*args: Any) -> None:
        if len(args) != len(kernel.types) or not all(isinstance(arg, torch.Tensor) for arg in args):
            raise CaptureError(f"kernel {name} is given what is no tensor")
        values = [notes.value(arg) for arg in args]
        written = [v for v, kind in zip(values, kernel.types, strict=True) if not kind.startswith("const ")]
        notes.events.append({"kernel": name, "given": values, "written": written})

    return call


class _Products:
    """``extern_kernels``: products of matrices, which write into a buffer that is there, and convolutions."""

    def __init__(self, notes: RecordedCalls) -> None:
        self._notes = notes

    def __getattr__(self, name: str) -> Callable[..., Any]:
        notes = self._notes
        if name == "convolution":
            return self._convolution
        if name not in _INTO:
            raise CaptureError(f"the wrapper calls extern_kernels.{name}, which is not known")

        def product(*args: Any, out: torch.Tensor, **kwargs: Any) -> None:
            notes.op(_INTO[name], args, {**kwargs, "out": out}, out)

        return product

    def _convolution(self, x: Any, weight: Any, bias: Any = None, **options: Any) -> torch.Tensor:
        names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
        if set(options) != set(names):
            raise CaptureError(f"the wrapper calls a convolution with {sorted(options)}")
        args = (x, weight, bias, *(options[each] for each in names))
        made: torch.Tensor = _aten.convolution.default(*args)
        self._notes.op(_aten.convolution.default, args, {}, made)
        return made


class _Ops:
    """``torch.ops.aten`` and the ops in it: called, they note themselves."""

    def __init__(self, notes: RecordedCalls, of: Any) -> None:
        self._notes, self._of = notes, of

    def __getattr__(self, name: str) -> _Ops:
        return _Ops(self._notes, getattr(self._of, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        func = plain_op(self._of)
        if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
            raise CaptureError(f"the wrapper calls {func}")
        result = func(*args, **kwargs)
        self._notes.op(func, args, kwargs, result)
        return result


class _Torch:
    """``torch`` in a wrapper: its ops, and constants such as dtypes."""

    def __init__(self, notes: RecordedCalls) -> None:
        self._notes = notes

    def __getattr__(self, name: str) -> Any:
        if name == "ops":
            return _Ops(self._notes, torch.ops)
        found = getattr(torch, name)
        if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)) and found is not torch.device:
            raise CaptureError(f"the wrapper uses torch.{name}")
        return found
