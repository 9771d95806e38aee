"""The elementwise ops of an update as few native ops, with eager's bits (see ``native/chains.cpp``).

    0.weight    mul_ lerp_ mul_ addcmul_ sqrt div add_ addcdiv_ ┐
    0.bias      mul_ lerp_ mul_ addcmul_ sqrt div add_ addcdiv_ ┴──>  hocket::update_chain

torch's kernels round by the instructions that they were compiled to: some contract ``a + s * b`` and some do not. So
each op is tried once in a process, on numbers of all magnitudes, and only the ways that gave torch's bits are used.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import torch

from hocket import native
from hocket.tracing.lowering.calls import AnnotatedCall, StepCalls
from hocket.tracing.program import Call, Slot
from hocket.tracing.scalars.tape import TapeRef

# The instructions, in the order of ``Op`` in ``chains.cpp``.
OPS = (
    *("mul_number", "mul", "add_number", "add", "lerp", "addcmul", "addcdiv", "div_number", "div", "neg", "sqrt"),
    *("add_fused", "lerp_fused", "addcmul_fused"),
)
# Size of parameters for a separate call: some 10 us of work.
MIN_BYTES = 128 << 10
# Sizes and numbers that each op is tried with: full and partial vectors, and both branches of `lerp`.
SIZES, NUMBERS = (1, 7, 16, 53, 700), (1.0, 0.1, 0.9, 0.5, -0.001, 3.7)
# Values between the instructions of one parameter.
MAX_MADE = 8
# For each op of up to three tensors and a number: the ways to compute it, and torch's own.
_WAYS: dict[str, tuple[tuple[str, ...], Callable[..., torch.Tensor]]] = {
    "mul_number": (("mul_number",), lambda a, b, c, s: a * s),
    "mul": (("mul",), lambda a, b, c, s: a * b),
    "add_number": (("add_number",), lambda a, b, c, s: a + s),
    "add": (("add", "add_fused"), lambda a, b, c, s: torch.add(a, b, alpha=s)),
    "lerp": (("lerp", "lerp_fused"), lambda a, b, c, s: torch.lerp(a, b, s)),
    "addcmul": (("addcmul", "addcmul_fused"), lambda a, b, c, s: torch.addcmul(a, b, c, value=s)),
    "addcdiv": (("addcdiv",), lambda a, b, c, s: torch.addcdiv(a, b, c, value=s)),
    "div_number": (("div_number",), lambda a, b, c, s: a / s),
    "div": (("div",), lambda a, b, c, s: a / b),
    "neg": (("neg",), lambda a, b, c, s: -a),
    "sqrt": (("sqrt",), lambda a, b, c, s: a.sqrt()),
}


@dataclass(frozen=True)
class _Instruction:
    """One elementwise op: its name, its operands, and its number if it has one."""

    name: str
    to: int  # slot
    operands: tuple[int, ...]  # slots
    number: float | TapeRef | None = None


@dataclass(frozen=True)
class _Group:
    """The ops on one parameter and what goes with it. Nothing else touches what they make between each other."""

    positions: tuple[int, ...]
    instructions: tuple[_Instruction, ...]
    given: tuple[int, ...]  # slots of tensors from outside
    written: frozenset[int]  # roots
    roots: frozenset[int]  # all of `given`
    dtype: torch.dtype
    size_bytes: float


def exact_ops() -> Mapping[str, int]:
    """The ops whose bits a chain can give, each with the number of the instruction that gives them."""
    return _tried_ops() if native.available() else {}


@cache
def _tried_ops() -> Mapping[str, int]:
    numbers = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        same = {name: [way for way in ways if _gives(way, own, numbers)] for name, (ways, own) in _WAYS.items()}
    return {name: OPS.index(ways[0]) for name, ways in same.items() if ways}


def _gives(way: str, own: Callable[..., torch.Tensor], generator: torch.Generator) -> bool:
    """Return True if this way to compute an op has the bits of torch's own."""

    def drawn(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cpu", dtype=torch.float64)

    for dtype, size, number in product((torch.float32, torch.float64), SIZES, NUMBERS):
        tensors = [(drawn(size) * torch.exp(8 * drawn(size))).to(dtype) for _ in range(3)]
        wanted = own(*tensors, number)
        run_chain([3, 1, OPS.index(way), 0, 0, 1, 2, 0], tensors, [number])
        if not torch.allclose(tensors[0], wanted, rtol=0, atol=0, equal_nan=True):
            return False
    return True


def run_chain(program: Sequence[int], tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> None:
    """Run a chain on tensors, which it writes."""
    torch.ops.hocket.update_chain(torch.classes.hocket.Chain(program), tensors, numbers)


def chain_updates(step: StepCalls, inputs: Iterable[int]) -> list[AnnotatedCall]:
    """Put chains in place of the elementwise ops of updates, where no other op sees what is between them.

    An average that follows the parameters is an update, too: all that writes what outlives the step and is no part of
    the backward, in which a gradient would wait for the end and hold its memory.
    """
    pieces = step.pieces
    found = {n: each for n, piece in enumerate(pieces) if (each := _instruction(piece, step.values)) is not None}
    lasting = frozenset(step.roots[slot] for slot in inputs)
    groups = (group for group in _groups(step, found) if group.written & lasting)
    chains: dict[int, AnnotatedCall] = {}
    gone: set[int] = set()
    for joined in _joined(step, groups):
        positions = sorted(position for group in joined for position in group.positions)
        if len(positions) > 1:
            gone.update(positions)
            chains[positions[-1]] = _chain([pieces[n] for n in positions], joined)
    return [chains.get(n, piece) for n, piece in enumerate(pieces) if n in chains or n not in gone]


def _instruction(piece: AnnotatedCall, values: Mapping[int, Any]) -> _Instruction | None:
    """The instruction for a call. None if there is none with the same bits, or the call may not be moved."""
    note, call = piece.note, piece.call
    if (
        note.phase == "backward"
        or note.grad_mode
        or note.is_undone
        or note.random
        or note.effects_before
        or piece.may_raise
    ):
        return None
    read = _read(call)
    if read is None or read[0] not in exact_ops():
        return None
    name, operands, number = read
    func: Any = call.func
    if number is not None and not isinstance(number, TapeRef):
        number = float(number)
    in_place = func._schema.arguments[0].alias_info is not None
    to = operands[0] if in_place else call.outs.get(None)
    if to is None or set(call.outs) - {None}:
        return None
    first: Any = values.get(operands[0])
    for slot in (*operands, to):
        value = values.get(slot)
        if value is None or value.device.type != "cpu" or value.dtype not in (torch.float32, torch.float64):
            return None
        if (value.shape, value.stride(), value.dtype) != (first.shape, first.stride(), first.dtype):
            return None
        if torch._debug_has_internal_overlap(value):
            return None
    return _Instruction(name, to, operands, number)


def _read(call: Call) -> tuple[str, tuple[int, ...], Any] | None:
    """The name of what a call computes, the slots of its operands, and its number."""
    name, _, overload = str(call.func).removeprefix("aten.").partition(".")
    name, args, kwargs = name.rstrip("_"), list(call.args), dict(call.kwargs)
    number: Any = None
    if getattr(call.func, "namespace", "") != "aten" or name not in _NUMBERS or overload not in _NUMBERS[name]:
        return None
    keyword = _NUMBERS[name][overload]
    if keyword is not None:
        number = kwargs.pop(keyword, 1.0)
    if name == "lerp" or (name in ("mul", "add", "div") and args and not isinstance(args[-1], Slot)):
        if name == "add" and number != 1.0:
            return None
        number = args.pop()
        name = name if name == "lerp" else f"{name}_number"
    if kwargs or not all(isinstance(each, Slot) for each in args):
        return None
    if not (number is None or isinstance(number, TapeRef) or type(number) in (int, float)):
        return None
    return name, tuple(each.index for each in args), number


# By op and overload the keyword of its number, if it has one.
_NUMBERS: dict[str, dict[str, str | None]] = {
    "mul": {"Tensor": None, "Scalar": None},
    "add": {"Tensor": "alpha"},
    "lerp": {"Scalar": None},
    "addcmul": {"default": "value"},
    "addcdiv": {"default": "value"},
    "div": {"Tensor": None, "Scalar": None},
    "neg": {"default": None},
    "sqrt": {"default": None},
}


def _groups(step: StepCalls, found: Mapping[int, _Instruction]) -> Iterator[_Group]:
    """The instructions that share memory, as groups that may be made at once."""
    pieces, values, roots = step.pieces, step.values, step.roots
    parent: dict[Any, Any] = {}

    def top(root: Any) -> Any:
        while parent.setdefault(root, root) != root:
            root = parent[root]
        return root

    members: dict[Any, list[int]] = {}
    for position in found:
        phase = pieces[position].note.phase
        first, *others = ((phase, root) for root in pieces[position].memory)
        for other in others:
            parent[top(other)] = top(first)
    for position in found:
        piece = pieces[position]
        members.setdefault(top((piece.note.phase, next(iter(piece.memory)))), []).append(position)
    for positions in members.values():
        own = [found[n] for n in positions]
        slots = dict.fromkeys(slot for each in own for slot in (*each.operands, each.to))
        made = {slot for n in positions for slot in pieces[n].call.outs.values()}
        given = tuple(slot for slot in slots if slot not in made)
        alike = {(values[slot].shape, values[slot].stride(), values[slot].dtype) for slot in slots}
        if len(alike) > 1 or len({roots[slot] for slot in slots}) < len(slots) or len(made) > MAX_MADE or not given:
            continue
        if made & step.kept or any(set(step.touching[roots[slot]]) - set(positions) for slot in made):
            continue
        if _outlives_its_stage(own, made):
            continue
        written = {roots[each.to] for each in own if each.to not in made}
        (shape, _, dtype), *_ = alike
        group = _Group(
            positions=tuple(positions),
            instructions=tuple(own),
            given=given,
            written=frozenset(root for root in written if root is not None),
            roots=frozenset(root for slot in given if (root := roots[slot]) is not None),
            dtype=dtype,
            size_bytes=math.prod(shape) * dtype.itemsize,
        )
        if not _is_disturbed(step, group, positions[-1]):
            yield group


def _outlives_its_stage(instructions: Iterable[_Instruction], made: set[int]) -> bool:
    """Return True if a value between instructions is read behind a root that it was made before."""
    stage, made_in = 0, dict[int, int]()
    for each in instructions:
        operands = each.operands
        if each.name == "sqrt":
            stage, operands = stage + 1, ()
        if any(slot in made and made_in[slot] < stage for slot in operands):
            return True
        made_in[each.to] = stage
    return False


def _is_disturbed(step: StepCalls, group: _Group, last: int) -> bool:
    """Return True if an op up to `last` that is not of the group sees what it writes, or writes what it reads.

    An op that may raise sees all: what was written before it stays where a user catches its error.
    """
    first = group.positions[0]
    if bisect(step.raising, first) < bisect(step.raising, last):
        return True
    own = set(group.positions)
    for root in group.roots:
        between = (n for n in step.touching[root] if first < n <= last and n not in own)
        if any(root in group.written or root in step.pieces[n].access.writes for n in between):
            return True
    return False


def _joined(step: StepCalls, groups: Iterable[_Group]) -> Iterator[list[_Group]]:
    """The groups that one op makes: those of one dtype, as many as it takes to be worth a call."""
    joined: list[_Group] = []
    for group in sorted(groups, key=lambda each: (str(each.dtype), each.positions[-1])):
        last = group.positions[-1]
        is_full = sum(each.size_bytes for each in joined) >= MIN_BYTES or (joined and joined[0].dtype != group.dtype)
        if joined and (is_full or any(_is_disturbed(step, each, last) for each in joined)):
            yield joined
            joined = []
        joined.append(group)
    if joined:
        yield joined


def _chain(pieces: Sequence[AnnotatedCall], groups: Sequence[_Group]) -> AnnotatedCall:
    program: list[int] = []
    tensors: list[Slot] = []
    numbers: list[Any] = []
    for group in groups:
        places = {slot: place for place, slot in enumerate(group.given)}
        program += [len(group.given), len(group.instructions)]
        for each in group.instructions:
            for slot in (*each.operands, each.to):
                places.setdefault(slot, len(group.given) - 1 - len(places))
            operands = [places[slot] for slot in each.operands]
            operands += [operands[0]] * (3 - len(operands))
            if each.number is not None and each.number not in numbers:
                numbers.append(each.number)
            number = -1 if each.number is None else numbers.index(each.number)
            program += [exact_ops()[each.name], places[each.to], *operands, number]
        tensors += map(Slot, group.given)
    args = (torch.classes.hocket.Chain(program), tuple(tensors), tuple(numbers))
    roots, written = frozenset[int](), frozenset[int]()
    for group in groups:
        roots, written = roots | group.roots, written | group.written
    note = replace(pieces[0].note, reads=roots, writes=written, returns=(), scalars={})
    call = Call(torch.ops.hocket.update_chain.default, args, {}, {})
    return replace(pieces[0], call=call, note=note, flops=sum(piece.flops for piece in pieces))
