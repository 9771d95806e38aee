"""Does the planned step compute what the eager step computes? Tried from the same state, on the same batches.

The first promise: bitwise where the same kernels run at the same width, else within rounding. Parameters, buffers,
gradients, optimizer state and what the step returns are all compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from hocket import native
from hocket.backends import ROUNDING
from hocket.errors import CaptureError, StaleCaptureError
from hocket.heap import trim_heap
from hocket.ir.limits import free_bytes
from hocket.planning.critical_path.memory import lasting_bytes, serial_peak_bytes
from hocket.profiling.exact_widths import same_bits
from hocket.sinks import Sink, sinks_heard, sinks_held
from hocket.tracing.captured import Captured
from hocket.tracing.saved_state import Saved
from hocket.tracing.state import Inventory

# The share of the free memory that copies of the state may take.
MAX_FREE_SHARE = 0.8
# Elements that are compared at a time.
_PART = 2**16


@dataclass(frozen=True)
class Difference:
    """The difference between two runs."""

    max_abs_diff: float  # the largest difference of any number
    relative: float  # the same, relative to the largest magnitude of its tensor
    bitwise: bool  # no bit differs
    where: str  # name of the value with the largest relative difference
    steps: int  # number of steps that were compared
    error: str = ""  # text of the error that the plan raised, or empty
    tolerance: float = ROUNDING  # largest `relative` that is allowed where a bit differs. With 0 no bit may differ.

    @property
    def equal(self) -> bool:
        """Bitwise, or within the tolerance where there is one."""
        return not self.error and (self.bitwise or 0 < self.tolerance >= self.relative)

    @property
    def is_rounding(self) -> bool:
        """Bits differ, by what rounding does."""
        return not self.error and not self.bitwise and self.relative <= ROUNDING


def release_memory() -> None:
    """Give memory that lanes and the heap keep between steps back to the system."""
    native.release_kept_memory()
    trim_heap()


def expect_room(needed_bytes: float, max_share: float, what: str) -> None:
    """Raise a `CaptureError` if `what` takes more than this share of the memory that is free."""
    available = available_bytes()
    if available is not None and needed_bytes > max_share * available:
        needed, free = needed_bytes / 2**20, available / 2**20
        raise CaptureError(f"{what} would take {needed:,.0f} MiB, and {free:,.0f} MiB are free")


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the memory available without swapping, within the limits of a container or a job, or None if unknown."""
    limit = free_bytes()
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return limit
    found = [int(line.split()[1]) * 2**10 for line in lines if line.startswith("MemAvailable:")]
    return min([*found, *([] if limit is None else [limit])], default=None)


def verify(
    captured: Captured,
    planned: Callable[[Any], Any],
    batches: Sequence[Any],
    *,
    width: int | None = None,
    eager: Callable[[Any], Any] | None = None,
    tolerance: float = ROUNDING,
) -> tuple[Difference, list[Any]]:
    """Run every batch eagerly and then from the same state by `planned`, compare, and keep eager's state.

    Results are compared after every step, the state after the last. An error of the plan is part of the difference. If
    nothing differs, the current values of numbers count as proven. Eager steps have `width` threads, so that a plan of
    narrow lanes is compared with torch at that width, and are made by `eager`, by default the captured step itself.

    Returns the difference, and the results of the eager steps. A `CaptureError` says that there is no memory for copies
    of the state: nothing was run.
    """
    moved = captured.moved(batches[0]) if batches else set()
    state = captured.trace.places.again(), captured.written(batches[0] if batches else ()), captured.trace.appended
    made: list[str] = []
    held: list[Any] = []
    release_memory()
    expect_room(_verified_bytes(captured, *state[:2]), MAX_FREE_SHARE, "a comparison of a plan with eager")
    before = Saved(*state)
    with _threads(width), sinks_heard(partial(_note_call, made)):
        returned = [(eager or captured.step)(batch) for batch in batches]
    trim_heap()
    returned_values = [(f"result of step {n}", _detached(result)) for n, result in enumerate(returned, 1)]
    after = Saved(*state)
    before.restore()
    del before  # the state is not small
    try:
        results = []
        for n, batch in enumerate(batches, 1):
            with captured.trace.tape.trusted(), sinks_held(held):
                try:
                    result = planned(batch)
                except StaleCaptureError:
                    if eager is not None:
                        raise  # this step is the user's, and was made
                    result = captured.step(batch)  # nothing was run; a scheduled step goes on eagerly here, too
            results.append((f"result of step {n}", _detached(result)))
        returned_values += [(f"what is appended to {each.name}", _detached(grown)) for each, grown in after.lists]
        results += [(f"what is appended to {each.name}", _detached(each.content())) for each, _ in after.lists]
        returned_values.append(("what sinks are called with", ["\n".join(made)]))
        results.append(("what sinks are called with", ["\n".join(map(repr, held))]))
        found = differ(
            [*_leaves(returned_values), *after.values()], [*_leaves(results), *after.current()], steps=len(batches)
        )
        found = replace(found, tolerance=tolerance)
    except Exception as error:  # noqa: BLE001  # whatever it is: eager's state is kept, and the step stays eager
        found = Difference(math.inf, math.inf, False, "", len(batches), f"{type(error).__name__}: {error}")
    finally:
        after.restore()
    if found.equal:
        captured.trace.tape.prove(moved)
    return found, returned


def _verified_bytes(captured: Captured, places: Inventory, written: Sequence[torch.Tensor]) -> float:
    """The host's memory for two copies of the state, or for one and the rest of a step."""
    tensors = [entry.get() for entry in (*places.parameters, *places.parameters, *places.tensors)]  # and gradients
    state = sum(each.nbytes for each in (*tensors, *written) if each.device.type == "cpu")
    graph = captured.graph
    return state + max(state, serial_peak_bytes(graph) - lasting_bytes(graph))


def _note_call(made: list[str], sink: Sink, make: Callable[..., object], args: Any, kwargs: Any) -> None:
    made.append(repr((sink.key, (args, kwargs))))  # text has each bit of a float, and does not change with a list
    make(*args, **kwargs)


@contextmanager
def _threads(width: int | None) -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(width or usual)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def differ(first: Iterable[tuple[str, Any]], second: Iterable[tuple[str, Any]], *, steps: int = 1) -> Difference:
    """Compare two lists of named values."""
    worst, relative, where, bitwise = 0.0, 0.0, "", True
    for (name, a), (_, b) in zip(first, second, strict=True):
        if _same(a, b):
            continue
        bitwise = False
        absolute, scaled = distance(a, b)
        worst = max(worst, absolute)
        if scaled >= relative:
            relative, where = scaled, name
    return Difference(worst, relative, bitwise, where, steps)


def _same(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return bool(a == b or (a != a and b != b)) if not isinstance(a, torch.Tensor) else False
    return same_bits(a, b)


def distance(a: Any, b: Any) -> tuple[float, float]:
    """The largest difference, and the same relative to the largest finite magnitude.

    NaN against NaN and an infinity against the same one are no difference, and do not hide one elsewhere.
    """
    absolute = gap_of(a, b)
    scale = max(largest(a), largest(b)) if 0 < absolute < math.inf else 0.0
    return absolute, absolute / scale if scale else absolute


def gap_of(a: Any, b: Any) -> float:
    """The largest difference of `distance`."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.is_complex() != b.is_complex():
            return math.inf
        gap = max(map(_gap_of_parts, _parts(a), _parts(b)), default=0.0)
    elif isinstance(a, (int, float)) and isinstance(b, (int, float)):
        gap = abs(a - b)
    else:
        return math.inf
    return gap if math.isfinite(gap) else math.inf


def _gap_of_parts(x: torch.Tensor, y: torch.Tensor) -> float:
    gaps = (x - y).abs_()
    gap = float(gaps.max())
    if not math.isfinite(gap):
        gap = float(gaps.masked_fill_((x == y) | (x.isnan() & y.isnan()), 0.0).max())
    return gap if math.isfinite(gap) else math.inf


def ulp_of(value: Any) -> float:
    """Return the relative distance of neighbouring numbers of a tensor's dtype, or 0 where they are exact."""
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return torch.finfo(value.dtype).eps if is_float else 0.0


def largest(value: Any) -> float:
    """Return the largest finite magnitude of a tensor or of a number, or 0 if there is none."""
    if isinstance(value, torch.Tensor):
        return max(map(_largest, _parts(value)), default=0.0)
    return abs(float(value)) if isinstance(value, (int, float)) else 0.0


def _largest(part: torch.Tensor) -> float:
    found = float(part.abs().max())
    if math.isfinite(found):
        return found
    finite = part[part.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements of a tensor in float64, some at a time: what is compared would be held several times otherwise."""
    if not tensor.numel():
        return
    for part in tensor.detach().reshape(-1).split(_PART):
        yield torch.view_as_real(part.to(torch.complex128)) if part.is_complex() else part.to(torch.float64)


def _detached(result: Any) -> Any:
    leaves, _ = tree_flatten(result)
    wanted = [leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [*wanted, *_copied(leaves)]


def _copied(leaves: list[Any]) -> list[Any]:
    of_arrays = [torch.from_numpy(each) if _is_numbers(each) else each for each in leaves]
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in of_arrays]


def _is_numbers(value: Any) -> bool:
    return type(value) is np.ndarray and value.dtype.kind in "biuf"


def _leaves(named: Iterable[tuple[str, list[Any]]]) -> Iterator[tuple[str, Any]]:
    for name, leaves in named:
        yield from ((name, leaf) for leaf in leaves)
