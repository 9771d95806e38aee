"""The request to the compiler: a captured step as text, without its data.

The calls are those of the lowered program, in its order, and work on numbered values. The layouts of all tensors are
fixed. It is compiled as it stands and *wide*: every tensor of floating point as float64 (but random numbers are drawn
in the step's own dtype, and then converted), to be compared with eager in float64.

What the step leaves as a view, of what it is given or of what else it leaves, is not compiled: the graph of a model
returns its transposed weights for the backward. The base is left in its place, and views of it are taken again.

An update by torch's own fused kernels (``_fused_adam_``) is left as it is, and comes after all that is compiled: it is
as fast, and the compiler has a fraction of the ops to do.

``unsafe_split``, which takes an LSTM cell's gates apart, returns results that share memory with its input, and its
schema does not say so. What is then written in place into a part goes into the whole, too. The compiler believes the
schema. In a captured step views come right behind what makes their base, so a write of the base that came before such a
call now comes behind it, and would be missed. A split whose whole is not touched any more once a part of it was (that
is what "unsafe" asks of its caller) is made where its parts are first used. They are then values of their own, and a
write of one part is no write of the whole. Any other one is written as the view that it is.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hocket.errors import CaptureError
from hocket.tracing.captured import Captured
from hocket.tracing.compiling.arguments import dtype_name, encoded, op_text
from hocket.tracing.float64 import SHARED
from hocket.tracing.program import Action, Call, Slot, slots_in
from hocket.tracing.recording.op_arguments import written_arguments
from hocket.tracing.scalars.tape import TapeRef

FORMAT = "hocket-compile/5"

# First and last release of torch whose Inductor writes what is known. With any other one a step keeps its other forms.
KNOWN_TORCH = ((2, 11), (2, 15))

# Torch's kernels that make the update of a group of parameters.
_UPDATES = frozenset(f"aten::_fused_{name}_" for name in ("sgd", "adam", "adamw", "adagrad"))
_aten = torch.ops.aten
# Such ops, and the same as views whose schema says so.
_SPLITS = {
    _aten.unsafe_split.Tensor: _aten.split.Tensor,
    _aten.unsafe_split_with_sizes.default: _aten.split_with_sizes.default,
}
_VIEWS = {**_SPLITS, _aten._unsafe_view.default: _aten.view.default}


@dataclass(frozen=True)
class CompileRequest:
    """A step to be compiled."""

    document: dict[str, Any]  # the text: inputs, calls, outputs, and the updates that follow (see `request_of`)
    inputs: tuple[int, ...]  # slots of the captured program, in the order of the document's inputs
    numbers: tuple[int, ...]  # entries of the tape, in the order of the document's numbers
    # slots, in the order of the document's outputs: what the step leaves and what its updates read, with the base in
    # place of views of one memory
    outputs: tuple[int, ...]

    @property
    def text(self) -> str:
        return json.dumps(self.document, sort_keys=True)

    @property
    def digest(self) -> str:
        """Name of what comes out: the same request on another kind of processor or torch is another one."""
        capability = torch.backends.cpu.get_cpu_capability()
        return hashlib.sha256(f"{torch.__version__} {capability} {self.text}".encode()).hexdigest()[:32]


def request_of(captured: Captured, *, threads: int) -> CompileRequest:
    """The request for a captured step, or a `CaptureError` that says why it cannot be compiled."""
    _expect_known_torch(torch.__version__)
    program, slot_of = captured.program, captured.lowered.slot_of
    layouts = {
        slot: node.meta["val"] for node, slot in slot_of.items() if isinstance(node.meta.get("val"), torch.Tensor)
    }
    roots = {slot_of[node]: root for node, root in captured.trace.roots.items()}
    made_roots = _roots(captured)
    memory = {**roots, **made_roots}
    calls, updates = _divided((program.prologue, *program.actions), memory)
    numbers: dict[int, int] = {}

    def reference(leaf: Any) -> dict[str, int] | None:
        if isinstance(leaf, Slot):
            return {"value": leaf.index}
        if isinstance(leaf, TapeRef):
            return {"number": numbers.setdefault(leaf.index, len(numbers))}
        return None

    def text(call: Call) -> dict[str, Any]:
        args = encoded(call.args, reference)
        kwargs = {key: encoded(value, reference) for key, value in call.kwargs.items()}
        outs = [[-1 if position is None else position, slot] for position, slot in call.outs.items()]
        return {"op": op_text(call.func), "args": args, "kwargs": kwargs, "outs": outs}

    inputs = tuple(slot for slot, _ in captured.inputs)
    read = [roots[slot] for slot in inputs]
    if captured.trace.writes_shared_inputs:
        raise CaptureError(SHARED)
    made = {slot for call in calls for slot in call.outs.values()}
    needed = {*program.kept, *(slot for call in updates for slot in call.reads)}
    if all(_is_view(call, memory) for call in calls):
        raise CaptureError("there is nothing to compile but what torch's own kernels update")
    outputs, views = _with_bases(calls, memory, needed & made, {roots[slot] for slot in inputs})
    calls = with_told_views(calls, memory, outputs)
    left = [root for slot, root in made_roots.items() if slot in outputs]
    if len({*left, *read}) < len(left) + len(set(read)):
        raise CaptureError("what the step leaves shares memory with what it is given, or with itself")
    used = {*inputs, *made, *(slot for call in calls for slot in call.reads)}
    for slot in used:
        value = layouts.get(slot)
        if value is not None and (value.device.type != "cpu" or value.layout is not torch.strided):
            raise CaptureError(
                f"the step holds a tensor on {value.device}, {value.layout}, and not a strided one on the CPU"
            )
        if slot in {*inputs, *outputs} and (value is None or value.is_complex()):
            raise CaptureError("the step is given, or leaves, what is no tensor, or a complex one")
    call_texts, view_texts, update_texts = ([text(call) for call in each] for each in (calls, views, updates))
    document = {
        "format": FORMAT,
        "threads": threads,
        "inputs": [[slot, *_layout(layouts[slot])] for slot in inputs],
        "numbers": len(numbers),
        "calls": call_texts,
        "outputs": [[slot, *_layout(layouts[slot])] for slot in outputs],
        "views": view_texts,
        "updates": update_texts,
        "dtypes": {str(slot): dtype_name(layouts[slot].dtype) for slot in sorted(used) if slot in layouts},
    }
    return CompileRequest(document, inputs, tuple(numbers), outputs)


def _with_bases(
    calls: Sequence[Call], memory: Mapping[int, int], left: Collection[int], given: Collection[int]
) -> tuple[tuple[int, ...], list[Call]]:
    """The slots that are left, with the base of those that share memory in their place, and views that give these."""
    count = Counter(memory.get(slot) for slot in left)
    # A view that is taken again sees the shape that its base has in the end.
    reshaped = {memory.get(slot) for call in calls if _reshapes(call) for slot in call.reads}
    shared = {root for root in count if root in given or count[root] > 1} - reshaped
    wanted = {slot for slot in left if memory.get(slot) in shared}
    views: list[Call] = []
    bases: set[int] = set()
    for call in reversed(calls):
        own = wanted.intersection(call.outs.values())
        if own and _is_view(call, memory):
            views.insert(0, call)
            wanted.update(call.reads)
        else:
            bases |= own
    remade = {slot for call in views for slot in call.outs.values()}
    return tuple(sorted((set(left) - remade) | bases)), views


def _reshapes(call: Call) -> bool:
    return torch.Tag.inplace_view in getattr(call.func, "tags", ())


def _is_view(call: Call, memory: Mapping[int, int]) -> bool:
    """True if a call only takes views of one tensor, by its schema or as one of `_VIEWS`."""
    roots = {memory.get(slot) for slot in (*call.reads, *call.outs.values())}
    returns: Any = call.func._schema.returns  # type: ignore[attr-defined]
    is_told = call.func in _VIEWS or all(each.alias_info and not each.alias_info.is_write for each in returns)
    return len(roots) == len(call.reads) == 1 and bool(call.outs) and is_told


def _divided(actions: Iterable[Action], memory: Mapping[int, int]) -> tuple[list[Call], list[Call]]:
    """The calls of a step that are compiled, and the updates, all of which have to come after them."""
    compiled: list[Call] = []
    updates: list[Call] = []
    touched: set[int | None] = set()
    changed: set[int | None] = set()
    for call in (call for action in actions for call in action.calls):
        func: Any = call.func
        reads = {memory.get(slot) for slot in call.reads}
        writes = {memory.get(slot) for slot in slots_in(tuple(written_arguments(func, call.args, call.kwargs)))}
        if func._schema.name in _UPDATES and not call.outs:
            updates.append(call)
            touched |= reads
            changed |= writes
        elif reads & changed or writes & touched:
            raise CaptureError(f"{func} comes after an update by {updates[-1].func}")
        else:
            compiled.append(call)
    return compiled, updates


def _roots(captured: Captured) -> dict[int, int]:
    found: dict[int, int] = {}
    for node, note in captured.trace.notes.items():
        for position, root in enumerate(note.returns):
            own = node if len(note.returns) == 1 and isinstance(node.meta.get("val"), torch.Tensor) else None
            taken = [user for user in node.users if user.target is operator.getitem and user.args[1] == position]
            slots = [captured.lowered.slot_of[each] for each in (own, *taken) if each in captured.lowered.slot_of]
            found.update({slot: root for slot in slots if root is not None})
    return found


def _expect_known_torch(version: str) -> None:
    major, minor = (int(part) for part in version.split(".")[:2])
    first, last = KNOWN_TORCH
    if not first <= (major, minor) <= last:
        known = " to ".join(".".join(map(str, each)) for each in KNOWN_TORCH)
        raise CaptureError(f"what Inductor of torch {version} writes is not known, that of {known} is")


def _layout(value: torch.Tensor) -> tuple[list[int], list[int], str]:
    return [int(n) for n in value.shape], [int(n) for n in value.stride()], dtype_name(value.dtype)


def with_told_views(calls: Sequence[Call], memory: Mapping[int, int], kept: Collection[int]) -> list[Call]:
    """The same calls, so that each one does what its schema says. One that shares memory in silence has to be known."""
    told: list[Call] = []
    late: dict[int, list[Call]] = {}
    for at, call in enumerate(calls):
        told += late.pop(at, [])
        if call.func in _SPLITS and (place := _first_use(calls, at, memory, kept)) is not None:
            late.setdefault(place, []).append(call)
        elif call.func in _VIEWS:
            told.append(replace(call, func=_VIEWS[call.func]))
        elif _shares_in_silence(call, memory):
            raise CaptureError(f"{call.func} returns memory that it is given, and does not say so")
        else:
            told.append(call)
    return told


def _first_use(calls: Sequence[Call], at: int, memory: Mapping[int, int], kept: Collection[int]) -> int | None:
    """Return the first call that uses a part of this split. None if the whole is used afterwards, or no part is."""
    parts = set(calls[at].outs.values())
    whole = {memory.get(slot) for slot in parts}
    place: int | None = None
    for later in range(at + 1, len(calls)):
        used = [slot for slot in calls[later].reads if memory.get(slot) in whole]
        if place is None and not parts.isdisjoint(used):
            place = later
        if place is None:
            continue
        if not parts.issuperset(used):
            return None
        parts |= {slot for slot in calls[later].outs.values() if memory.get(slot) in whole}
    return None if any(memory.get(slot) in whole and slot not in parts for slot in kept) else place


def _shares_in_silence(call: Call, memory: Mapping[int, int]) -> bool:
    returns: Any = call.func._schema.returns  # type: ignore[attr-defined]
    if any(each.alias_info is not None for each in returns):
        return False
    given = {memory[slot] for slot in call.reads if slot in memory}
    return any(memory.get(slot) in given for slot in call.outs.values())
