"""Looks at values of inputs: questions that later calls have to answer as the recorded one did.

Most forwards that look at values look at a mask or at lengths, to choose a shorter way::

    if padding_mask.all():      ->   question: all(padding_mask), answers True, True, True, one for each model
        padding_mask = None
    x = x[:, : lengths.max()]   ->   question: max(lengths), answers 12, 12, 9

So a graph stands for the calls in which all questions on a model's way have the answers of the recorded call. A
question is the part of the recorded graph between inputs and look, and is computed for each model, as it was recorded:
a branch on a sum must not depend on rounding. Asked in order, questions lead through a tree to a program, or to a place
where the models have to be recorded once more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

from hocket.fusion.known_functions import memory
from hocket.fusion.program import CANNOT
from hocket.fusion.rules.base import op_name
from hocket.fusion.rules.random import DRAWS
from hocket.fusion.stacked import Stacked
from hocket.fusion.store import Store
from hocket.fusion.traced import Look, Traced
from hocket.fusion.writes import written_by

# Ways through the questions of one kind of call, and recordings on these, from which on models run one by one.
MAX_WAYS, MAX_RECORDINGS = 8, 24
# Stands for the answers of calls that are too many different ones, and of those that cannot be asked.
TOO_MANY, NO_ANSWERS = ("too many",), ("none",)
# Functions that give plain values of tensors, and do nothing else.
ASKING = frozenset(
    "__bool__ __int__ __float__ __index__ __contains__ item tolist equal allclose is_nonzero".split()  # noqa: SIM905
)
# Ops that tell finite numbers from others, and those that join such conditions.
OF_FINITE = frozenset(("isfinite", "isnan", "isinf"))
OF_CONDITIONS = frozenset("all any logical_not logical_or logical_and __or__ __and__ or_ and_ invert".split())  # noqa: SIM905
# More numbers than these are data: no other batch would have them.
MAX_ELEMENTS = 1024


def look_of(
    traced: Traced,
    buffers: Container[str],
    values: Mapping[fx.Node, Tensor],
    asked: Sequence[fx.Node],
    call: tuple[Callable[..., Any], Any],
    result: Any,
) -> tuple[Look, set[fx.Node]] | None:
    """Return a look of a recorded forward, and the ops that lead to it. None if it cannot be asked ahead.

    Args:
        traced: what is recorded so far.
        buffers: names of the model's.
        values: the tensors that nodes stand for.
        asked: nodes of the tensors among the arguments.
        call: a function of torch, and the tree of its arguments.
        result: what it gave.
    """
    if any(node.op == "call_module" or "out" in node.kwargs for node in traced.graph.nodes):
        return None  # they may write anywhere
    used = _leading_to(traced, values, asked)
    if not _is_asked_ahead(traced, buffers, values, used):
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    given: list[Any] = []
    for node in traced.graph.nodes:
        if node not in used:
            continue
        if node.op.startswith("call_"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        copies[node] = graph.placeholder(f"given_{len(given)}")
        known = traced.inputs.get(node, traced.tensors.get(node))
        given.append(traced.constants[node] if known is None else known)
    func, arguments = call
    left = iter(asked)
    args, kwargs = fx.node.map_aggregate(
        arguments, lambda leaf: copies[next(left)] if isinstance(leaf, Tensor) else leaf
    )
    graph.output(graph.call_function(func, args, kwargs))
    writes = {node for node in used if written_by(node, nn.Module().get_submodule) is not None}
    return Look(graph, tuple(given), _key(result)), used - writes


def is_check(node: fx.Node) -> bool:
    """True if running code asks a value only to see that numbers are as they should be, which rounding does not change.

    Those are the validations of `torch.distributions`, ``torch._assert``, and looks for numbers that are not finite.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("hocket.fusion."):
        frame = frame.f_back
    if frame is not None:
        asker = frame.f_globals.get("__name__", "")
        if asker.startswith("torch.distributions.") or (asker, frame.f_code.co_name) == ("torch", "_assert"):
            return True
    ahead = [node]
    while ahead and op_name(ahead[-1].target) in (*OF_FINITE, *OF_CONDITIONS):
        each = ahead.pop()
        ahead += each.all_input_nodes if op_name(each.target) in OF_CONDITIONS else []
    return not ahead


def _leading_to(traced: Traced, values: Mapping[fx.Node, Tensor], asked: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that lead to those that are asked: the givers of their arguments, and what writes into these."""
    nodes, no_blocks = list(traced.graph.nodes), nn.Module().get_submodule
    writes = [(node, target) for node in nodes if (target := written_by(node, no_blocks)) is not None]
    used = set(asked)
    num_before = 0
    while len(used) > num_before:
        num_before = len(used)
        for node in reversed(nodes):
            if node in used:
                used.update(node.all_input_nodes)
        storages = {_storage(values.get(node)) for node in used}
        used.update(node for node, target in writes if _storage(values.get(target)) in storages)
    return used


def _is_asked_ahead(
    traced: Traced, buffers: Container[str], values: Mapping[fx.Node, Tensor], used: set[fx.Node]
) -> bool:
    """True if the nodes `used` give the same where they are computed alone, before the forward, and do nothing else."""
    if any(name not in buffers for node, name in traced.tensors.items() if node in used):
        return False  # it would compute what the model learns twice
    written = [written_by(node, nn.Module().get_submodule) for node in used]
    given = [node for node in traced.graph.nodes if not node.op.startswith("call_")]
    storages = {_storage(values.get(node)) for node in written if node is not None}
    is_apart = storages.isdisjoint({None, *(_storage(values.get(node)) for node in given)})
    return is_apart and not any(op_name(node.target) in DRAWS for node in used)


def _storage(tensor: Tensor | None) -> Any:
    return None if tensor is None or (found := memory(tensor)) is None else found[0]


def _key(answer: Any) -> Any:
    return answer if type(answer) in (bool, int, float) else repr(answer)


class Questions:
    """The questions of one kind of call: for each model, by the answers that lead to them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next: list[dict[tuple[Any, ...], Look]] = [{} for _ in range(store.num_models)]
        self._ways: set[tuple[Any, ...]] = set()
        self._num_recorded = 0

    @property
    def are_too_many(self) -> bool:
        """True if no graph is worth its recording."""
        return len(self._ways) > MAX_WAYS or self._num_recorded > MAX_RECORDINGS

    def answers(self, values: list[Any]) -> tuple[Any, ...]:
        """The way of each model for these leaves of the arguments, as far as it is known."""
        if self.are_too_many:
            return TOO_MANY
        known: dict[Any, Any] = {}
        try:
            with torch.no_grad():
                return tuple([self._way(index, values, known) for index in range(len(self._next))])
        except CANNOT:
            return NO_ANSWERS  # of arguments that a forward cannot take either: it says so by its own line

    def _way(self, index: int, values: list[Any], known: dict[Any, Any]) -> tuple[Any, ...]:
        found: tuple[Any, ...] = ()
        while (look := self._next[index].get(found)) is not None:
            given = [self._given(each, index, values) for each in look.given]
            key = (id(look), *map(id, given))
            if key not in known:
                known[key] = _key(look.ask(given)), given  # held, so that their addresses stay theirs
            found = (*found, known[key][0])
        return found

    def _given(self, what: Any, index: int, values: list[Any]) -> Tensor:
        """A leaf by its number, a buffer by its name, or a constant."""
        found = values[what] if isinstance(what, int) else self._store.tensor(what) if isinstance(what, str) else what
        return found.parts()[index] if isinstance(found, Stacked) else found

    def learn(self, looks: Sequence[tuple[Look, ...]]) -> tuple[Any, ...]:
        """Take in the looks of each model in one recorded call. Return their answers."""
        ways = []
        for index, own in enumerate(looks):
            found: tuple[Any, ...] = ()
            for look in own:
                others = [each[found] for each in self._next[:index] if found in each and each[found].is_like(look)]
                self._next[index].setdefault(found, others[0] if others else look)
                found = (*found, look.answer)
            ways.append(found)
        self._ways.add(tuple(ways))
        self._num_recorded += 1
        return TOO_MANY if self.are_too_many else tuple(ways)
