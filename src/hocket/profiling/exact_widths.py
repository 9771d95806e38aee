"""The widths at which an op gives eager's bits.

A kernel that splits a sum among its threads rounds it differently for each number of threads. Eager runs every op with
the caller's number of threads, so a plan gives eager's bits only where each op runs with that number, or with another
one at which its result is the same. Which ones these are is found by running the op on copies of its inputs::

    sum of 10^6 numbers      1: other bits     2: eager's (the caller has two threads)
    ReLU                     1: the same       2: eager's
    product of matrices      1: the same       2: eager's

Each op is tried on the values that it has in the recorded step, and on values near these: the fewer numbers an op
makes, the likelier two different sums agree by chance, and the more often it is tried. A sum of which all terms but one
are zero, as a ReLU leaves them, is the same in any order. So zeros are filled in every second trial. Ops of the same
kernel, with inputs of the same shapes and layouts, are tried once. What no trial shows, the comparison of a plan's
first step with eager's does, and so do the audits (`hocket.autotune`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from hocket.execution.base import below_autograd, releases
from hocket.execution.process import forked
from hocket.ir import Lane, Plan, synchronisation
from hocket.tracing.captured import Captured
from hocket.tracing.program import Action, Call, Slot, compile_action, slots_in
from hocket.tracing.recording.op_arguments import written_arguments
from hocket.tracing.saved_state import generators_kept, span
from hocket.tracing.scalars.tape import TapeRef

# The trials of an op on further values produce at least this many numbers together, in at most this many trials. Of ops
# that read many numbers there are fewer trials, one at the least, which read at most `MAX_READ` numbers together.
ENOUGH_NUMBERS = 64
MAX_TRIALS = 8
MAX_READ = 2**24
# Inputs are multiplied by numbers between this and 1 in these trials, so that signs and ranges stay.
LEAST_FACTOR = 0.75
# The number of such factors that are drawn. Of larger inputs each part is multiplied by the same ones.
NUM_FACTORS = 2**18
# They make memory with whatever is in it.
_EMPTY = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")

Run = Callable[[list[Any], list[Any]], None]


class ExactWidths:
    """Finds the widths at which ops give eager's bits, and remembers them by kernel and shapes."""

    def __init__(self, usual_width: int) -> None:
        self.usual_width = usual_width
        self.is_trusted = True  # the trials have not been found wrong. Otherwise every op runs at the usual width.
        self._known: dict[Hashable, dict[int, bool]] = {}
        self._found: WeakKeyDictionary[Captured, dict[int, frozenset[str]]] = WeakKeyDictionary()

    def of(self, captured: Captured, widths: Iterable[int]) -> dict[str, frozenset[int]]:
        """For each op of the step the widths among these at which it gives eager's bits.

        The usual width is always one of them. The ops run on copies: state, batches and generators stay as they are.
        """
        found = self._found.setdefault(captured, {})
        wanted = [width for width in dict.fromkeys(widths) if width != self.usual_width and width not in found]
        if wanted and self.is_trusted:
            if forked():  # a thread that forked may wait for ever for a team of another width
                with ThreadPoolExecutor(1) as apart:
                    found |= apart.submit(self._tried, captured, wanted).result()
            else:
                found |= self._tried(captured, wanted)
        exact = {width: found[width] for width in widths if width in found} if self.is_trusted else {}
        return {
            op: frozenset((self.usual_width, *(width for width, ops in exact.items() if op in ops)))
            for op in captured.graph.order
        }

    def _tried(self, captured: Captured, widths: Sequence[int]) -> dict[int, frozenset[str]]:
        """For each of these widths the ops that give eager's bits there."""
        exact: dict[int, list[str]] = {width: [] for width in widths}
        with _scratch(captured) as (values, numbers):
            for action, frees in _in_order(captured):
                run = compile_action(action)
                known = self._known.setdefault(_kind_of(action, values, numbers), {})
                with torch.set_grad_enabled(action.grad_mode):
                    for width in widths:
                        if width not in known:
                            known[width] = _is_exact(action, run, values, numbers, self.usual_width, width)
                        if known[width]:
                            exact[width].append(action.name)
                    torch.set_num_threads(self.usual_width)
                    run(values, numbers)
                for slot in frees:
                    values[slot] = None
        return {width: frozenset(ops) for width, ops in exact.items()}


@contextmanager
def _scratch(captured: Captured) -> Iterator[tuple[list[Any], list[Any]]]:
    """The slots and numbers of a step on copies. Generators and the number of threads are as before afterwards."""
    threads = torch.get_num_threads()
    calls = [call for action in captured.program.actions for call in action.calls]
    with generators_kept(_generators_of(calls)), below_autograd():
        frame = captured.rehearse()
        try:
            yield frame.values, frame.numbers
        finally:
            torch.set_num_threads(threads)


def _generators_of(calls: Iterable[Call]) -> list[torch.Generator]:
    leaves = tree_leaves([(call.args, call.kwargs) for call in calls])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]


def _in_order(captured: Captured) -> Iterator[tuple[Action, tuple[int, ...]]]:
    """The actions in eager's order, each with the slots that nothing reads after it."""
    sync = synchronisation(captured.graph, Plan((Lane("all", captured.graph.order),)))
    frees = releases(captured.program, sync).frees
    for name in captured.graph.order:
        yield captured.program.by_name[name], frees.get(name, ())


def _kind_of(action: Action, values: Sequence[Any], numbers: Sequence[Any]) -> Hashable:
    """The kernels of an action, and the shapes, layouts and numbers that they get."""
    own = {slot for call in action.calls for slot in call.outs.values()}
    inputs = [(slot if slot in own else _seen(values[slot])) for call in action.calls for slot in call.reads]
    leaves = tree_leaves([(call.args, call.kwargs) for call in action.calls])
    constants = [numbers[leaf.index] if isinstance(leaf, TapeRef) else leaf for leaf in leaves]
    constants = [type(leaf) if isinstance(leaf, (Slot, torch.Generator)) else leaf for leaf in constants]
    return tuple(str(call.func) for call in action.calls), repr(inputs), repr(constants), action.grad_mode


def _seen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride() if value.layout == torch.strided else value.layout
    return [_seen(each) for each in value] if isinstance(value, (list, tuple)) else type(value)


def _is_exact(
    action: Action, run: Run, values: Sequence[Any], numbers: list[Any], usual_width: int, width: int
) -> bool:
    """Return True if no trial shows another bit at this width than at the usual one."""
    if all(getattr(call.func, "__name__", "").partition(".")[0] in _EMPTY for call in action.calls):
        return True
    trial, num_trials = 0, 1
    while trial < num_trials:
        expected = _outcome(action, run, values, numbers, usual_width, trial)
        if expected is None:
            return trial > 0  # the op has no result for values like these, only for its own
        found = _outcome(action, run, values, numbers, width, trial)
        if found is None or not all(map(same_bits, expected, found)):
            return False
        if not trial:
            num_trials += _num_further(action, values, expected)
        del expected, found  # before the next ones are made: they may be most of the machine's memory
        trial += 1
    return True


def _num_further(action: Action, values: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Return the number of trials on further values that an action needs, by what it has made and what it reads."""
    numbers = [each.numel() for each in made if each.is_floating_point() or each.is_complex()]
    if not numbers:
        return 0
    read = tree_leaves([values[slot] for slot in action.reads])
    num_read = sum(each.numel() for each in read if isinstance(each, torch.Tensor))
    needed = -(-ENOUGH_NUMBERS // max(1, min(numbers)))
    return max(1, min(needed, MAX_TRIALS, MAX_READ // max(1, num_read)))


def _outcome(
    action: Action, run: Run, values: Sequence[Any], numbers: list[Any], width: int, trial: int
) -> list[torch.Tensor] | None:
    """The tensors that an action makes or writes on copies of its inputs. None where it raises.

    Trial 0 is on the values as they are, every other one on values near them.
    """
    inputs = list(values)
    copies = _copies({slot: values[slot] for slot in action.reads}, trial)
    if copies is None:
        return None
    for slot, copy in copies.items():
        inputs[slot] = copy
    torch.set_num_threads(width)
    try:
        with generators_kept(_generators_of(action.calls)):
            run(inputs, numbers)
    except Exception:  # noqa: BLE001  # whatever a kernel says of values that are not its own
        return None
    changed = [inputs[slot] for slot in action.fills]
    for call in action.calls:
        if hasattr(call.func, "_schema"):
            changed += [inputs[slot] for slot in slots_in(list(written_arguments(call.func, call.args, call.kwargs)))]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, torch.Tensor)]


def _copies(values: Mapping[int, Any], trial: int) -> dict[int, Any] | None:
    """Copies of these values that share memory as they do. None where a value is not laid out by strides."""
    tensors = [leaf for leaf in tree_leaves(list(values.values())) if isinstance(leaf, torch.Tensor)]
    if any(each.layout != torch.strided for each in tensors):
        return None
    spans: dict[tuple[int, torch.dtype], tuple[int, int]] = {}
    for each in tensors:
        begin, end = span(each)
        known = spans.get(_memory(each), (begin, end))
        spans[_memory(each)] = min(begin, known[0]), max(end, known[1])
    if len({pointer for pointer, _ in spans}) < len(spans):
        return None  # one memory as two types
    random = torch.Generator().manual_seed(trial)
    memories: dict[tuple[int, torch.dtype], tuple[torch.Tensor, int]] = {}

    def copy(value: torch.Tensor) -> torch.Tensor:
        key = _memory(value)
        if key not in memories:
            begin, end = spans[key]
            memory = value.detach().as_strided((end - begin,), (1,), begin).clone()
            if trial:
                _move(memory, random, trial % 2 == 1)
            memories[key] = memory, begin
        memory, begin = memories[key]
        return memory.as_strided(value.shape, value.stride(), value.storage_offset() - begin)

    copies: dict[int, Any] = tree_map_only(torch.Tensor, copy, dict(values))
    return copies


def _memory(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return (tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)), tensor.dtype


def _move(memory: torch.Tensor, random: torch.Generator, fills: bool) -> None:
    """Multiply by factors, which keep signs and ranges. With `fills`, or where all are zero, fill zeros in."""
    if not (memory.is_floating_point() or memory.is_complex()) or not memory.numel():
        return
    factors = torch.rand(min(memory.numel(), NUM_FACTORS), generator=random, dtype=torch.float32)
    parts = memory.split(NUM_FACTORS)
    typical = _typical_size(parts) if fills or not memory.any() else 0.0
    for part in parts:
        own = factors[: len(part)]
        zeros = part == 0 if typical else None
        part.mul_((LEAST_FACTOR + (1 - LEAST_FACTOR) * own).to(part.dtype))
        if zeros is not None:
            part.copy_(torch.where(zeros, (own * typical).to(part.dtype), part))


def _typical_size(parts: Iterable[torch.Tensor]) -> float:
    """The mean magnitude of all finite numbers that are not zero, or 1 if there are none."""
    total, num = 0.0, 0
    for part in parts:
        sizes = part.abs().double()
        counted = sizes.isfinite() & (sizes != 0)
        total += float(sizes.masked_fill_(~counted, 0.0).sum())
        num += int(counted.sum())
    return total / num if num else 1.0


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two tensors have the same bits. NaN is NaN, whatever its payload, and -0.0 is not 0.0."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    # A single element may have a stride of 0, which `contiguous` leaves, and no view as bytes. So do conjugates.
    plain = (tensor.resolve_conj().resolve_neg() for tensor in (first, second))
    one, other = (tensor.contiguous().as_strided((tensor.numel(),), (1,)) for tensor in plain)
    if torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
        return True
    if not one.is_floating_point() and not one.is_complex():
        return False
    parts = (one, other) if one.is_floating_point() else map(torch.view_as_real, (one, other))
    one, other = (torch.where(each.isnan(), torch.zeros_like(each), each) for each in parts)  # -0.0 stays what it is
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
