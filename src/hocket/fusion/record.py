"""A model becomes a graph by a forward on tensors without data, of which each function of torch is written down.

    forward on fake tensors --each call of torch--> node, and a fake result that Python goes on with

The forward sees shapes, types and devices, and may branch on them, so the graph holds for these only. What it sees of
values is an error: fake tensors have none. So is whatever a graph would lose, such as a hook.

Functions are written down where they are called, before torch takes them apart, by their names there: the ones that
rules know. Layers that have a rule, and blocks that stay separate, are one node each.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.proxy import TraceError
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hocket.fusion.python_state import attributes, changes
from hocket.fusion.rules import find_module
from hocket.fusion.rules.base import op_name
from hocket.fusion.store import named_tensors
from hocket.fusion.trace import Traced, autograd_functions_by, mode_of_torch
from hocket.fusion.transformer_forwards import TRACEABLE_FORWARDS

__all__ = ["recorded"]

# What these give is known without values, and so is what functions without tensors among their arguments give.
KNOWN = frozenset(
    """
    size dim ndimension numel nelement stride storage_offset is_contiguous is_floating_point is_complex is_signed
    is_tensor element_size get_device result_type promote_types can_cast __len__ is_inference is_same_size type
    """.split()  # noqa: SIM905  (a list of quoted names says no more, and is longer)
)
# Not whether a tensor has gradients: that is another thing under `torch.no_grad()`, where the same graph runs.
KNOWN_ATTRIBUTES = frozenset(
    """
    shape dtype device ndim layout is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_xpu is_mps is_nested
    itemsize nbytes names
    """.split()  # noqa: SIM905
)
REFLECTED = {f"__r{name}__": getattr(operator, name) for name in ("sub", "truediv", "floordiv", "mod", "pow")}
REFLECTED |= {"__rdiv__": operator.truediv, "__rmatmul__": operator.matmul}
DEVICE = torch.ops.prim.device.default
_aten = torch.ops.aten
VIEWS = frozenset(
    [
        *(_aten.view.default, _aten._unsafe_view.default, _aten.expand.default),
        *(_aten.t.default, _aten.transpose.int, _aten.unsqueeze.default),
    ]
)
WITHOUT_RESULT = ("__setitem__", "_assert", "_assert_async")  # and yet ops


def recorded(
    model: nn.Module, values: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], separate: frozenset[str]
) -> Traced:
    """The graph of a forward, for the shapes of these arguments.

    Args:
        model: its tensors need no data.
        values: its parameters and buffers by name, for their types and devices; nothing reads what is in them.
        args: of the forward.
        kwargs: the same.
        separate: names of blocks that are one node.

    Raises:
        TraceError: the forward looks at values, or does what a graph would lose.
        Exception: whatever the forward raises.
    """
    fakes = _Fakes(allow_non_fake_inputs=True)  # tensors that belong to no layer have their data
    known = {
        id(hollow): _fake(fakes, values[name], isinstance(hollow, nn.Parameter))
        for name, hollow in named_tensors(model)
        if name in values
    }
    model = copy.deepcopy(model, dict(known))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    given = [_fake(fakes, leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(given, spec)
    before = attributes(model)
    tensors_before = [(name, id(tensor)) for name, tensor in named_tensors(model)]
    recorder = _Recorder(model, separate, given)
    with warnings.catch_warnings(), fakes:
        warnings.simplefilter("ignore")
        with _layers_by(recorder.layer), autograd_functions_by(recorder.function), recorder:
            out = model(*args, **kwargs)
    for path, _ in changes(before, attributes(model)):
        raise TraceError(f"the forward changes {path}")
    if tensors_before != [(name, id(tensor)) for name, tensor in named_tensors(model)]:
        raise TraceError("the forward assigns a parameter or buffer anew")
    return recorder.traced(out)


class _Fakes(FakeTensorMode):
    """Torch's mode, which takes half as long again: it guards each op against its compiler, and views are Python."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device
        if func in VIEWS and isinstance(args[0], FakeTensor):  # the meta tensor in it knows the answer
            with in_kernel_invocation_manager(self):
                return FakeTensor(self, func(*args, **(kwargs or {})), args[0].fake_device)
        return self.dispatch(func, types, args, kwargs or {})


def _fake(fakes: FakeTensorMode, tensor: Tensor, is_parameter: bool = False) -> Tensor:
    """A fake tensor like this one, around one on the meta device: by an op of the mode it takes ten times as long."""
    hollow = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    own = FakeTensor(fakes, hollow, tensor.device)
    own._is_param = is_parameter  # which makes it an `nn.Parameter`
    return own.requires_grad_(tensor.requires_grad)


class _Recorder(TorchFunctionMode):
    """Writes down calls.

    Args:
        model: whose forward runs; its tensors are fake.
        separate: names of blocks that are one node.
        leaves: of the arguments.
    """

    def __init__(self, model: nn.Module, separate: frozenset[str], leaves: list[Any]) -> None:
        super().__init__()
        self._graph = fx.Graph()
        self._separate = separate
        self._paths = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._names = {id(tensor): name for name, tensor in reversed(named_tensors(model))}
        self._nodes: dict[int, tuple[Tensor, fx.Node]] = {}  # by the id of the tensor, which is held
        self._inputs: dict[fx.Node, int] = {}
        self._tensors: dict[fx.Node, str] = {}
        self._constants: dict[fx.Node, Any] = {}
        self._trains, *self._mode = mode_of_torch()
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if id(leaf) in self._nodes:
                    raise TraceError("the same tensor stands for two arguments")
                node = self._graph.placeholder(f"input_{number}")
                self._nodes[id(leaf)] = (leaf, node)
                self._inputs[node] = number

    def traced(self, out: Any) -> Traced:
        """The graph, ended by this output."""
        leaves, spec = pytree.tree_flatten(out)
        self._graph.output(tuple([self._argument(leaf) for leaf in leaves]))
        for node in reversed(list(self._graph.nodes)):
            if node.target is operator.getitem and not node.users:
                self._graph.erase_node(node)  # a part of a result that nobody wanted
        return Traced(self._graph, self._inputs, self._tensors, self._constants, spec)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One call of torch."""
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__":
            return self._attribute(func.__self__.__name__, func, args)
        if name == "_set_grad_enabled":  # what it is for a call is asked in `_record`
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if not _has_tensor(result):
            is_known = name in KNOWN or not _has_tensor((args, kwargs))
            if not is_known and name not in WITHOUT_RESULT:
                raise TraceError(f"the forward looks at values, by {name}")
            if is_known:
                return result
        if getattr(Tensor, name, None) is not func:
            if op_name(func) is None:
                raise TraceError(f"{name} is no op")
            self._record("call_function", func, args, kwargs, result)
        elif name in REFLECTED:
            self._record("call_function", REFLECTED[name], args[::-1], kwargs, result)
        elif name.startswith("__") and hasattr(operator, name):
            self._record("call_function", getattr(operator, name), args, kwargs, result)
        elif name.startswith("__"):
            raise TraceError(f"no op is known for {name}")
        else:
            self._record("call_method", name, args, kwargs, result)
        return result

    def layer(self, module: nn.Module, usual: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a module of the model, or of one that it makes."""
        path = self._paths.get(id(module))
        if path is None:
            return usual(module, *args, **kwargs)
        self._stack.append(path)
        try:
            if find_module(module) is None and path not in self._separate:
                plain = TRACEABLE_FORWARDS.get(type(module))
                return usual(module, *args, **kwargs) if plain is None else plain(module, *args, **kwargs)
            with torch._C.DisableTorchFunction():
                result = usual(module, *args, **kwargs)
            return self._record("call_module", path, args, kwargs, result)
        finally:
            self._stack.pop()

    def function(self, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A `torch.autograd.Function`, which is one op."""
        if not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return apply(*args, **kwargs)  # of another thread
        with torch._C.DisableTorchFunction():
            result = apply(*args, **kwargs)
        return self._record("call_function", apply, args, kwargs, result)

    def _attribute(self, name: str, func: Any, args: tuple[Any, ...]) -> Any:
        result = func(*args)
        if name in KNOWN_ATTRIBUTES:
            return result
        if not isinstance(result, Tensor):
            raise TraceError(f"the forward looks at values, by the attribute {name}")
        return self._record("call_function", getattr, (args[0], name), {}, result)

    def _record(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        has_gradients, *mode = mode_of_torch()
        if mode != self._mode:
            raise TraceError("a part of the forward runs in inference mode, or in an autocast of its own")
        is_detached = self._trains and not has_gradients
        argument = self._detached if is_detached else self._argument
        own_args, own_kwargs = fx.node.map_aggregate(args, argument), fx.node.map_aggregate(kwargs, argument)
        node = self._placed(self._graph.create_node(op, target, own_args, own_kwargs))
        if not is_detached or not any(result is leaf for leaf in pytree.tree_leaves((args, kwargs))):
            self._name_parts(node, result)  # else written over without gradients: its own go where they went before
        return result

    def _placed(self, node: fx.Node) -> fx.Node:
        path = self._stack[-1] if self._stack else ""
        node.meta["nn_module_stack"] = {path: (path, nn.Module)}
        return node

    def _name_parts(self, node: fx.Node, result: Any) -> None:
        """Say of each tensor of a result which node it is."""
        if isinstance(result, Tensor):
            self._nodes[id(result)] = (result, node)
        elif isinstance(result, (tuple, list)):
            for place, part in enumerate(result):
                if _has_tensor(part):
                    self._name_item(node, place, part)
        elif isinstance(result, dict):
            for key, part in result.items():
                if _has_tensor(part):
                    self._name_item(node, key, part)
        elif _has_tensor(result):
            raise TraceError(f"{node.name} gives a {type(result).__name__}")

    def _name_item(self, node: fx.Node, key: Any, part: Any) -> None:
        self._name_parts(self._placed(self._graph.call_function(operator.getitem, (node, key))), part)

    def _detached(self, leaf: Any) -> Any:
        """A tensor's node, without the gradients that it has, or may have in a later call."""
        node = self._argument(leaf)
        may_have = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        return self._placed(self._graph.call_method("detach", (node,))) if may_have else node

    def _argument(self, leaf: Any) -> Any:
        """A tensor's node."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._nodes:
            return self._nodes[id(leaf)][1]
        name = self._names.get(id(leaf))
        if name is not None:
            node = self._graph.get_attr(name)
            self._tensors[node] = name
        elif isinstance(leaf, FakeTensor):
            raise TraceError("the forward has a tensor that no op has given")
        else:
            node = self._graph.get_attr(f"constant_{len(self._constants)}")
            self._constants[node] = leaf
        self._nodes[id(leaf)] = (leaf, node)
        return node


def _has_tensor(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(tree))


@contextmanager
def _layers_by(layer: Callable[..., Any]) -> Iterator[None]:
    """While this is open, `layer` calls modules."""
    usual = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return layer(module, usual, args, kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = usual  # type: ignore[method-assign]
