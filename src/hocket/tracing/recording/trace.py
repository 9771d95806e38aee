"""`Trace`: all that was recorded of one step, as the graph and what it stands for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import TreeSpec

from hocket.pystate.appended import AppendedList
from hocket.sinks import Sink
from hocket.tracing.reasons import Reason
from hocket.tracing.recording.batch_reads import BatchGuards
from hocket.tracing.recording.op_arguments import Note
from hocket.tracing.recording.outcomes import Undo
from hocket.tracing.scalars.late import LateTape
from hocket.tracing.scalars.tape import Tape, TapeRef
from hocket.tracing.sources import Entry, Gradient
from hocket.tracing.standing import TensorKind
from hocket.tracing.state import Inventory

_ARRAYS = ("array", "scalar")
_MADE = ("item", "tensor", *_ARRAYS)


@dataclass(frozen=True)
class Result:
    """The values that the step returns, and those that it appends to each list: a tree of two.

    Where it calls sinks or has a late tape, their arguments and its inputs follow.

    Attributes:
        spec: the tree.
        leaves: each with its kind:

            - ``tensor``: the tensor that a node makes
            - ``item``: the number inside of it
            - ``array`` or ``scalar``: the array of numpy's in its memory, or the number in that
            - ``number``: one of the tape
            - ``late``: one of the late tape, whose inputs are the last leaves of the tree
            - ``place``: the object that stands at a source when the step is over, a parameter for example
            - ``value``: a plain value
            - ``again``: the object of an earlier leaf, by its position
        grad_names: of leaves that require a gradient (by position) the name of their autograd node, whose graph the
            step's own backward has used up. Empty for a tensor that is a leaf of autograd itself.
    """

    spec: TreeSpec
    leaves: tuple[tuple[str, Any], ...]
    grad_names: dict[int, str] = field(default_factory=dict)

    def filled(self, computed: Iterable[Any], late: Sequence[Any], stands: Callable[[Any], Any]) -> list[Any]:
        """The leaves: computed ones in their order, those of the late tape, and what `stands` at places."""
        following = iter(computed)
        found: list[Any] = []
        for kind, leaf in self.leaves:
            if kind == "place":
                found.append(stands(leaf))
            elif kind == "late":
                found.append(late[leaf.index])
            elif kind in _ARRAYS:
                array = next(following).numpy()
                found.append(array if kind == "array" else array[()])
            elif kind == "again":
                found.append(found[leaf])
            else:
                found.append(leaf if kind == "value" else next(following))
        return found


@dataclass
class UpdateCall:
    """One call of an optimizer's `step` within the recorded step."""

    optimizer: torch.optim.Optimizer
    gradients: dict[int, fx.Node]  # node of each parameter's gradient when the call began, by the parameter's address
    first: int  # position in `Trace.order` of its first op
    end: int = -1  # position after its last op, or -1 if the call did not finish


@dataclass(frozen=True)
class Trace:
    """A recorded step."""

    graph: fx.Graph  # a placeholder for each of `sources`, and ATen ops
    sources: dict[fx.Node, Any]
    notes: dict[fx.Node, Note]  # facts about each op
    tape: Tape
    result: Result
    # each parameter's gradient at the end: a node, None, or absent if it is unchanged
    gradients: dict[Gradient, fx.Node | None]
    rebound: dict[Entry, fx.Node]  # places that hold another tensor after the step than before
    with_grad: Mapping[Entry, str]  # those of them whose tensor requires a gradient, with the name of its autograd node
    numbers: dict[Entry, TapeRef]  # places whose number changed: the tape entry that computes it
    places: Inventory
    roots: dict[fx.Node, int]
    batch_guards: BatchGuards  # values that the step reads from its batch
    appended: tuple[AppendedList, ...] = ()  # the lists that it appends to
    # places that hold another plain value after the step than before, with that value
    effects: dict[Entry, Any] = field(default_factory=dict)
    # type and layout of the tensor at each source, as it was before the step
    kinds: dict[Any, TensorKind | None] = field(default_factory=dict)
    order: tuple[fx.Node, ...] = ()  # the nodes of ops, in the order in which they ran
    updates: tuple[UpdateCall, ...] = ()  # the calls of optimizers
    sinks: tuple[Sink, ...] = ()  # the sinks that it calls, in order. Their arguments are leaves of the result.
    late: LateTape = field(default_factory=LateTape)  # arithmetic on values of tensors
    # places whose number is computed so, or read from a tensor
    late_numbers: dict[Entry, TapeRef] = field(default_factory=dict)
    undo: Undo | None = None  # what has to be kept in each step, since the step branches on what it computes

    def moved_to(self, node_of: Callable[[fx.Node], Any], **others: Any) -> Trace:
        """The trace of other ops that leave the same values behind, by the node that stands for each of this one's."""
        leaves = tuple((kind, node_of(leaf) if kind in _MADE else leaf) for kind, leaf in self.result.leaves)
        return replace(
            self,
            result=replace(self.result, leaves=leaves),
            gradients={g: None if node is None else node_of(node) for g, node in self.gradients.items()},
            rebound={entry: node_of(node) for entry, node in self.rebound.items()},
            updates=(),
            **others,
        )

    @property
    def left_behind(self) -> list[fx.Node]:
        """The nodes of what it returns, and of what it leaves as gradients and in other places."""
        nodes = [leaf for kind, leaf in self.result.leaves if kind in _MADE]
        return [*nodes, *(n for n in self.gradients.values() if n is not None), *self.rebound.values()]

    @property
    def writes_shared_inputs(self) -> bool:
        """True if inputs share memory that an op writes: what copies of them hold depends on each other."""
        count = Counter(self.roots.values())
        return any(count[root] > 1 for note in self.notes.values() for root in note.writes)


@dataclass(frozen=True)
class Recorded:
    """One recorded step: its result, and its graph."""

    result: Any  # what it returned
    trace: Trace | None  # the step as a graph. None where it cannot be one.
    reason: Reason | None = None  # why not
    # tensors to which the step gave gradients. It can be a graph once these are places of it.
    leaves: tuple[torch.Tensor, ...] = ()
    makes_state: bool = False  # an optimizer has made state, so that a later step may be a graph where this one is none
    batch: Any = None  # as it was before the step, which may have emptied its lists
    # containers in which it has put what stands for numbers or arrays, each with the plain values that may be in it now
    kept: Sequence[tuple[Any, Sequence[Any]]] = ()


def twins_of(before: Mapping[Any, torch.Tensor]) -> Iterator[tuple[Any, Any]]:
    """Pairs of places that hold one tensor: two parameters may have one gradient, which a step adds to twice."""
    first: dict[int, Any] = {}
    for source, tensor in before.items():
        other = first.setdefault(id(tensor), source)
        if other is not source:
            yield other, source
