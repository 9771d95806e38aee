"""Records the ATen ops of a step while they run for real: an fx graph, and what a plan needs besides.

A dispatch mode below autograd sees every op of forward, backward and update. Each becomes a node of the graph, and a
`Note`: the phase and the layer, which storages the op reads, writes and returns (views share a storage: their *root*),
and whether it draws random numbers. Nothing is changed and nothing is raised: what a graph cannot hold is a reason, and
from then on ops run as if the recorder were not there. `function_recorder` looks at the same ops from above, as torch
functions with Python arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from hocket.heap import HeapTrimmer
from hocket.pystate.origins import user_line
from hocket.tracing.program import map_leaves
from hocket.tracing.raising import is_foreign, is_other_branch, may_raise
from hocket.tracing.recording.batch_reads import LIFTING, BatchReads
from hocket.tracing.recording.data_reads import QUESTIONS, reads_value, shape_reads, shaped_by_values
from hocket.tracing.recording.held import Leaf
from hocket.tracing.recording.module_tracker import ModuleTracker
from hocket.tracing.recording.numpy_calls import CALL_NUMPY, key_of
from hocket.tracing.recording.op_arguments import (
    Layout,
    Note,
    fake_of,
    has_size,
    layout_of,
    tensors_in,
    with_plain_numbers,
    written_arguments,
)
from hocket.tracing.recording.ties import tie
from hocket.tracing.scalars.live import Live
from hocket.tracing.scalars.tape import Tape
from hocket.tracing.sources import Constant, Entry

_MOVES_MEMORY = frozenset(("aten::set_", "aten::resize_", "aten::resize_as_"))


class OpRecorder(TorchDispatchMode):
    """Records every ATen op that runs while it is entered.

    Args:
        where: which phase and layer an op belongs to.
        tape: of the step's numbers. The recorder shares its reasons.
        plain_numbers: puts plain numbers in the places of live ones while its block lasts.
        effects_now: returns the values that the step has put in places of Python's so far.
        generators: those besides torch's default one that ops may draw from.
    """

    supports_higher_order_operators = True  # they come to `__torch_dispatch__`, which refuses them

    def __init__(
        self,
        where: ModuleTracker,
        tape: Tape,
        plain_numbers: Callable[[], AbstractContextManager[None]] = nullcontext,
        effects_now: Callable[[], dict[Any, Any]] = dict,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        super().__init__()
        self.where = where
        self.tape = tape
        self.reasons = tape.reasons
        self.batch = BatchReads()  # values that depend on the batch alone
        self.graph = fx.Graph()  # the ops, in the order in which they ran
        self.notes: dict[fx.Node, Note] = {}  # facts about each op
        self.order: list[fx.Node] = []  # the nodes of ops, in the same order
        self.sources: dict[fx.Node, Any] = {}  # the source of each node that is not an op
        self.roots: dict[fx.Node, int] = {}  # the memory of each of these nodes
        # root -> the ops that write it, each with the position of the tensor among those that the op writes
        self.writers: dict[int, list[tuple[fx.Node, int]]] = {}
        self.outside: dict[int, torch.Tensor] = {}  # by root a tensor of memory that there was before the step
        self.given: dict[Entry, torch.Tensor] = {}  # places whose tensors have got other memory, with that of before
        self._source_of: dict[int, Any] = {}  # by the address of a tensor, which the recording holds
        # outcome of ``bool(tensor)`` as every later step must find it. None where it cannot be followed.
        self.outcome_of: Callable[[torch.Tensor], bool | None] = lambda tensor: None
        # True if the user's step may catch what the op raises that runs next. The step can be undone then.
        self.may_undo: Callable[[], bool] = lambda: False
        self.constants: dict[fx.Node, float] = {}
        self.rest: ExitStack | None = None  # of the step, which may be left alone
        self.leaves: list[Leaf] = []  # trainable tensors from elsewhere, as they were when the step met them
        # number of an autograd node -> live numbers that it may have kept, and True if it computes with no others
        self.numbers_kept: dict[int, tuple[list[Live], bool]] = {}
        self._nodes = WeakTensorKeyDictionary()
        # A weak reference keeps the address of a storage from being used again, and not its memory.
        self._root_of: dict[int, tuple[int, StorageWeakRef]] = {}
        self.layouts: dict[fx.Node, Any] = {}
        self._plain_numbers = plain_numbers
        self._effects_now = effects_now
        self.undoes = False  # `undo` is called after the step. Without, only single numbers are saved.
        # storages from outside that the step has written, by address, with copies of what they held
        self.saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.generators = tuple(generators)
        self._random_state = self._random_states()
        self._heap = HeapTrimmer()

    # -------------------------------------------------------------------------------------- before and after a step

    def add_source(self, source: Any, tensor: torch.Tensor) -> fx.Node:
        """A tensor that is there before the step."""
        return self._from_outside("placeholder", f"source_{len(self.sources)}", source, tensor)

    def _from_outside(self, kind: str, name: str, source: Any, tensor: torch.Tensor) -> fx.Node:
        node = self.graph.create_node(kind, name, (), {})
        self.sources[node] = source
        self._source_of[id(tensor)] = source
        self.roots[node] = self._root(tensor, outside=True)
        self._nodes[tensor] = node
        self.layouts[node] = layout_of(tensor)
        return node

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node that made a tensor, or a constant if the step has it from elsewhere."""
        node = self._nodes.get(tensor)
        return self._constant(tensor) if node is None else node

    def _given(self, arguments: Any) -> tuple[Any, frozenset[int]]:
        """Arguments with nodes in place of tensors, and the memory of these."""
        given = map_leaves(arguments, lambda leaf: self.node_of(leaf) if isinstance(leaf, torch.Tensor) else leaf)
        return given, frozenset(map(self.root, tensors_in(arguments)))

    def number(self, func: Any, tensor: torch.Tensor) -> tuple[Any, Any]:
        """The source of a number that `func` reads from a tensor of the batch, and the number."""
        return self.batch.number((func, (tensor,), {}), *self._given(((tensor,), {})))

    def root(self, tensor: torch.Tensor) -> int:
        """The memory of a tensor, as a number."""
        return self._root(tensor, outside=self._nodes.get(tensor) is None)

    def writers_of(self, tensor: torch.Tensor) -> list[tuple[fx.Node, int]]:
        """The ops that have written the memory of a tensor, a list which grows."""
        with torch._C.DisableTorchFunction():
            return self.writers.setdefault(self.root(tensor), [])

    def stand_for(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """Let a tensor in memory of its own be what an op has returned."""
        storage = tensor.untyped_storage()
        self._root_of[storage._cdata] = (self.root(result), StorageWeakRef(storage))
        self._nodes[tensor] = self.node_of(result)

    def name_alike(self, made: torch.Tensor, data: torch.Tensor) -> None:
        """Note that a tensor is another one by a different name, or in a different class."""
        with torch._C.DisableTorchFunction():
            # Fake tensors are made of meta tensors, which are no values of the step.
            if not self.reasons and data.layout is torch.strided and data.device.type != "meta":
                if made.requires_grad and self.root(data) in self.outside:
                    self.leaves.append(Leaf(made))
                self._nodes[made] = self.node_of(data)

    def give_memory(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        """Note that `tensor` is about to get the memory of `new`, which the step has made."""
        node, made = self._nodes.get(tensor), self._nodes.get(new)
        entry = self._source_of.get(id(tensor))
        is_own = node is not None and self.root(tensor) not in self.outside  # the step has made it, too
        fits = made is not None and layout_of(tensor) == layout_of(new) and self.root(new) not in self.outside
        if not fits or not (is_own or (isinstance(entry, Entry) and tensor.is_cpu)):
            return self.reasons.add("replaces memory")
        if isinstance(entry, Entry):
            self.given.setdefault(entry, tensor.data)
        self._nodes[tensor] = made

    def undo(self) -> None:
        """Give every storage from outside its content back."""
        for entry, memory in self.given.items():
            entry.get().data = memory
        for storage, content in self.saved.values():
            storage.copy_(content)

    def finish(self) -> None:
        """Give each node the shape of its value, on fake tensors, as ``meta["val"]``."""
        made: dict[Layout, Any] = {}
        with FakeTensorMode(allow_fallback_kernels=True):
            for node, layout in self.layouts.items():
                node.meta["val"] = fake_of(layout, made)

    def leave(self, kind: str, subject: str) -> None:
        """Note a reason for which the rest of the step is not to be looked at, and look away."""
        self.reasons.add(kind, subject)
        if self.rest is not None and torch._C._len_torch_dispatch_stack() == 1:  # else the user has a mode of his own
            self.rest.enter_context(_disable_current_modes())

    def refuse_rewound(self, before: str) -> None:
        """Note a reason if the random state is not what the last random op left: a graph cannot hold that."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if not all(map(torch.equal, self._random_states(), self._random_state)):
                self.reasons.add("sets random state", line=before)

    # ---------------------------------------------------------------------------------------------- during a step

    def read(self, func: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the Python value that `func` reads from tensors. If these follow from the batch, it is guarded."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            given, roots = self._given((args, kwargs))
            if self.batch.knows(roots):
                return self.batch.read((func, args, kwargs), given, roots)
            if func in QUESTIONS:
                with self:
                    outcome = self.outcome_of(QUESTIONS[func](*args, **kwargs))
                if outcome is not None:
                    return outcome
            name = getattr(func, "_schema", func)
            self.reasons.add("reads a value", getattr(name, "name", getattr(name, "__name__", name)))
            with _disable_current_modes():
                return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs, live = with_plain_numbers(args, kwargs or {})
        if isinstance(func, torch._ops.HigherOrderOperator):
            self.reasons.add("calls functions", func)
            return func(*args, **kwargs)
        if self.reasons or func.namespace == "profiler":
            for tensor in tensors_in(list(written_arguments(func, args, kwargs))):
                self._save(tensor)
            return func(*args, **kwargs)
        # Operations on tensors here are hidden from the mode that sees torch functions.
        with torch._C.DisableTorchFunction():
            if reads_value(func):
                return self.read(func, args, kwargs)
            if func in LIFTING:
                func = LIFTING[0]  # what a step spells out is another tensor in each, which may be written or returned
            self._refuse(func, args, kwargs)
            return func(*args, **kwargs) if self.reasons else self._recorded(func, args, kwargs, live)

    def _recorded(self, func: Any, args: Any, kwargs: Any, live: list[Live]) -> Any:
        if func is CALL_NUMPY:
            args = (args[0], key_of(args[1]))  # the dispatcher has made plain text of it
        given, reads = self._given((args, kwargs))
        written = list(tensors_in(list(written_arguments(func, args, kwargs))))
        for tensor in written:
            self._save(tensor)
        writes = frozenset(self.root(tensor) for tensor in written)
        phase, layer = self.where.here()
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random:
            self.refuse_rewound(user_line())
        is_torchs = not is_foreign(func)
        can_raise = not is_torchs or may_raise(func.__name__.partition(".")[0])
        is_undone = is_other_branch(args) or (can_raise and self.may_undo())
        effects = self._effects_now() if can_raise and not is_undone else {}
        plain = nullcontext() if is_torchs else self._plain_numbers()  # a kernel of the user's reads them in every step
        with plain, self.reasons.of_error(func) if can_raise else nullcontext():
            result = func(*args, **kwargs)
        if random:
            self._random_state = self._random_states()
        if phase == "forward":
            self.where.ran(layer)
        made = list(result) if isinstance(result, (list, tuple)) else [result] * isinstance(result, torch.Tensor)
        returns = tuple(self._returned(value) for value in made)
        if self.reasons:
            return result
        self._heap.made(sum(value.nbytes for value in made if isinstance(value, torch.Tensor)))
        node = self.graph.create_node("call_function", func, *given)
        self.order.append(node)
        facts = (phase, layer, reads, writes, returns, random, torch.is_grad_enabled())
        self.notes[node] = Note(*facts, effects_before=effects, is_undone=is_undone)
        self.batch.ran(node, self.notes[node])
        for position, tensor in enumerate(written):
            self.writers.setdefault(self.root(tensor), []).append((node, position))
        if isinstance(result, torch.Tensor):
            self.layouts[node] = layout_of(result)
            self._nodes[result] = node
        else:
            self.layouts[node] = [layout_of(v) if isinstance(v, torch.Tensor) else None for v in made]
            for position, value in enumerate(made):
                if isinstance(value, torch.Tensor):
                    taken = self.graph.create_node("call_function", operator.getitem, (node, position))
                    self.layouts[taken] = self.layouts[node][position]
                    self._nodes[value] = taken
        if func in LIFTING and result.numel() == 1 and result.layout is torch.strided:
            with _disable_current_modes():
                self.constants[node] = result.item()
        self._tie_kept(node)
        if live:
            # They came out of the sight of torch functions.
            tie(node, self.notes[node].scalars, live, self.tape)
            self.batch.lose((*returns, *writes))
        return result

    def _tie_kept(self, node: fx.Node) -> None:
        """Tie numbers that autograd kept for this op, and settle those that it computes with in another way."""
        running = torch._C._current_autograd_node()
        kept = self.numbers_kept.get(running._sequence_nr()) if running is not None else None
        if not kept or not kept[0]:
            return
        live, is_known = kept
        if torch.is_grad_enabled():
            # A backward that is itself differentiated: the op's own node keeps the numbers, too.
            self.numbers_kept[torch.autograd._get_sequence_nr() - 1] = kept  # type: ignore[attr-defined]
        note = self.notes[node]
        _, others = tie(node, note.scalars, live, self.tape)
        if others and not is_known:
            for number in live:
                self.tape.settle(number)
            note.scalars.clear()
        elif note.scalars:
            self.batch.lose((*note.returns, *note.writes))

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        """A tensor that the step has from elsewhere: a closure, a number that it spells out."""
        address = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
        root, _ = self._root_of.get(address, (None, None))
        if root is not None and root not in self.outside:
            if (view := self._view(tensor, root)) is not None:
                return view
            self.reasons.add("shares memory unseen", f"of shape {tuple(tensor.shape)}")
        if tensor.requires_grad and tensor.is_leaf:
            self.leaves.append(Leaf(tensor))
        name = f"constant_{len(self.sources)}"
        return self._from_outside("get_attr", name, Constant(name, tensor), tensor)

    def _view(self, tensor: torch.Tensor, root: int) -> fx.Node | None:
        """A view that was made out of sight (by `torch.func`), of what an op has returned."""
        for node in reversed(self.order if not tensor.is_complex() else ()):
            layout = self.layouts[node]
            if root in self.notes[node].returns and isinstance(layout, tuple) and layout[2] is tensor.dtype:
                place = (node, list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
                view = self.graph.create_node("call_function", torch.ops.aten.as_strided.default, place)
                self.order.append(view)
                self.notes[view] = Note(*self.where.here(), frozenset((root,)), returns=(root,))
                self.layouts[view], self._nodes[tensor] = layout_of(tensor), view
                self.batch.ran(view, self.notes[view])
                return view
        return None

    def _root(self, tensor: torch.Tensor, outside: bool = False) -> int:
        if tensor.layout is not torch.strided:
            self.reasons.add("uses a layout", tensor.layout)
            return -1
        storage = tensor.untyped_storage()
        known = self._root_of.get(storage._cdata)
        if known is None:
            known = self._root_of[storage._cdata] = (len(self._root_of) + 1, StorageWeakRef(storage))
            if outside:
                self.outside[known[0]] = tensor
        return known[0]

    def _returned(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (list, tuple)) and any(True for _ in tensors_in(value)):
                self.reasons.add("returns unseen", "list of lists of tensors from an op")
            return None
        if value.layout is not torch.strided or value.is_nested:
            self.reasons.add("uses a layout", "nested" if value.is_nested else value.layout)
            return None
        return self._root(value)

    def _save(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        known = self._root_of.get(storage._cdata)
        is_needed = self.undoes or storage.nbytes() <= 8  # a count of an optimizer's (see `StepCounts`)
        if is_needed and storage._cdata not in self.saved and (known is None or known[0] in self.outside):
            with _disable_current_modes():
                self.saved[storage._cdata] = (storage, storage.clone())

    def _refuse(self, func: Any, args: Any, kwargs: Any) -> None:
        name = func._schema.name
        if name in _MOVES_MEMORY and not has_size(name, *args, **kwargs):
            self.reasons.add("moves memory", name)
        elif not self._is_followed(kwargs.get("generator")):
            self.reasons.add("draws from a generator", name)
        elif shaped_by_values(func, args, kwargs) and not self._is_shape_known(func, args, kwargs):
            self.reasons.add("makes a shape of values", name)

    def _is_followed(self, generator: torch.Generator | None) -> bool:
        """True of generators whose state is known. An op is given another object of the same generator."""
        known = (torch.default_generator, *self.generators)
        return generator is None or any(generator._cdata == each._cdata for each in known)  # type: ignore[attr-defined]

    def _random_states(self) -> list[torch.Tensor]:
        with _disable_current_modes():
            states = [each.get_state() for each in (torch.default_generator, *self.generators)]
            return states + torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else states

    def _is_shape_known(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return True if the shape of the op's result follows from the batch. Later batches must have the same."""
        calls = [(call, *self._given(call[1:])) for call in shape_reads(func, args, kwargs)]
        known = not (func._schema.is_mutable or is_foreign(func)) and all(self.batch.knows(each[2]) for each in calls)
        for each in calls if known else ():
            self.batch.read(*each)
        return known
