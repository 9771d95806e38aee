"""Watching a step while `make_fx` traces it: every ATen op, with real tensors.

`make_fx` records ATen ops. What a plan needs besides is noted here, op by op, by a mode that stands above its own: the
phase and the layer, which storages the op reads, writes and returns (views share a storage: their *root*), and whether
it draws random numbers. What a graph cannot hold is refused. `function_recorder` looks at the same ops from above, as
torch functions with Python arguments.

Storages from outside the trace are saved before their first write, so that the trace can be undone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakTensorKeyDictionary

from hocket.heap import HeapTrimmer
from hocket.tracing.recording.batch_reads import LIFTING, BatchReads
from hocket.tracing.recording.data_reads import reads_value, shaped_by_values
from hocket.tracing.recording.module_tracker import ModuleTracker
from hocket.tracing.recording.ties import tie
from hocket.tracing.refusals import Refusals, refusal, schedulers_refused, user_line
from hocket.tracing.scalars.live import Live
from hocket.tracing.scalars.tape import Tape, TapeRef

__all__ = [
    "DATA_DEPENDENT",
    "Note",
    "OpRecorder",
    "last_node",
    "nodes_after",
    "schedulers_refused",
    "written_arguments",
]

# Kernels that write running statistics (while training) or scratch memory without saying so in their schema.
_UNDECLARED_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::mkldnn_rnn_layer_backward": ("workspace",),
}

_REFUSED = {
    "aten::set_": "exchanges the memory of a tensor",
    "aten::resize_": "resizes a tensor in place",
    "aten::resize_as_": "resizes a tensor in place",
}

DATA_DEPENDENT = "depends on values, not only on shapes (data-dependent control flow)"


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


class OpRecorder(TorchDispatchMode):
    """Notes every ATen op; stands above the mode of `make_fx`."""

    def __init__(self, where: ModuleTracker, tape: Tape, refusals: Refusals) -> None:
        super().__init__()
        self.where = where
        self.tape = tape
        self.refusals = refusals
        self.batch = BatchReads()
        self.notes: dict[fx.Node, Note] = {}
        self.saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        # root -> the ops that write it, each with the position of the tensor among those that the op writes
        self.writers: dict[int, list[tuple[fx.Node, int]]] = {}
        self.constants: dict[fx.Node, float] = {}
        # number of an autograd node -> live numbers that its call was given, and that it may have kept
        self.numbers_kept: dict[int, list[Live]] = {}
        self._roots = WeakTensorKeyDictionary()
        self._outside: dict[int, tuple[int, torch.Tensor]] = {}
        self._count = 0
        self._random_state = _random_state()
        self._heap = HeapTrimmer()

    def root(self, tensor: torch.Tensor) -> int:
        """The root of a tensor; one that was not seen before comes from outside the trace."""
        known = self._roots.get(tensor)
        if known is None:
            if tensor.layout is not torch.strided:
                raise refusal(f"the step at {user_line()} uses a tensor whose layout is {tensor.layout}, not strided")
            address = tensor.untyped_storage()._cdata
            if address not in self._outside:
                self._outside[address] = (self._fresh(), tensor)
            known = self._roots[tensor] = self._outside[address][0]
        return known

    def undo(self) -> None:
        """Give every storage from outside its content back."""
        for storage, content in self.saved.values():
            storage.copy_(content)

    def read(self, func: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The Python value that `func` finds in tensors of the batch; a guard on later batches.

        Raises:
            CaptureError: it depends on more than the batch.
        """
        with torch._C.DisableTorchFunction():
            roots = self._roots_in((args, kwargs))
        if not self.batch.knows(roots):
            name = getattr(func, "_schema", func)
            raise refusal(
                f"the step at {user_line()} {DATA_DEPENDENT}: {getattr(name, 'name', name)} reads a tensor's value"
            )
        return self.batch.guard((func, args, kwargs or {}), roots)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What we and make_fx do with the tensors is not for the mode that looks at torch functions.
        with torch._C.DisableTorchFunction():
            if func.namespace == "profiler":
                return func(*args, **(kwargs or {}))
            self.refusals.check()
            if reads_value(func):
                return self.read(func, args, kwargs)
            self._refuse(func, args, kwargs or {})
            return self._noted(func, args, kwargs or {})

    def _noted(self, func: Any, args: Any, kwargs: Any) -> Any:
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
        last = last_node()
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
        self._heap.made(sum(value.nbytes for value in tree_iter(result) if isinstance(value, torch.Tensor)))
        self.batch.ran((func, args, kwargs), result, reads, writes, returns, random)
        # A number that becomes a tensor is recorded as an attribute and as the op that copies it.
        recorded = [
            node for node in nodes_after(last) if node.op == "call_function" and node.target is not operator.getitem
        ]
        for node in recorded:
            # An op that make_fx took apart leaves several nodes; each is taken to do what the whole did.
            self.notes[node] = Note(phase, layer, reads, writes, returns, random, torch.is_grad_enabled())
            for position, tensor in enumerate(written):
                self.writers.setdefault(self.root(tensor), []).append((node, position))
            if func in LIFTING and result.numel() == 1:
                with _disable_current_modes():
                    self.constants[node] = result.item()
        self._tie_kept(recorded)
        return result

    def _tie_kept(self, recorded: list[fx.Node]) -> None:
        """Tie numbers that autograd kept for this op; settle them where it computes with something else."""
        running = torch._C._current_autograd_node()
        live = self.numbers_kept.get(running._sequence_nr()) if running is not None else None
        if not live:
            return
        if torch.is_grad_enabled():
            # A backward that is itself differentiated: the op's own node keeps the numbers, too.
            self.numbers_kept[torch.autograd._get_sequence_nr() - 1] = live  # type: ignore[attr-defined]
        for node in recorded:
            note = self.notes[node]
            _, others = tie(node, note.scalars, live, self.tape)
            if others:
                for number in live:
                    self.tape.settle(number)
                note.scalars.clear()
            elif note.scalars:
                self.batch.lose((*note.returns, *note.writes))

    def _roots_in(self, arguments: Any) -> frozenset[int]:
        return frozenset(self.root(value) for value in tree_iter(arguments) if isinstance(value, torch.Tensor))

    def _returned(self, value: Any, storages: dict[int, int]) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        if value.layout is not torch.strided or value.is_nested:
            raise refusal(f"the step at {user_line()} makes a sparse or nested tensor, which a plan does not know")
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
            with _disable_current_modes():
                self.saved[root] = (storage, storage.clone())

    def refuse_rewound(self, before: str) -> None:
        """Raise if the random state is not what the last random op left: a graph cannot hold that."""
        now = _random_state()
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            rewound = not all(map(torch.equal, now, self._random_state))
        if rewound:
            raise refusal(
                f"the step sets the state of the random numbers before {before} (torch.manual_seed, "
                "torch.set_rng_state, or an activation checkpoint with dropout in it); a captured step draws them "
                "one after the other"
            )

    def _refuse(self, func: Any, args: Any, kwargs: Any) -> None:
        name = func._schema.name
        if name in _REFUSED:
            raise refusal(f"{name} at {user_line()} {_REFUSED[name]}; a captured step needs fixed memory")
        if kwargs.get("generator") is not None:
            raise refusal(f"{name} at {user_line()} draws from a generator of its own; use torch's default one")
        if shaped_by_values(func, args, kwargs):
            raise refusal(f"the step at {user_line()} makes a shape that {DATA_DEPENDENT}: {name}")


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


def last_node() -> fx.Node:
    """The node that `make_fx` recorded last."""
    mode = get_proxy_mode()
    assert mode is not None, "no trace is under way"
    return mode.tracer.graph._root._prev


def nodes_after(last: fx.Node) -> Iterator[fx.Node]:
    """The nodes that were recorded after `last`."""
    node = last._next
    while node.op != "root":
        yield node
        node = node._next


def _random_state() -> list[torch.Tensor]:
    with _disable_current_modes():
        states = [torch.get_rng_state()]
        return states + torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else states
