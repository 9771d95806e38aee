"""A model becomes a graph of ops, each with the layer it belongs to.

torch.fx first: its symbolic trace keeps batch sizes open and whole modules whole. Where a forward branches on shapes or
unpacks them, `hocket.fusion.record` on the input at hand: its graphs hold for these shapes only, so they are made again
for others. Where neither can follow, the models go one by one.

Transformer layers are traced through forwards without a fast path (`transformer_forwards`), because torch's own choose
one by looking at values.
"""

from __future__ import annotations

import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx._symbolic_trace import PH
from torch.utils import _pytree as pytree

from hocket.fusion.checkpointing import without_checkpoints
from hocket.fusion.python_state import attributes, changes
from hocket.fusion.rules import find_module
from hocket.fusion.rules.base import IN_PLACE
from hocket.fusion.store import named_tensors
from hocket.fusion.transformer_forwards import TRACEABLE_FORWARDS
from hocket.fusion.writes import written_by

__all__ = ["Traced", "autograd_functions_by", "mode_of_torch", "symbolic"]

FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, NameError, LookupError, AssertionError)


@dataclass(frozen=True)
class Traced:
    """A graph and what its nodes stand for.

    Attributes:
        graph: the ops of one model.
        inputs: for each placeholder that is an input, the number of the leaf among all leaves of the arguments.
        tensors: for each placeholder that is a parameter or buffer, its name; ``get_attr`` nodes name theirs.
        constants: values of ``get_attr`` nodes and placeholders that belong to no layer.
        out_spec: the tree of the output, where the graph gives its leaves; None where it gives the output itself.
        keeps_values: whether the forward leaves values in attributes, which its next call might read.
    """

    graph: fx.Graph
    inputs: dict[fx.Node, int]
    tensors: dict[fx.Node, str]
    constants: dict[fx.Node, Any]
    out_spec: Any
    keeps_values: bool = False

    def unflatten(self, out: Any) -> Any:
        """The output, from what the graph gives."""
        if self.out_spec is None:
            return out
        return pytree.tree_unflatten(list(out) if isinstance(out, (list, tuple)) else [out], self.out_spec)

    def layer(self, node: fx.Node) -> str:
        """The name of the innermost layer a node belongs to; empty for the model itself."""
        if node.op == "call_module":
            return str(node.target)
        stack = node.meta.get("nn_module_stack") or {}
        last = next(reversed(stack.values()), ("", None))
        return str(last[0] if isinstance(last, tuple) else last)


class _Proxy(fx.Proxy):
    """A value in a forward that is traced; ``x += y`` changes it in place, as it does with tensors."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise fx.proxy.TraceError(f"the forward sets {name} of a tensor")
        super().__setattr__(name, value)

    @classmethod
    def __torch_function__(
        cls, orig_method: Any, types: Any, args: tuple[Any, ...] | None = None, kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As fx's own; to tell methods from functions that lists all of torch, as long as it takes to trace an MLP."""
        args, kwargs = args or (), kwargs or {}
        proxies = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, fx.Proxy)]
        is_function = (
            isinstance(orig_method, BuiltinFunctionType)
            or getattr(orig_method, "__module__", "") == "torch.nn.functional"
        )
        if not is_function or len({proxy.tracer for proxy in proxies}) != 1:
            return super().__torch_function__(orig_method, types, args, kwargs)
        tracer: Any = proxies[0].tracer
        name = tracer.graph._target_to_str(orig_method.__name__)
        return tracer.create_proxy("call_function", orig_method, args, kwargs, name=name)


def _written(name: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})


for _name in IN_PLACE:
    setattr(_Proxy, f"__{_name}__", _written(_name))


class _Tracer(fx.Tracer):
    """Goes into every module but those that have a rule of their own, or stay separate."""

    def __init__(self, model: nn.Module, separate: frozenset[str]) -> None:
        super().__init__()
        self.proxy_buffer_attributes = True
        self._known = {id(each): (name, each) for name, each in (*model.named_buffers(), *model.named_parameters())}
        self._whole = separate
        self._mode = mode_of_torch()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if mode_of_torch() != self._mode:  # a graph of ops would not know
            raise fx.proxy.TraceError("a part of the forward runs in a grad mode or autocast of its own")
        return super().create_node(*args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """As fx's own, which searches all parameters for each that is read, and takes a quarter of the trace for it."""
        name, known = self._known.get(id(attr_val), ("", None))
        if known is None or known is not attr_val:
            return super().getattr(attr, attr_val, parameter_proxy_cache)
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._whole or find_module(m) is not None

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        plain = TRACEABLE_FORWARDS.get(type(m))
        before = len(self.graph.nodes)
        try:
            return super().call_module(m, forward if plain is None else functools.partial(plain, m), args, kwargs)
        except (fx.proxy.TraceError, *FAILURES):
            is_layer = type(m).__module__.startswith("torch.nn.") and not isinstance(m, (nn.Sequential, nn.ModuleList))
            if plain is not None or not is_layer:
                raise
            for node in list(self.graph.nodes)[: before - 1 : -1]:
                self.graph.erase_node(node)
            self._whole |= {self.path_of_module(m)}
            return super().call_module(m, forward, args, kwargs)


@contextmanager
def autograd_functions_by(record: Callable[..., Any]) -> Iterator[None]:
    """While this is open, a `torch.autograd.Function` is one op: the ops of its forward have another backward.

    Args:
        record: takes a function's `apply`, its arguments and those by name, and gives its result.
    """
    usual = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return record(usual.__get__(None, cls), args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        with without_checkpoints():
            yield
    finally:
        torch.autograd.Function.apply = usual  # type: ignore[method-assign]


def _by_proxy(apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    proxies: list[fx.Proxy] = []
    fx.node.map_aggregate((args, kwargs), lambda leaf: proxies.append(leaf) if isinstance(leaf, fx.Proxy) else leaf)
    if proxies:
        return proxies[0].tracer.create_proxy("call_function", apply, args, kwargs)
    return apply(*args, **kwargs)


def mode_of_torch() -> tuple[bool, ...]:
    """What a ``with`` inside of a forward may change."""
    found = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    return (*found, *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")))


def _write_back(model: nn.Module, graph: fx.Graph) -> None:
    """A buffer that the forward assigns anew (``self.n = self.n + 1``) gets what was assigned written into it."""
    last = next(iter(reversed(graph.nodes)))
    for name, value in list(model.named_buffers(remove_duplicate=False)):
        if isinstance(value, fx.Proxy):
            root = value.node
            while (target := written_by(root, model.get_submodule)) is not None:
                root = target
            if not (root.op == "get_attr" and root.target == name):
                with graph.inserting_before(last):
                    graph.call_method("copy_", (graph.create_node("get_attr", name), value.node))


def symbolic(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], separate: frozenset[str]) -> Traced:
    """Trace with torch.fx; arguments that are not tensors are taken as they are.

    Raises:
        Exception: whatever the forward raises when its values are not known; see `FAILURES`.
    """
    if type(model).__call__ is not nn.Module.__call__:
        raise fx.proxy.TraceError("the model has a __call__ of its own, around its forward")
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    call_leaves = pytree.tree_flatten((args, kwargs))[0]
    numbers = {id(leaf): number for number, leaf in enumerate(call_leaves) if isinstance(leaf, Tensor)}
    bound.apply_defaults()
    concrete: dict[str, Any] = {}
    order: list[int | None] = []
    for name, value in bound.arguments.items():
        leaves, spec = pytree.tree_flatten(value)
        kind = bound.signature.parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            if leaves:
                raise ValueError(f"{name}: fx cannot follow variable arguments")
            continue
        order += [numbers[id(leaf)] if isinstance(leaf, Tensor) else None for leaf in leaves]
        marked = [PH if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        concrete[name] = pytree.tree_unflatten(marked, spec)
    if len(set(order) - {None}) != len(numbers):
        raise ValueError("the same tensor stands for two arguments")
    if find_module(model) is not None:
        return _one_op(bound.arguments, order)
    if type(model) in TRACEABLE_FORWARDS:
        plain = TRACEABLE_FORWARDS[type(model)]
        model.__class__ = type(type(model).__name__, (type(model),), {"forward": plain})
    before = attributes(model)
    with warnings.catch_warnings(), autograd_functions_by(_by_proxy):
        warnings.simplefilter("ignore")
        graph = _Tracer(model, separate).trace(model, concrete_args=concrete)
    changed = changes(before, attributes(model))
    for path, value in changed:
        if not isinstance(value, fx.Proxy):
            raise fx.proxy.TraceError(f"the forward changes {path}")
    _write_back(model, graph)
    places = [node for node in graph.nodes if node.op == "placeholder" and not str(node.target).startswith("*")]
    inputs = {node: number for node, number in zip(places, order, strict=True) if number is not None}
    known = dict(named_tensors(model))
    read = {node: str(node.target) for node in graph.nodes if node.op == "get_attr"}
    tensors = {node: name for node, name in read.items() if name in known}
    constants = {node: operator.attrgetter(name)(model) for node, name in read.items() if name not in known}
    for value in constants.values():
        if isinstance(value, Tensor) and (value.is_meta or value.requires_grad):
            raise fx.proxy.TraceError("the forward computes with parameters where no op is recorded")
    info = getattr(graph._codegen, "pytree_info", None)  # with nested arguments fx flattens the output too
    return Traced(graph, inputs, tensors, constants, None if info is None else info.out_spec, bool(changed))


def _one_op(arguments: dict[str, Any], order: list[int | None]) -> Traced:
    """The graph of a model that is itself one op, such as an LSTM."""
    graph = fx.Graph()
    inputs: dict[fx.Node, int] = {}
    numbers = iter(order)

    def place(leaf: Any) -> Any:
        number = next(numbers)
        if number is None:
            return leaf
        node = graph.placeholder(f"input_{number}")
        inputs[node] = number
        return node

    own = {name: pytree.tree_map(place, value) for name, value in arguments.items()}
    graph.output(graph.call_module("", (), own))
    return Traced(graph, inputs, {}, {}, None)
