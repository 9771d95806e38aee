"""`Program`: the torch side of a captured step, op by op, ready to be run by any executor.

Values live in numbered *slots*. A `Call` reads slots, runs one ATen op and fills slots. An `Action` is what a `Graph`
calls an op: one call that computes, and the views of its results, which cost nothing and go where it goes. Views of
parameters and of the batch stand in the `prologue`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hocket.tracing.scalars.tape import TapeRef


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in an op's arguments that is filled from slot `index`."""

    index: int


@dataclass(frozen=True)
class Call:
    """``slots[outs[i]] = func(*args, **kwargs)[i]``.

    `outs` maps the position in the result to a slot. The position None stands for the whole result.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: dict[int | None, int]

    @cached_property
    def reads(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(slots_in((self.args, self.kwargs))))

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The entries of the tape that it takes."""
        return tuple(leaf.index for leaf in leaves_in((self.args, self.kwargs)) if isinstance(leaf, TapeRef))


@dataclass(frozen=True)
class Transfer:
    """Transfer of an op on a channel lane (see `hocket.tracing.cut`)."""

    slot: int  # of the value that is sent, that is received into its own memory, or that a received value fills
    peer: str  # where it goes to or comes from
    sends: bool  # whether it goes out
    # shape, strides, dtype and device of a received value without memory of its own. None if it has some.
    new: tuple[Any, Any, Any, Any] | None = None


@dataclass(frozen=True)
class Action:
    """One op of the graph: the calls it consists of, and whether it runs in grad mode (without recording).

    An op of a channel lane has a `transfer`. Its calls are views of what is received. Before an op that may raise the
    step puts `effects_before` in places of Python's: plain values, numbers of the tape, and slots of gradients. Where
    an op raises that `is_undone`, all that the step has written is put back, and eager makes the step.
    """

    name: str
    calls: tuple[Call, ...]
    layer: str = ""
    grad_mode: bool = False
    transfer: Transfer | None = None
    effects_before: Mapping[Any, Any] = field(default_factory=dict, compare=False)
    is_undone: bool = field(default=False, compare=False)

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """Slots that other actions (or the prologue) fill."""
        if self.transfer is not None:
            return () if self.transfer.new else (self.transfer.slot,)
        own = {slot for call in self.calls for slot in call.outs.values()}
        return tuple(dict.fromkeys(slot for call in self.calls for slot in call.reads if slot not in own))

    @property
    def fills(self) -> tuple[int, ...]:
        if self.transfer is not None:
            views = tuple(slot for call in self.calls for slot in call.outs.values())
            return (self.transfer.slot, *views) if self.transfer.new else ()
        return tuple(slot for call in self.calls for slot in call.outs.values())


@dataclass(frozen=True)
class Program:
    """All actions in program order, and the slots they work on."""

    actions: tuple[Action, ...]  # one for each op of the graph, in the graph's order
    prologue: Action  # views of inputs, run before the first action
    num_slots: int  # number of slots
    inputs: dict[int, Any]  # slot -> source, for what is read before the first action
    kept: frozenset[int]  # slots that are needed after the last action (results, gradients)
    by_name: dict[str, Action] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {action.name: action for action in self.actions})

    @cached_property
    def effect_slots(self) -> tuple[int, ...]:
        """Slots of the gradients that a step has given before an op that may raise."""
        values = (value for action in self.actions for value in action.effects_before.values())
        return tuple(sorted({value.index for value in values if isinstance(value, Slot)}))

    def readers(self) -> dict[int, list[str]]:
        """For each slot the actions that read it, in program order."""
        found: dict[int, list[str]] = {}
        for action in self.actions:
            for slot in action.reads:
                found.setdefault(slot, []).append(action.name)
        return found


def leaves_in(value: Any) -> Iterator[Any]:
    """Everything in nested lists, tuples and dicts, as an op has them among its arguments."""
    if isinstance(value, (tuple, list, dict)):
        for element in value.values() if isinstance(value, dict) else value:
            yield from leaves_in(element)
    else:
        yield value


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same lists, tuples and dicts with other leaves."""
    if isinstance(value, dict):
        return {key: map_leaves(element, change) for key, element in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([map_leaves(element, change) for element in value]) if value else value
    return change(value)


def slots_in(value: Any) -> Iterator[int]:
    """Every slot named anywhere in `value`."""
    return (leaf.index for leaf in leaves_in(value) if isinstance(leaf, Slot))


def compile_action(action: Action, frees: tuple[int, ...] = ()) -> Callable[[list[Any], list[Any]], None]:
    """One Python function ``run(v, s)`` for an action: `v` are the slots, `s` the values of the tape.

    It ends by emptying the slots `frees`, so that their memory goes back when the last reader is done.
    """
    names: dict[str, Any] = {}
    body: list[str] = []
    for number, call in enumerate(action.calls):
        # `_op` is the bound C++ entry of an OpOverload; going there directly saves one Python frame a call.
        names[f"f{number}"] = getattr(call.func, "_op", call.func)
        arguments = [_source(argument, names) for argument in call.args]
        arguments += [f"{key}={_source(value, names)}" for key, value in call.kwargs.items()]
        expression = f"f{number}({', '.join(arguments)})"
        if not call.outs:
            body.append(expression)
        elif None in call.outs:
            body.append(f"v[{call.outs[None]}] = {expression}")
        elif len(call.outs) == 1:
            ((position, slot),) = call.outs.items()
            body.append(f"v[{slot}] = {expression}[{position}]")
        else:
            body.append(f"t = {expression}")
            body += [f"v[{slot}] = t[{position}]" for position, slot in call.outs.items()]
            body.append("del t")
    body += [f"v[{slot}] = None" for slot in frees]
    text = "def run(v, s):\n" + "".join(f"    {line}\n" for line in body or ["pass"])
    exec(compile(text, f"<hocket action {action.name}>", "exec"), names)
    return names["run"]


def _source(value: Any, names: dict[str, Any]) -> str:
    if isinstance(value, Slot):
        return f"v[{value.index}]"
    if isinstance(value, TapeRef):
        return f"s[{value.index}]"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_source(element, names) for element in value)
        return f"[{inner}]"
    if value is None or isinstance(value, (bool, int)):
        return repr(value)
    key = f"k{len(names)}"
    names[key] = value
    return key
