"""A model becomes a graph while it runs: each function of torch that its forward calls is written down.

    forward on the model's own tensors --each call of torch--> its result, and a node of the graph

The forward sees what it sees alone: real tensors and parameters, with values. So it takes the branches that it would
take, and what it does besides, it does once. What a graph cannot stand for (a look at values, an op that fails and is
caught) is noted, and no ``except`` of the user's clears it: such a model has no graph. What the forward asks of shapes
or strides is noted too: the graph holds for these only.

Functions are written down where they are called, before torch takes them apart, by their names there: the ones that
rules know. Blocks that stay separate are one node each. Some layers of torch run through forwards of ours
(`TRACEABLE_FORWARDS`), because torch's own look at values, or at shapes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hocket.errors import HocketError, InputError
from hocket.fusion import known_functions as functions
from hocket.fusion.gradients import as_leaf
from hocket.fusion.kinds import autocast
from hocket.fusion.known_functions import STRIDED, TRACEABLE_FORWARDS, memory, unlike_alone, version
from hocket.fusion.module_calls import calls_given, without_checkpoints
from hocket.fusion.questions import ASKING, MAX_ELEMENTS, is_check, look_of
from hocket.fusion.rules.base import op_name, where
from hocket.fusion.rules.random import DRAWS
from hocket.fusion.shared_objects import Known, check_part, named_tensors
from hocket.fusion.stacked import memory_order, tensors_in
from hocket.fusion.store import is_like
from hocket.fusion.traced import Look, RecordedForward, Traced
from hocket.pystate.origins import user_line
from hocket.pystate.plain_code import plain_code

_UNKNOWN = "the forward has a tensor that no op of torch's has given"
_MOVED = "has got other memory, by set_ or swap_tensors"
_NO_TREES = frozenset((int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device))


def recorded(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    separate: frozenset[str],
    known: frozenset[int],
    originals: Known,
) -> RecordedForward:
    """Call a model and record the functions of torch that its forward calls."""
    recorder = _Recorder(model, separate, pytree.tree_leaves((args, kwargs)), known, originals)
    try:
        with plain_code(recorder._cannot), without_checkpoints(), calls_given(recorder), recorder:
            out = model(*args, **kwargs)
    except (HocketError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if (place := recorder.failures.get(id(error))) is None:
            raise
        raise InputError(f"{place}: {error}") from error
    finally:
        if recorder.stray is not None:
            raise recorder.stray from None  # whatever the user's code has made of it
    traced = recorder.traced(out) if not recorder.reason else None
    reason, unknown, asked = recorder.reason, tuple(recorder.unknown), tuple(recorder.asked)
    may_pass = reason.startswith(_UNKNOWN)
    return RecordedForward(out, recorder.looks, None if reason else traced, reason, may_pass, unknown, asked)


class _Recorder(TorchFunctionMode):
    """Writes down calls."""

    def __init__(
        self, model: nn.Module, separate: frozenset[str], leaves: list[Any], known: frozenset[int], originals: Known
    ) -> None:
        super().__init__()
        self.reason = ""  # why the forward has no graph; the first one found, empty if there is none
        self.looks = functions.NOTHING  # how far it has looked at its tensors
        self.asked: list[Look] = []  # looks at values that can be asked for ahead of a forward
        self._asking: set[fx.Node] = set()  # the nodes that lead to these
        self.stray: InputError | None = None  # a part of another model that the forward has reached
        self.failures: dict[int, str] = {}  # the layers and ops that have raised, by the id of the exception
        self._graph = fx.Graph()
        self._model = model
        self._separate = separate
        self._known = known
        self._originals = originals
        self._paths = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._is_whole = False  # in a block that is one node
        self._names = {id(tensor): name for name, tensor in reversed(named_tensors(model))}
        self._nodes: dict[int, tuple[Tensor, fx.Node]] = {}  # by the id of the tensor, which is held
        self._values: dict[fx.Node, Tensor] = {}
        self._memory = {id(tensor): memory(tensor) for _, tensor in named_tensors(model)}  # of these and of others
        self._inputs: dict[fx.Node, int] = {}
        self._tensors: dict[fx.Node, str] = {}
        self._constants: dict[fx.Node, Any] = {}
        self.unknown: list[Tensor] = []
        # Tensors that come from no other ones, so that shapes say what is in them, and their versions.
        self._by_shapes: dict[int, int] = {}
        self._raised: list[BaseException] = []  # held, so that their addresses stay theirs
        self._buffers = dict(model.named_buffers(remove_duplicate=False))
        self._trains, *self._mode = _mode_of_torch()
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and id(leaf) not in self._nodes:  # one may stand for two arguments
                node = self._graph.placeholder(f"input_{number}")
                self._hold(leaf, node)
                self._inputs[node] = number

    def traced(self, out: Any) -> Traced:
        self._write_back()
        for name, tensor in named_tensors(self._model):
            if self._has_moved(tensor):
                self.reason = self.reason or f"{name} {_MOVED}"
        leaves, spec = pytree.tree_flatten(out)
        self._graph.output(tuple([self._argument(leaf) for leaf in leaves]))
        for node in reversed(list(self._graph.nodes)):
            is_part = node.target is operator.getitem or (node in self._asking and node.op.startswith("call_"))
            if is_part and not node.users:
                self._graph.erase_node(node)  # nothing reads it, or a look alone
        return Traced(self._graph, self._inputs, self._tensors, self._constants, spec)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One call of torch."""
        kwargs = kwargs or {}
        name = functions.OPERATORS.get(func) or func.__name__
        if name == "__get__":
            return self._attribute(getattr(func.__self__, "__name__", "of a class"), func, args)
        if name == "__set__":
            return self._set(getattr(func.__self__, "__name__", "of a class"), func, args)
        if name == "_set_grad_enabled":  # what it is for a call is asked in `_record`
            return func(*args, **kwargs)
        if name == "__iter__":
            return iter(self._called(Tensor.unbind, "unbind", args, kwargs))
        if name == "new" and isinstance(args[-1], torch.Size):  # a graph has a tuple, which would be numbers
            func, name = Tensor.new_empty, "new_empty"
        return self._called(func, name, args, kwargs)

    def _called(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in STRIDED and args:
            self._strided(name, args, kwargs)
        is_by_shapes = name not in DRAWS and self._is_by_shapes(args, kwargs)
        shape = out.shape if isinstance(out := kwargs.get("out"), Tensor) else None
        result = self._run(name, func, args, kwargs)
        if not (gives := _has_tensor(result)):
            unknown = functions.SHAPE if _has_tensor((args, kwargs)) else functions.NOTHING
            self._look(functions.KNOWN.get(name, unknown))
        if not gives and name not in functions.WITHOUT_RESULT:
            if functions.is_write(name) or (is_by_shapes and not self._is_by_shapes(args, kwargs)):
                self._cannot(f"{name} writes into tensors")
            elif name in functions.KNOWN or (is_by_shapes and name not in functions.SHARING):
                pass
            elif name not in ASKING or not (self._asks(func, args, kwargs, result) or self._checks(name, args, result)):
                self._cannot(f"the forward looks at values, by {name}")
            return result
        if is_by_shapes:
            self._by_shapes |= {id(leaf): version(leaf) for leaf in tensors_in((args, kwargs, result))}
        if functions.is_shaped_by_values(name, args, kwargs) and not is_by_shapes:
            self._cannot(f"{name} gives tensors whose shapes depend on values")
        if name.startswith("_foreach"):
            self._cannot(f"{name} goes over lists of tensors")
        if name in functions.OF_GENERATORS:
            self._cannot(f"the forward asks the random generator, by {name}")
        if name in functions.AS_MANY:
            self._look(functions.SHAPE)
        if out is not None and result is out and out.shape == shape:  # a value, and then a write of it
            value = out.clone()
            self._note(name, func, args, {key: kwargs[key] for key in kwargs if key != "out"}, value)
            self._record("call_method", "copy_", (out, value), {}, out)
        else:
            self._note(name, func, args, kwargs, result)
        return result

    def _note(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Write down an op, as a function or a method."""
        if getattr(Tensor, name, None) != func:
            if op_name(func) is None:
                self._cannot(f"{name} is no op")
            self._record("call_function", func, args, kwargs, result)
        elif name in functions.REFLECTED:
            self._record("call_function", functions.REFLECTED[name], args[::-1], kwargs, result)
        elif name.startswith("__") and hasattr(operator, name):
            self._record("call_function", getattr(operator, name), args, kwargs, result)
        elif name.startswith("__"):
            self._cannot(f"no op is known for {name}")
        else:
            self._record("call_method", name, args, kwargs, result)

    def _asks(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """True if a look at values follows from the inputs, so that later calls can be asked, too."""
        tensors = tensors_in((args, kwargs))
        if self.reason or (isinstance(result, list) and tensors[0].numel() > MAX_ELEMENTS):
            return False
        asked = [self._argument(tensor) for tensor in tensors]
        traced = Traced(self._graph, self._inputs, self._tensors, self._constants, None)
        found = look_of(traced, self._buffers, self._values, asked, (func, (args, kwargs)), result)
        if found is not None:
            self.asked.append(found[0])
            self._asking |= found[1]
        return found is not None

    def _checks(self, name: str, args: tuple[Any, ...], answer: Any) -> bool:
        """True if a look only says that values are as they should be: later calls check that they are again."""
        if name != "__bool__" or not is_check(self._argument(args[0])):
            return False
        held = args[0] if answer else self._record("call_method", "logical_not", args, {}, args[0].logical_not())
        self._record("call_function", torch._assert, (held, "values are as they were recorded"), {}, None)
        return True

    def layer(self, module: nn.Module, usual: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a module of the model, or of one that it makes."""
        path = self._paths.get(id(module))
        if path is None:
            self._check(module)
        if path is None or self._is_whole:
            return usual(module, *args, **kwargs)
        self._stack.append(path)
        try:
            if path not in self._separate:
                plain = TRACEABLE_FORWARDS.get(type(module))
                return usual(module, *args, **kwargs) if plain is None else plain(module, *args, **kwargs)
            self._is_whole = True
            with torch._C.DisableTorchFunction():
                result = self._run(type(module).__name__, usual, (module, *args), kwargs)
            self._is_whole = False
            return self._record("call_module", path, args, kwargs, result)
        finally:
            self._is_whole = False
            self._stack.pop()

    def function(self, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A `torch.autograd.Function`, which is one op: the ops of its forward have another backward."""
        if not torch._C._is_torch_function_mode_enabled():  # in a layer that is one op, or of another thread
            return apply(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            result = self._run("apply", apply, args, kwargs)
        return self._record("call_function", apply, args, kwargs, result)

    # ---------------------------------------------------------------------------------------------------- internals

    def _check(self, part: Any) -> None:
        try:
            check_part(self._originals, part)
        except InputError as error:
            self.stray = error
            raise

    def _cannot(self, reason: str) -> None:
        self.reason = self.reason or f"{reason} ({user_line()})"

    def _look(self, far: int) -> None:
        self.looks = max(self.looks, far)

    def _run(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except Exception as error:
            self._cannot(f"{name} raises {type(error).__name__}")
            kinds = ", ".join(str(leaf.dtype) for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor))
            self.failures.setdefault(id(error), f"{where(self._stack[-1] if self._stack else '')}: {name}({kinds})")
            self._raised.append(error)
            raise

    def _is_by_shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True where shapes say all of what is in a function's arguments. A write into them changes the version."""
        return all(self._by_shapes.get(id(leaf)) == version(leaf) for leaf in tensors_in((args, kwargs)))

    def _strided(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a view by strides depends on its tensor's layout. One that counts elements of memory is refused."""
        self._look(functions.LAYOUT)
        given = [self._nodes[key][0] for key in self._nodes if self._nodes[key][1] in self._inputs]
        own = [tensor for _, tensor in named_tensors(self._model)]
        if unlike_alone(name, args, kwargs, {found[0] for each in (*own, *given) if (found := memory(each))}):
            self._cannot(f"{name} counts elements of memory")

    def _attribute(self, name: str, func: Any, args: tuple[Any, ...]) -> Any:
        result = func(*args) if (found := as_leaf(args[0], name)) is NotImplemented else found
        if name in functions.KNOWN_ATTRIBUTES:
            self._look(functions.KNOWN_ATTRIBUTES[name])
            return result
        if found is not NotImplemented and name != "grad":
            return result
        if name not in functions.VIEWS:
            self._cannot(f"the forward looks at the attribute {name} of a tensor")
            return result
        if name == "data":  # which has versions of its own
            self._by_shapes.clear()
        return self._record("call_function", getattr, (args[0], name), {}, result)

    def _set(self, name: str, func: Any, args: tuple[Any, ...]) -> Any:
        """``tensor.data = value`` of the model's own tensors is a write into their memory."""
        target, value = args
        fits = isinstance(value, Tensor) and is_like(value, target)
        if name != "data" or id(target) not in self._names or not fits:
            self._cannot(f"the forward sets the attribute {name} of a tensor")
            return func(*args)
        data = target.data
        data.copy_(value)
        own = self._placed(self._graph.call_function(getattr, (self._argument(target), "data")))
        self._placed(self._graph.call_method("copy_", (own, self._argument(value))))
        return None

    def _write_back(self) -> None:
        """A buffer that the forward binds anew (``self.n = self.n + 1``) gets what was bound written into it."""
        for name, value in self._model.named_buffers(remove_duplicate=False):
            old = self._buffers.get(name)
            if value is old or old is None:
                continue
            if not is_like(value, old):
                self._cannot(f"the forward gives {name} another shape or type")
                return
            node = self._argument(value)
            if not (node.op == "get_attr" and self._tensors.get(node) == name):
                own = self._argument(old)
                self._placed(self._graph.call_method("copy_", (own, node)))

    def _record(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        has_gradients, *mode = _mode_of_torch()
        if mode != self._mode:
            self._cannot("a part of the forward runs in inference mode, or in an autocast of its own")
        if self.reason:
            return result
        is_detached = self._trains and not has_gradients
        argument = self._detached if is_detached else self._argument
        own_args, own_kwargs = fx.node.map_aggregate(args, argument), fx.node.map_aggregate(kwargs, argument)
        node = self._placed(self._graph.create_node(op, target, own_args, own_kwargs))
        if op == "call_module" or (name := op_name(target)) is None or name in DRAWS:
            # numbers are drawn in the order of memory
            node.meta["orders"] = tuple(memory_order(leaf) for leaf in tensors_in((args, kwargs)))
        if not (is_detached and any(result is leaf for leaf in pytree.tree_leaves((args, kwargs)))):
            self._name_parts(node, result)  # else written over without gradients: its own go where they went before
        return result

    def _placed(self, node: fx.Node) -> fx.Node:
        node.meta["layer"] = self._stack[-1] if self._stack else ""
        return node

    def _name_parts(self, node: fx.Node, result: Any) -> None:
        """Say of each tensor of a result which node it is."""
        if isinstance(result, Tensor):
            self._hold(result, node)
        elif isinstance(result, (tuple, list, dict)):
            for key, part in result.items() if isinstance(result, dict) else enumerate(result):
                if _has_tensor(part):
                    self._name_parts(self._placed(self._graph.call_function(operator.getitem, (node, key))), part)
        elif _has_tensor(result):
            self._cannot(f"{node.name} gives a {type(result).__name__}")

    def _detached(self, leaf: Any) -> Any:
        """A tensor's node, without the gradients that it has, or may have in a later call."""
        node = self._argument(leaf)
        may_have = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        return self._placed(self._graph.call_method("detach", (node,))) if may_have else node

    def _argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if self._has_moved(leaf):
            self._cannot(f"a tensor {_MOVED}")
        if id(leaf) in self._nodes:
            return self._nodes[id(leaf)][1]
        name = self._names.get(id(leaf))
        if name is not None:
            node = self._graph.get_attr(name)
            self._tensors[node] = name
        else:
            self._check(leaf)
            if id(leaf) not in self._known:
                self.unknown.append(leaf)
                self._cannot(_UNKNOWN)
            node = self._graph.get_attr(f"constant_{len(self._constants)}")
            self._constants[node] = leaf
        self._hold(leaf, node)
        return node

    def _hold(self, tensor: Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = (tensor, node)
        self._values[node] = tensor
        node.meta["shape"] = tuple(tensor.shape)
        self._memory[id(tensor)] = memory(tensor)

    def _has_moved(self, tensor: Tensor) -> bool:
        """True if a tensor has got other memory since it was recorded, by what torch shows no mode."""
        return self._memory.get(id(tensor), found := memory(tensor)) != found


def _has_tensor(tree: Any) -> bool:
    return isinstance(tree, Tensor) or (type(tree) not in _NO_TREES and bool(tensors_in(tree)))


def _mode_of_torch() -> tuple[Any, ...]:
    """Modes that a ``with`` inside of a forward may change."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast()
