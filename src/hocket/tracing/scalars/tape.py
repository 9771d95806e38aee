"""Numbers that change between steps: learning rates, step counts, bias corrections.

The classic bug of a captured step is a learning rate or a step count that was baked in. Here every Python number that
an optimizer keeps (in its parameter groups, or in its state) is replaced, while the step is recorded, by a number that
has its true value and remembers how it was computed (see `live`). The arithmetic that leads from the numbers of the
optimizer to the scalars of its update ops is thereby written on a `Tape`, and replayed before each planned step in the
same Python floats as eager uses::

    group["lr"] ----.                         tape                        graph
    group["betas"] --+--> lr / (1 - b1 ** t) ------> addcdiv_(p, m, d, value=<tape 7>)
    state["step"] --'

A comparison (``if weight_decay != 0``) becomes a *guard*: should it turn out differently later, another capture is
needed. A leaf is *unproven* until a step with another value of it was compared with eager: what was baked in out of
sight shows then, and not before.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hocket.pystate.origins import user_line
from hocket.tracing.reasons import Reasons
from hocket.tracing.scalars.live import Live, computed, wrap
from hocket.tracing.scalars.plain import replace_by_plain
from hocket.tracing.sources import ItemOf

_INFIX = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.pow: "**"}
_Evaluate = Callable[[Sequence[Any]], list[Any] | None]


@dataclass(frozen=True)
class TapeRef:
    """An entry of a tape. Among the arguments of an op it stands for its number in each step."""

    index: int


@dataclass
class Tape:
    """A straight-line program over numbers: leaves first read, then arithmetic, then guards checked."""

    # ``entries[i]`` is either a leaf ``(None, number of the leaf)`` or ``(function, operands)``, where an operand is a
    # `TapeRef` or a plain number
    entries: list[tuple[Callable[..., Any] | None, Any]] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)  # the source of each leaf
    guards: list[tuple[int, Any]] = field(default_factory=list)  # entries with the outcome that every step must find
    # the value of each leaf when the step was recorded. Later values have the same type.
    found: list[float] = field(default_factory=list)
    # leaves that have had no other value yet in a step that was compared with eager
    unproven: set[int] = field(default_factory=set)
    trusting: bool = False  # leaves may have any value, since the step is compared with eager
    # entries whose value is guarded itself. They are constants of the recording.
    settled: set[int] = field(default_factory=set)
    handed_out: list[weakref.ref[Any]] = field(default_factory=list, repr=False)  # every number that the step was given
    # lists and arrays in which it has looked up numbers, each with the position
    looked_up: list[tuple[Any, Live]] = field(default_factory=list, repr=False)
    closed: bool = False  # the recording is over, and live numbers that outlive it compute like plain ones
    reasons: Reasons = field(default_factory=Reasons, repr=False)  # reasons why the step cannot be captured
    follows: bool = True  # leaves are live. Otherwise each is a plain number that must be the same in later steps.
    # the user's line of each guarded entry
    lines: dict[int, str] = field(default_factory=dict, repr=False, compare=False)
    _plain: list[Any] = field(default_factory=list)
    _known: dict[Any, int] = field(default_factory=dict)
    _guarded: set[Any] = field(default_factory=set)
    _compiled: tuple[tuple[int, int], _Evaluate] | None = field(default=None, repr=False, compare=False)

    def leaf(self, source: Any, value: Any, *, is_seen: bool = True) -> Any:
        """A number with this value that is read from `source` at the start of every step.

        It is live, unless it is seen by the user's code and the tape does not follow.
        """
        self.unproven.add(len(self.leaves))
        self.leaves.append(source)
        self.found.append(value)
        self.entries.append((None, len(self.leaves) - 1))
        self._plain.append(value)
        number = wrap(self, len(self.entries) - 1, value)
        return number if self.follows or not is_seen else self.settle(number)

    def apply(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Apply `function` now, and note it for every later step.

        A result that is no int or float is plain, and later steps must have the same operands.
        """
        result = computed(function, operands, self._value)
        if result is NotImplemented or self.closed:
            return result
        if type(result) is bool or not isinstance(result, (int, float)):
            for operand in operands:
                if isinstance(operand, Live):
                    self.settle(operand)
            return result
        return wrap(self, self._note(function, operands, result), result)

    def guard(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Apply `function` now. Later steps must find the same outcome."""
        outcome = computed(function, operands, self._value)
        if outcome is not NotImplemented and not self.closed:
            self._guard(self._note(function, operands, outcome), outcome)
        return outcome

    def settle(self, number: Live) -> Any:
        """The plain value of a number that leaves our sight: later steps must find the same value."""
        value = number.plain
        if not self.closed:
            if value == 0 or value != value:
                self.guard(repr, number)  # 0.0 equals -0.0, and NaN does not equal itself
            else:
                self._guard(number.entry, value)
            self.settled.add(number.entry)
        return value

    def settle_text(self) -> None:
        """Later steps must find the same text: the step may have read it out of our sight."""
        for index, (function, leaf) in enumerate(self.entries):
            if function is None and isinstance(self.found[leaf], str):
                self._guard(index, self.found[leaf])

    def constant(self, value: Any) -> TapeRef:
        """The entry of a plain number that is the same in every step."""
        return TapeRef(self._note(_itself, (value,), value))

    def evaluate(self, leaves: Sequence[float]) -> list[Any] | None:
        """The value of every entry for these leaves, or None where a guard turned out differently."""
        size = (len(self.entries), len(self.guards))
        if self._compiled is None or self._compiled[0] != size:
            self._compiled = (size, _compiled(self))
        return self._compiled[1](leaves)

    def why_not(self, leaves: Sequence[float] | None) -> str:
        """Why a step with these values of the leaves cannot be made. None stands for leaves of other types."""
        if leaves is None:
            return "a number that the step uses is of another type"
        for guard in self.guards:
            if _compiled(Tape(self.entries, self.leaves, [guard]))(leaves) is None:
                sources = [self.leaves[leaf] for leaf in self.leaves_of(guard[0])]
                names = ", ".join(sorted({getattr(source, "name", "in its batch") for source in sources}))
                what = f"a number that it branches on, or hands to code that no plan follows, has changed ({names})"
                line = f" at {self.lines[guard[0]]}" if guard[0] in self.lines else ""
                is_state = any(isinstance(source, ItemOf) for source in sources)
                settled = ", or run eager steps before the capture until it stays" if is_state else ""
                return f"{what}{line}: do that outside the step, and pass what it gives{settled}"
        return "a number has a value with which the plan was not compared with eager"

    @property
    def asked(self) -> frozenset[int]:
        """The leaves that must have the value that they were recorded with."""
        return frozenset() if self.trusting else frozenset(self.unproven)

    def moved(self, leaves: Sequence[float]) -> set[int]:
        """The unproven leaves that have another value here than they were recorded with."""
        return {leaf for leaf in self.unproven if repr(leaves[leaf]) != repr(self.found[leaf])}

    @contextmanager
    def trusted(self) -> Iterator[None]:
        """Let steps run in the block whose unproven leaves have moved: they are compared with eager."""
        before, self.trusting = self.trusting, True
        try:
            yield
        finally:
            self.trusting = before

    def prove(self, leaves: Iterable[int]) -> None:
        """Note that a step with other values of these leaves computed what eager computes."""
        self.unproven.difference_update(leaves)

    def needed(self, indices: Iterable[int]) -> set[int]:
        """These entries, and those that they are computed from."""
        found: set[int] = set()
        waiting = list(indices)
        while waiting:
            index = waiting.pop()
            if index not in found:
                found.add(index)
                function, operands = self.entries[index]
                waiting += [each.index for each in operands if type(each) is TapeRef] if function is not None else []
        return found

    def leaves_of(self, index: int) -> set[int]:
        """Numbers of the leaves that an entry is computed from."""
        entries = (self.entries[each] for each in self.needed([index]))
        return {leaf for function, leaf in entries if function is None}

    def close(self) -> list[tuple[Any, list[Any]]]:
        """End the recording: the numbers that the step kept become plain ones. See `replace_by_plain`."""
        self.closed = True
        found = replace_by_plain(self.handed_out)
        self.handed_out.clear()
        return found

    def reopened(self) -> Tape:
        """A tape that goes on where this closed one ended."""
        made = Tape(list(self.entries), list(self.leaves), list(self.guards), list(self.found), set(self.unproven))
        made.trusting = self.trusting
        made.settled, made.lines = set(self.settled), dict(self.lines)
        made._plain, made._known, made._guarded = list(self._plain), dict(self._known), set(self._guarded)
        return made

    def _guard(self, index: int, outcome: Any) -> None:
        key = (index, type(outcome), outcome)
        if key not in self._guarded:
            self._guarded.add(key)
            self.guards.append((index, outcome))
            self.lines.setdefault(index, user_line())

    def _value(self, operand: Any) -> Any:
        if isinstance(operand, TapeRef):
            return self._plain[operand.index]
        return operand.plain if isinstance(operand, Live) else operand

    def _note(self, function: Callable[..., Any], operands: Sequence[Any], result: Any) -> int:
        noted = tuple(TapeRef(o.entry) if isinstance(o, Live) else o for o in operands)
        # The type belongs to the key: 1, 1.0 and True are equal but do not compute the same, and so it is with -0.0.
        key = (function, *((type(o), repr(o)) for o in noted))
        index = self._known.get(key)
        if index is None:
            self.entries.append((function, noted))
            self._plain.append(result)
            index = self._known[key] = len(self.entries) - 1
        return index


def _itself(value: Any) -> Any:
    return value


def _compiled(tape: Tape) -> _Evaluate:
    """`tape.evaluate` as one Python function: an Adam step of a hundred parameters has a thousand entries."""
    names: dict[str, Any] = {}

    def operand(value: Any) -> str:
        if type(value) is TapeRef:
            return f"n{value.index}"
        key = f"k{len(names)}"
        names[key] = value
        return key

    body: list[str] = []
    for number, (function, operands) in enumerate(tape.entries):
        if function is None:
            body.append(f"n{number} = x[{operands}]")
        elif function in _INFIX:
            first, second = map(operand, operands)
            body.append(f"n{number} = {first} {_INFIX[function]} {second}")
        else:
            names[f"f{number}"] = function
            body.append(f"n{number} = f{number}({', '.join(map(operand, operands))})")
    for position, (index, outcome) in enumerate(tape.guards):
        names[f"g{position}"] = outcome
        body.append(f"if n{index} != g{position}: return None")
    body.append(f"return [{', '.join(f'n{number}' for number in range(len(tape.entries)))}]")
    # An error may be one that a guard prevents: 1 / x, if x != 0.
    text = "def run(x):\n  try:\n" + "".join(f"    {line}\n" for line in body)
    text += "  except (ArithmeticError, LookupError, ValueError): return None\n"
    exec(compile(text, "<hocket tape>", "exec"), names)
    run: _Evaluate = names["run"]
    return run
