"""A requested step as a functional graph for Inductor. Used in the compiling process only.

The calls are run once on fake tensors, below `torch.func.functionalize`: writes in place become values, and
the inputs of the step are written once, at the end. Four things are done on the way:

- *Numbers that change* are elements of one float64 vector. Ops that take numbers only are written as others that take
  tensors, ``addcmul_(a, b, c, value=v)`` as ``a + v * b * c``. As a number, Inductor drops one silently in places.
- *Ops that may raise for their values* (a label that does not exist) stay torch's: a compiled kernel that finds one
  ends the process. They get names that Inductor has no kernels for, so it calls them.
- *Random numbers that are drawn in place* are drawn into a tensor of their own, by such an op. Inductor 2.13 keeps
  ``bernoulli_`` in place, and at times computes with the tensor before that: a dropout behind a softmax was NaN.
- *Running statistics*, which a batch norm writes without saying so, are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map

from hocket.errors import CaptureError
from hocket.tracing.compiling.arguments import decoded, dtype_of, op_named
from hocket.tracing.float64 import WIDE
from hocket.tracing.raising import may_raise
from hocket.tracing.recording.op_arguments import written_arguments

_aten = torch.ops.aten
# The namespace of ops that stay torch's, and for each of them the op it stands for.
_NAMESPACE = "hocket_plain"
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_PLAIN: dict[Any, Any] = {}
# Ops whose kernels by Inductor take longer than torch's.
_SLOWER = (_aten.embedding_dense_backward.default,)


def functional_graph(
    document: dict[str, Any], decompositions: Any, *, wide: bool
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The graph of a request, and fake tensors for its inputs, of which the numbers are the last."""
    run = _RequestedCalls(document, wide)
    with FakeTensorMode() as mode, torch.no_grad():
        given = [torch.empty_strided(size, stride, dtype=run.dtype(name)) for _, size, stride, name in run.inputs]
        given.append(torch.empty(document["numbers"], dtype=torch.float64))
    with mode, torch.no_grad():
        functional = torch.func.functionalize(run, remove="mutations")
        module = make_fx(functional, decomposition_table=decompositions)(*given)
    module.graph.eliminate_dead_code()
    return module, given


def plain_op(func: Any) -> Any:
    """Return the torch op that an op of our namespace replaces. Other ops are returned unchanged."""
    return _PLAIN.get(func, func)


class _RequestedCalls:
    """Runs the calls of a request on tensors: its inputs, and the numbers."""

    def __init__(self, document: dict[str, Any], wide: bool) -> None:
        self.inputs: list[Any] = document["inputs"]
        self._calls, self._outputs = document["calls"], [slot for slot, *_ in document["outputs"]]
        self._dtypes = {int(slot): dtype_of(name) for slot, name in document["dtypes"].items()}
        self._wide = WIDE if wide else {}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that tensors of this dtype have in the compiled step."""
        own = dtype_of(name)
        return self._wide.get(own, own)

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        values: dict[int, Any] = {slot: value for (slot, *_), value in zip(self.inputs, given, strict=False)}
        numbers = given[-1]

        def leaf(kind: str, index: int) -> Any:
            return values[index] if kind == "value" else numbers.select(0, index)

        for text in self._calls:
            func = op_named(text["op"])
            if torch.Tag.nondeterministic_seeded in func.tags and self._wide:
                result = self._drawn(text, func, values)
            else:
                args, kwargs = self._arguments(text, leaf)
                result = (_with_numbers if "number" in str(text) else _called)(func, args, kwargs)
            for position, slot in text["outs"]:
                values[slot] = result if position < 0 else result[position]
                expected = self._dtypes.get(slot)
                if expected is not None and values[slot].dtype is not self._wide.get(expected, expected):
                    # A number that became a tensor takes part in promotion.
                    raise CaptureError(f"{text['op']} would make {values[slot].dtype} instead of {expected}")
        return [values[slot] for slot in self._outputs]

    def _arguments(self, text: dict[str, Any], leaf: Callable[[str, int], Any]) -> tuple[list[Any], dict[str, Any]]:
        def converted(value: Any) -> Any:
            return self._wide.get(value, value) if isinstance(value, torch.dtype) else value

        args = [converted(decoded(each, leaf)) for each in text["args"]]
        return args, {key: converted(decoded(each, leaf)) for key, each in text["kwargs"].items()}

    def _drawn(self, text: dict[str, Any], func: Any, values: dict[int, Any]) -> Any:
        """Random numbers in the step's own dtype, then in float64."""

        def wide(kind: str, index: int) -> Any:
            if kind == "number":
                raise CaptureError(f"{text['op']} is given a number that changes")
            return values[index]

        def narrow(kind: str, index: int) -> Any:
            return wide(kind, index).to(self._dtypes[index], copy=True)

        given, drawn = (
            ([decoded(a, leaf) for a in text["args"]], {key: decoded(a, leaf) for key, a in text["kwargs"].items()})
            for leaf in (wide, narrow)
        )
        result = _called(func, *drawn)
        for place, new in zip(written_arguments(func, *given), written_arguments(func, *drawn), strict=True):
            place.copy_(new)
        return tree_map(lambda each: each.to(self._wide.get(each.dtype, each.dtype)), result)


def _called(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an op that is given no number that changes."""
    if func.namespace != "aten":
        raise CaptureError(f"{func} is not an op of torch's own")
    if func is _aten.native_batch_norm.default:
        x, weight, bias, mean, var, training, momentum, eps = args
        if mean is None:
            return _aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
        return _aten._native_batch_norm_legit.default(x, weight, bias, mean, var, training, momentum, eps)
    if func is _aten.cat.default and (only := _only_part(args[0])) is not None:
        return only.clone(memory_format=torch.contiguous_format)
    declared = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if len(list(written_arguments(func, args, kwargs))) > len(declared):
        raise CaptureError(f"{func} writes what it does not declare")
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    stays = func in _SLOWER or may_raise(func._schema.name.partition("::")[2])
    if func is _aten.empty_strided.default:
        # Inductor fills it, which takes as long as a kernel; where random numbers are drawn into it, it is only read
        # for its layout.
        return _opaque(func)(*args, **kwargs)
    if not stays and not (is_random and declared):
        return func(*args, **kwargs)
    if not declared:
        return _opaque(func)(*args, **kwargs)
    functional = _without_write(func)
    if len(declared) > 1 or functional is None:
        if is_random:
            return func(*args, **kwargs)
        raise CaptureError(f"{func} may raise, and has no form that writes nothing")
    if is_random:
        return _drawn_apart(func, functional, args, kwargs)
    return args[0].copy_(_opaque(functional)(*args, **kwargs))


def _drawn_apart(func: Any, functional: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Random numbers as an op draws them into its first argument, drawn into a new tensor and then put there.

    They are drawn in the order of memory, and the new tensor may be a contiguous one whatever was given.
    """
    into = args[0]
    order = sorted(range(into.dim()), key=into.stride, reverse=True)
    turned = into.permute(order)
    positional = [argument for argument in func._schema.arguments if not argument.kwarg_only]
    further = [*args[1:], *(a.default_value for a in positional[len(args) :] if a.name not in kwargs)]
    if not turned.is_contiguous() or any(isinstance(each, torch.Tensor) for each in tree_leaves((further, kwargs))):
        raise CaptureError(f"{func} draws random numbers by other tensors, or into a part of one")
    drawn = _opaque(functional)(turned, *further, **kwargs)
    return into.copy_(drawn.permute([order.index(n) for n in range(into.dim())]))


def _only_part(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the only tensor to be joined whose shape is not (0,), if there is exactly one (first step of a cache).

    Torch's decomposition gives the result the strides of that one, its kernel makes it contiguous.
    """
    parts = [each for each in tensors if each.shape != (0,)]
    if len(parts) != 1 or len(tensors) == 1 or parts[0].is_contiguous(memory_format=torch.channels_last):
        return None
    return parts[0]


def _without_write(func: Any) -> Any:
    """The op of the same arguments that makes a new tensor in place of writing its first one."""
    name = func._schema.name.partition("::")[2]
    packet = getattr(_aten, name.removesuffix("_"), None) if name.endswith("_") else None
    own = [(a.name, str(a.type)) for a in func._schema.arguments]
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        if [(a.name, str(a.type)) for a in found._schema.arguments] == own:
            return found
    return None


def _opaque(func: Any) -> Any:
    """An op that is this one to torch, and unknown to Inductor."""
    name = f"{func._schema.name.partition('::')[2]}_{func._overloadname}"
    packet = getattr(getattr(torch.ops, _NAMESPACE), name, None)
    if packet is None:
        schema = str(func._schema)
        _LIBRARY.define(name + schema[schema.index("(") :])
        torch.library.register_fake(f"{_NAMESPACE}::{name}", lambda *args, **kw: func(*args, **kw), lib=_LIBRARY)
        packet = getattr(getattr(torch.ops, _NAMESPACE), name)
        _PLAIN[packet.default] = func
    return packet.default


def _with_numbers(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an op, one or more of whose numbers are tensors of no dimension now, where that is known."""
    name = func._schema.name.partition("::")[2]
    rule = _RULES.get(name.removesuffix("_"))
    if func.namespace != "aten" or rule is None:
        raise CaptureError(f"{func} is given a number that changes, and it is not known how to give it a tensor")
    result = rule(*args, **kwargs)
    if not name.endswith("_"):
        return result
    return args[0].copy_(result.to(args[0].dtype))


def _times(value: Any, factor: Any) -> Any:
    return value if isinstance(factor, (int, float)) and factor == 1 else value * factor


# The computation of each op, written so that each of its numbers may be a tensor.
_RULES: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda x, y, alpha=1: x + _times(y, alpha),
    "sub": lambda x, y, alpha=1: x - _times(y, alpha),
    "rsub": lambda x, y, alpha=1: y - _times(x, alpha),
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "pow": torch.pow,
    "addcmul": lambda x, a, b, value=1: x + value * a * b,
    "addcdiv": lambda x, a, b, value=1: x + value * a / b,
    "lerp": lambda x, y, weight: torch.lerp(x, y, weight.to(x.dtype)),
    "fill": lambda x, number: torch.zeros_like(x) + number.to(x.dtype),
    "clamp": torch.clamp,
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
}
