"""Watching a step while `make_fx` traces it.

`make_fx` records ATen ops. What a plan needs besides is noted here, op by op, by two modes that stand above its own:

- `ScalarWatch` sees torch functions with their Python arguments, and ties the scalars of the recorded ops to the tape
  of live numbers (see `scalars`);
- `OpWatch` sees every ATen op with real tensors, and notes its phase and layer, which storages it reads, writes and
  returns (views share a storage: their *root*), whether it draws random numbers, and refuses what a graph cannot hold.

Storages from outside the trace are saved before their first write, so that the trace can be undone.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakTensorKeyDictionary

from hocket.capture.scalars import LateFloat, Live, LiveInt, Tape, TapeRef
from hocket.errors import CaptureError

__all__ = ["Note", "OpWatch", "ScalarWatch", "Where", "schedulers_refused", "written_arguments"]

# Kernels that write running statistics (while training) or scratch memory without saying so in their schema.
_UNDECLARED_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::mkldnn_rnn_layer_backward": ("workspace",),
}

# How a number that the step spells out becomes a tensor.
_LIFTING = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)

_REFUSED = {
    "aten::set_": "exchanges the memory of a tensor",
    "aten::resize_": "resizes a tensor in place",
    "aten::resize_as_": "resizes a tensor in place",
}

_SET_ITEM: Any = torch.Tensor.__setitem__

_DATA_DEPENDENT = "depends on values, not only on shapes (data-dependent control flow)"


@dataclass
class Note:
    """What was seen of one recorded op.

    Attributes:
        phase: ``forward``, ``backward`` or ``update``.
        layer: path of the module; of a backward op, that of the forward op it belongs to.
        reads, writes: roots of its tensor arguments.
        returns: root of each returned tensor, in order (None for what is no tensor).
        random: it draws from the default generator.
        grad_mode: gradients were being recorded; some kernels (oneDNN's LSTM) look at that themselves.
        scalars: places in its arguments that are filled from the tape, as paths into (args, kwargs).
    """

    phase: str
    layer: str
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    returns: tuple[int | None, ...] = ()
    random: bool = False
    grad_mode: bool = False
    scalars: dict[tuple[Any, ...], TapeRef] = field(default_factory=dict)


class Where:
    """Which phase and module the step is in, kept by hooks on the user's modules and optimizers."""

    def __init__(self, paths: dict[torch.nn.Module, str], optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        self._stack: list[str] = []
        self._updating = 0
        self._layer_of_sequence: dict[int, str] = {}
        self._handles = []
        for module, path in paths.items():
            self._handles.append(module.register_forward_pre_hook(self._entering(path), prepend=True))
            self._handles.append(module.register_forward_hook(self._leaving(), always_call=True))
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._update_begins))
            self._handles.append(optimizer.register_step_post_hook(self._update_ends))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def here(self) -> tuple[str, str]:
        """Phase and layer of the op that is about to run."""
        node = torch._C._current_autograd_node()
        if self._updating:
            return "update", ""
        if node is not None:
            return "backward", self._layer_of_sequence.get(node._sequence_nr(), "")
        return "forward", self._stack[-1] if self._stack else ""

    def ran(self, layer: str) -> None:
        """Remember which layer the autograd node belongs to that the last forward op made."""
        # An op that makes no node leaves the number where it was; the node belongs to the first op that saw it.
        number: int = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        self._layer_of_sequence.setdefault(number, layer)

    def _entering(self, path: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any) -> None:
            self._stack.append(path)

        return hook

    def _leaving(self) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._stack.pop()

        return hook

    def _update_begins(self, *_: Any) -> None:
        self._updating += 1

    def _update_ends(self, *_: Any) -> None:
        self._updating -= 1


class OpWatch(TorchDispatchMode):
    """Notes every ATen op; stands above the mode of `make_fx`."""

    def __init__(self, where: Where, tape: Tape) -> None:
        super().__init__()
        self.where = where
        self.tape = tape
        self.notes: dict[fx.Node, Note] = {}
        self.saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        # root -> the ops that write it, each with the position of the tensor among those that the op writes
        self.writers: dict[int, list[tuple[fx.Node, int]]] = {}
        self.constants: dict[fx.Node, float] = {}
        self._roots = WeakTensorKeyDictionary()
        self._outside: dict[int, tuple[int, torch.Tensor]] = {}
        self._count = 0
        self._random_state = _random_state()

    def root(self, tensor: torch.Tensor) -> int:
        """The root of a tensor; one that was not seen before comes from outside the trace."""
        known = self._roots.get(tensor)
        if known is None:
            address = tensor.untyped_storage()._cdata
            if address not in self._outside:
                self._outside[address] = (self._fresh(), tensor)
            known = self._roots[tensor] = self._outside[address][0]
        return known

    def undo(self) -> None:
        """Give every storage from outside its content back."""
        for storage, content in self.saved.values():
            storage.copy_(content)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        self._refuse(func, args, kwargs)
        inputs = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        reads = frozenset(self.root(tensor) for tensor in inputs)
        written = [
            tensor
            for value in written_arguments(func, args, kwargs)
            for tensor in tree_iter(value)
            if isinstance(tensor, torch.Tensor)
        ]
        for tensor in written:
            self._save(tensor)
        writes = frozenset(self.root(tensor) for tensor in written)
        phase, layer = self.where.here()
        last = _last_node()
        storages = {tensor.untyped_storage()._cdata: self.root(tensor) for tensor in inputs}
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random:
            self.refuse_rewound(user_line())
        result = func(*args, **kwargs)
        if random:
            self._random_state = _random_state()
        if phase == "forward":
            self.where.ran(layer)
        returns = tuple(self._returned(value, storages) for value in tree_iter(result))
        # A number that becomes a tensor is recorded as an attribute and as the op that copies it.
        recorded = [
            node for node in _nodes_after(last) if node.op == "call_function" and node.target is not operator.getitem
        ]
        for node in recorded:
            # An op that make_fx took apart leaves several nodes; each is taken to do what the whole did.
            self.notes[node] = Note(phase, layer, reads, writes, returns, random, torch.is_grad_enabled())
            for position, tensor in enumerate(written):
                self.writers.setdefault(self.root(tensor), []).append((node, position))
            if func in _LIFTING and result.numel() == 1:
                with torch.utils._python_dispatch._disable_current_modes():
                    self.constants[node] = result.item()
        return result

    def _returned(self, value: Any, storages: dict[int, int]) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        root = storages.get(value.untyped_storage()._cdata)
        self._roots[value] = self._fresh() if root is None else root
        return self._roots[value]

    def _fresh(self) -> int:
        self._count += 1
        return self._count

    def _save(self, tensor: torch.Tensor) -> None:
        root = self.root(tensor)
        storage = tensor.untyped_storage()
        outside = self._outside.get(storage._cdata)
        if outside is not None and outside[0] == root and root not in self.saved:
            with torch.utils._python_dispatch._disable_current_modes():
                self.saved[root] = (storage, storage.clone())

    def refuse_rewound(self, before: str) -> None:
        """Raise if the random state is not what the last random op left: a graph cannot hold that."""
        now = _random_state()
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            rewound = not all(map(torch.equal, now, self._random_state))
        if rewound:
            raise CaptureError(
                f"the step sets the state of the random numbers before {before} (torch.manual_seed, "
                "torch.set_rng_state, or an activation checkpoint with dropout in it); a captured step draws them "
                "one after the other"
            )

    def _refuse(self, func: Any, args: Any, kwargs: Any) -> None:
        name = func._schema.name
        if name in _REFUSED:
            raise CaptureError(f"{name} at {user_line()} {_REFUSED[name]}; a captured step needs fixed memory")
        if kwargs.get("generator") is not None:
            raise CaptureError(f"{name} at {user_line()} draws from a generator of its own; use torch's default one")
        if torch.Tag.data_dependent_output in func.tags:
            raise CaptureError(f"the step at {user_line()} {_DATA_DEPENDENT}: {name} reads a tensor's value")
        dynamic = torch.Tag.dynamic_output_shape in func.tags
        if name == "aten::index":
            dynamic = any(
                isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
            )
        elif name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
            dynamic = False
        if dynamic:
            raise CaptureError(f"the step at {user_line()} makes a shape that {_DATA_DEPENDENT}: {name}")


class ScalarWatch(TorchFunctionMode):
    """Ties scalars of recorded ops to the tape, and answers ``.item()`` where the answer can be followed."""

    def __init__(self, watch: OpWatch, tape: Tape, step_count: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.watch = watch
        self.tape = tape
        self.step_count = step_count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__int__):
            return self._item(args[0], func)
        if func is torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            # `.data` makes its alias where no mode can see it.
            with torch.no_grad():
                return args[0].detach()
        if func in (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.data.__set__):  # type: ignore[attr-defined]
            name = getattr(func, "__name__", "data")
            raise CaptureError(f"the step at {user_line()} takes a tensor out of torch's sight: Tensor.{name}")
        live = [value for value in tree_iter((args, kwargs)) if isinstance(value, (Live, LateFloat))]
        if not live:
            return func(*args, **kwargs)
        last = _last_node()
        if func in (torch.tensor, torch.as_tensor) and isinstance(args[0], Live):
            # A tensor made from a live number has to be made again in every step.
            dtype = kwargs.get("dtype") or (torch.int64 if isinstance(args[0], LiveInt) else torch.get_default_dtype())
            number: Any = args[0]
            result = torch.full((), number, dtype=dtype, device=kwargs.get("device"))
        elif func is _SET_ITEM and isinstance(args[2], Live):
            # So does a number that is put into a tensor.
            number = args[2]
            result = func(*args[:2], torch.full((), number, dtype=args[0].dtype, device=args[0].device))
        else:
            result = func(*args, **kwargs)
        self._tie(func, live, list(_nodes_after(last)))
        return result

    def _item(self, tensor: torch.Tensor, func: Any) -> Any:
        known = self.step_count(tensor)
        if known is not None:
            return known
        if func is not torch.Tensor.item or not tensor.dtype.is_floating_point:
            raise CaptureError(f"the step at {user_line()} {_DATA_DEPENDENT}: it reads a tensor's value")
        with torch.utils._python_dispatch._disable_current_modes():
            late = LateFloat(tensor.item())
        late.tensor = tensor
        late.origin = user_line()
        return late

    def _tie(self, func: Any, live: list[Any], nodes: list[fx.Node]) -> None:
        for value in live:
            if isinstance(value, LateFloat):
                raise CaptureError(
                    f"the step at {value.origin} reads the value of a tensor and computes with it in Python; "
                    "keep it a tensor"
                )
        if not nodes:
            return
        tied: set[int] = set()
        for node in nodes:
            note = self.watch.notes.get(node)
            if note is None:
                continue
            waiting = list(live)
            for path, value in (*_numbers((node.args, node.kwargs), ()), *_defaults(node)):
                match = next((v for v in waiting if v.plain == value), None)
                if match is not None:
                    # The next equal number in this op belongs to the next equal live one, as in a list of rates.
                    waiting.remove(match)
                    tied.add(match.index)
                    note.scalars[path] = TapeRef(match.index)
        for value in live:
            if value.index not in tied:
                name = getattr(func, "__name__", str(func))
                raise CaptureError(
                    f"the step at {user_line()} hands a number that changes between steps to {name}, which "
                    "computes with it before it reaches an op; use a tensor there"
                )


@contextmanager
def schedulers_refused() -> Iterator[None]:
    """While this lasts, a scheduler's `step` in this thread raises a `CaptureError` before it changes anything."""
    here = threading.get_ident()

    def refused(step: Any) -> Any:
        def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here:
                return step(self, *args, **kwargs)  # somebody else's training, beside the one that is captured
            raise CaptureError(
                f"the step at {user_line()} calls the step() of a scheduler ({type(self).__name__}); call it after the "
                "training step, not inside it"
            )

        return refuse

    kinds = [kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and issubclass(kind, LRScheduler)]
    steps = {kind: vars(kind)["step"] for kind in kinds if "step" in vars(kind)}
    try:
        for kind, step in steps.items():
            kind.step = refused(step)  # type: ignore[method-assign]
        yield
    finally:
        for kind, step in steps.items():
            kind.step = step  # type: ignore[method-assign]


def written_arguments(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments that `func` writes, declared or known."""
    schema = func._schema
    undeclared = _UNDECLARED_WRITES.get(schema.name, ())
    for position, argument in enumerate(schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name, True)
        if argument.name == "training" and not given:
            undeclared = ()
    for position, argument in enumerate(schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in undeclared:
            if position < len(args):
                yield args[position]
            elif argument.name in kwargs:
                yield kwargs[argument.name]


def user_line() -> str:
    """``file.py:12`` of the innermost frame that belongs neither to torch nor to us."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(ours) and not name.startswith("<"):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"


def _random_state() -> list[torch.Tensor]:
    with torch.utils._python_dispatch._disable_current_modes():
        states = [torch.get_rng_state()]
        return states + torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else states


def _last_node() -> fx.Node:
    mode = get_proxy_mode()
    assert mode is not None, "no trace is under way"
    return mode.tracer.graph._root._prev


def _nodes_after(last: fx.Node) -> Iterator[fx.Node]:
    node = last._next
    while node.op != "root":
        yield node
        node = node._next


def _defaults(node: fx.Node) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Numbers that the node leaves out because they are the defaults of the op: ``alpha=1``."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        value = argument.default_value
        given = position < len(node.args) or argument.name in node.kwargs
        if not given and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield (1, argument.name), value


def _numbers(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], float]]:
    if isinstance(value, (tuple, list)):
        for position, element in enumerate(value):
            yield from _numbers(element, (*path, position))
    elif isinstance(value, dict):
        for key, element in value.items():
            yield from _numbers(element, (*path, key))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value
