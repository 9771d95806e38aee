"""Values that a step reads of its batch: known before the step, so a step that branches on them can be captured.

``if attention_mask.all():`` looks into the batch, and into nothing else: no parameter, no state, no random number, and
nothing that the step has written. So it can be looked at before the step is run. While the step is traced, `BatchReads`
notes every op whose arguments come from the batch (and from constants) alone. When the step asks for such a value it
gets the real one, and what led to it becomes a small program, run on each new batch before anything else::

    batch[1] ---> eq ---> all ---> item == True ?      another outcome: the capture does not stand for this batch
    batch[3] ---> sum ---> item ---------------->      a number that is computed with: a leaf of the tape

Which tensors are of that kind is known by their *roots*, the memory they view: memory that is written with anything
else is lost for good, and so is memory from outside the step that the step writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from hocket.tracing.program import Action, Call, Slot, compile_action

# How a number that the step spells out becomes a tensor, and how an array of numpy does.
LIFTING = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)


@dataclass(frozen=True)
class BatchNumber:
    """A leaf of the tape: a number that is read from the batch before each step, the `position`-th of them."""

    position: int


@dataclass(frozen=True)
class _Check:
    """The outcome that later batches must have, or (`number`) a number that is handed to the tape."""

    outcome: Any
    number: bool = False

    def allows(self, outcome: Any) -> bool:
        if self.number:
            return True
        # Text tells 0.0 from -0.0, and NaN is the same text as itself.
        return bool(outcome == self.outcome and outcome != 0) or repr(outcome) == repr(self.outcome)


@dataclass(frozen=True)
class _Noted:
    """One op on values of the batch, with the roots that it reads and writes. A read has a check."""

    call: Call
    reads: frozenset[int]
    writes: frozenset[int]
    made: frozenset[int] = frozenset()
    check: _Check | None = None


@dataclass(frozen=True)
class BatchGuards:
    """Reads of a batch that are made before a step, and their checks."""

    # for each read a function that runs the ops before it, the slot that it reads, and its check
    parts: tuple[tuple[Callable[[list[Any], Any], None], int, _Check], ...] = ()
    template: tuple[Any, ...] = ()  # the initial slots, with constants in their places
    leaves: tuple[tuple[int, int], ...] = ()  # slot and place in the batch of each tensor that is read

    def evaluate(self, batch: Sequence[Any]) -> list[Any] | None:
        """Return the numbers that the tape needs from these leaves of a batch, or None if a guard fails."""
        numbers: list[Any] = []
        if not self.parts:
            return numbers
        values = list(self.template)
        for slot, place in self.leaves:
            values[slot] = batch[place]
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for run, slot, check in self.parts:
                try:
                    run(values, [])
                except (RuntimeError, IndexError, ValueError, TypeError):
                    return None  # eager will say what is wrong with this batch
                if not check.allows(values[slot]):
                    return None
                if check.number:
                    numbers.append(values[slot])
        return numbers


@dataclass
class BatchReads:
    """Watches, during a trace, what depends on the batch and on constants alone."""

    num_reads: int = 0  # how many reads were made so far
    # returns the leaf for an array of the batch, by a tensor with the array's memory, or None
    array_leaf: Callable[[torch.Tensor], torch.Tensor | None] = lambda tensor: None
    _lost: set[int] = field(default_factory=set)
    _made: set[int] = field(default_factory=set)
    _noted: list[_Noted] = field(default_factory=list)
    _slots: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _leaves: list[tuple[int, int]] = field(default_factory=list)
    _constants: dict[int, torch.Tensor] = field(default_factory=dict)
    _count: int = 0
    _numbers: int = 0

    def add_leaf(self, tensor: torch.Tensor, place: int) -> None:
        """Tell which tensor stands at a place of the batch."""
        if tensor not in self._slots:
            self._leaves.append((self._new(tensor), place))

    def lose(self, roots: Iterable[int | None]) -> None:
        """Tell of memory that depends on something else: on parameters, state or random numbers."""
        self._lost.update(root for root in roots if root is not None)

    def knows(self, roots: Iterable[int]) -> bool:
        """Return True if the content of this memory follows from the batch and from constants."""
        return self._lost.isdisjoint(roots)

    def ran(
        self,
        call: tuple[Any, Any, Any],
        result: Any,
        reads: frozenset[int],
        writes: frozenset[int],
        returns: Sequence[int | None],
        random: bool,
    ) -> None:
        """Note one op: function, arguments and keywords, and the roots that it read, wrote and returned.

        What is written to memory from outside is lost, too: a guard may not write there.
        """
        made = frozenset(root for root in returns if root is not None) - reads
        if random or not self.knows(reads | writes) or not writes <= self._made:
            self.lose((*writes, *returns))
            return
        self._made |= made
        func, args, kwargs = self._slotted(call)
        outs: dict[int | None, int] = {}
        if isinstance(result, torch.Tensor):
            outs[None] = self._slot(result)
        elif isinstance(result, (list, tuple)):
            outs = {at: self._slot(value) for at, value in enumerate(result) if isinstance(value, torch.Tensor)}
        self._noted.append(_Noted(Call(func, args, kwargs, outs), reads, writes, made))

    def guard(self, call: tuple[Any, Any, Any], reads: frozenset[int]) -> Any:
        """Return a value that a function reads from tensors of the batch. Later batches must have the same value."""
        return self._read(call, reads, number=False)

    def number(self, call: tuple[Any, Any, Any], reads: frozenset[int]) -> tuple[BatchNumber, Any]:
        """A number that a function finds in tensors of the batch, and where later steps find theirs."""
        found = self._read(call, reads, number=True)
        self._numbers += 1
        return BatchNumber(self._numbers - 1), found

    def guards(self) -> BatchGuards:
        """The program that makes all reads again, without the ops that no read needs."""
        slots: set[int] = set()
        roots: set[int] = set()
        needed: list[_Noted] = []
        varying = self._varying()
        for noted in reversed(self._noted):
            is_read = noted.check is not None and (noted.check.number or not varying.isdisjoint(noted.reads))
            if is_read or slots.intersection(noted.call.outs.values()) or noted.writes & roots:
                needed.append(noted)
                slots.update(noted.call.reads)
                roots |= noted.reads
        parts: list[tuple[Callable[[list[Any], Any], None], int, _Check]] = []
        calls: list[Call] = []
        for noted in reversed(needed):
            calls.append(noted.call)
            if noted.check is not None:
                run = compile_action(Action("batch guard", tuple(calls)))
                parts.append((run, noted.call.outs[None], noted.check))
                calls = []
        template = tuple(self._constants.get(slot) if slot in slots else None for slot in range(self._count))
        return BatchGuards(tuple(parts), template, tuple(leaf for leaf in self._leaves if leaf[0] in slots))

    def _varying(self) -> set[int]:
        """Roots whose content may differ between steps: all but what follows from numbers that the step spells out."""
        spelled_out = {root for noted in self._noted if noted.call.func in LIFTING for root in noted.reads}
        varying = {root for noted in self._noted for root in noted.reads} - self._made - spelled_out
        for noted in self._noted:
            if not varying.isdisjoint(noted.reads):
                varying |= noted.writes | noted.made
        return varying

    def _read(self, call: tuple[Any, Any, Any], reads: frozenset[int], number: bool) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            func, args, kwargs = call
            outcome = func(*args, **kwargs)
        func, args, kwargs = self._slotted(call)
        self._count += 1
        self.num_reads += 1
        noted = Call(func, args, kwargs, {None: self._count - 1})
        self._noted.append(_Noted(noted, reads, frozenset(), check=_Check(outcome, number)))
        return outcome

    def _slotted(self, call: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        func, *arguments = call
        args, kwargs = tree_map_only(torch.Tensor, self._argument, arguments)
        return func, tuple(args), kwargs

    def _argument(self, tensor: torch.Tensor) -> Slot:
        if tensor not in self._slots:
            # Neither of the batch nor made in the trace: the step closes over it.
            self._constants[self._new(tensor)] = tensor
        return Slot(self._slots[tensor])

    def _slot(self, tensor: torch.Tensor) -> int:
        return self._slots[tensor] if tensor in self._slots else self._new(tensor)

    def _new(self, tensor: torch.Tensor) -> int:
        self._slots[tensor] = self._count
        self._count += 1
        return self._count - 1
