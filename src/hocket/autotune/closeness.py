"""The rule of ``numerics="close"``: when a form that is not bitwise counts as accurate as eager.

A step is made from one state in float64, by eager (or by the plan of eager's order, which is verified against it), and
by the form. For each value that it leaves behind, ``d`` is the largest distance from the float64 value. The form is
close where

    d(form) <= 4 * max(d(eager), q * scale) + floor

with ``scale`` the largest magnitude of that value, ``q`` the median of ``d(eager) / scale`` over the values of its
group (parameters, gradients, each kind of state and of buffer), and the floor a few units in the last place of the
larger of its scale and its group's usual one. The group says what rounding does to such values where eager was lucky
with one of them, or where one is all rounding (the gradient of a bias before a norm).

A ReLU whose argument is zero within rounding may pass a gradient or not, at any precision. One such element changes a
distance by orders of magnitude, for eager as often as for the form. It is rare in small steps, and five of six large
ones (ResNet-20 at batch 64) have one. An error of the form, in contrast, shows in each step. So the smallest distance
of several steps counts for the form, and the lower median for eager. Between the steps the rates of the optimizer are
changed, and the form runs once before with the old rates, so that a form with stale numbers is found out. Audits
compare in many more steps, where a form that rounds a little more than eager would in the end meet such elements in
several steps in a row. There the largest distance that eager shows in one of the steps is allowed.

A compiled form is compiled in float64 as well, and that step has to agree with the float64 one to a few digits less
than float64 has, in every sample: float32's rounding does not hide a wrong number there.

A step in float64 has the peak of the plain step with float64 in place of every float: twice eager's memory in float32,
beside the training's own. A comparison must not end a training that just fits, so the forms are refused if the peak is
more than half of the free memory. Between two ops it holds less than eager's activations. Its other values lie in a
file (`hocket.tracing.spill`), so that the peak of the process stays near eager's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median, median_low
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_unflatten

from hocket.autotune.verification import expect_room, gap_of, largest, release_memory, ulp_of
from hocket.errors import CaptureError
from hocket.planning.critical_path import serial_peak_bytes
from hocket.sinks import sinks_held
from hocket.tracing.captured import Captured
from hocket.tracing.float64 import Left, float64_step
from hocket.tracing.saved_state import Saved
from hocket.tracing.sources import Entry

# The largest distance of a form over eager's own, and the distance that is always allowed, in units in the last place.
MAX_RATIO = 4.0
FLOOR_ULPS = 4.0
# The largest distance of a compiled step in float64 from eager in float64, relative to the largest magnitude.
WIDE_TOLERANCE = 1e-9
# Samples after which a form that is not close yet is given up.
MAX_SAMPLES = 6
# Factors of learning rates, sample by sample, and of all other numbers of the optimizer.
RATE_FACTORS = (2.0, 0.5, 4.0)
OTHER_FACTOR = 0.9375
# The share of the free memory that a step in float64 may take.
MAX_FREE_SHARE = 0.5
_LARGEST = 8
# The memory of a step in float64 between two ops, as a share of the plain step's beyond parameters and state. Arguments
# and results of an op, and the values that a plan keeps, come on top. Less than the second is not worth a file.
LIMIT_SHARE, LEAST_LIMIT_BYTES = 0.25, 4 * 2**20


@dataclass(frozen=True)
class Distance:
    """Errors of eager and of a form against the float64 value of one tensor or number."""

    group: str  # what it is compared among
    scale: float  # its largest magnitude
    ulp: float  # the relative distance of neighbouring numbers of its dtype
    eager: float  # the largest distance of any element
    form: float

    @property
    def relative(self) -> float:
        """Eager's, relative to the scale."""
        return self.eager / self.scale if self.scale else 0.0

    @staticmethod
    def of_several(steps: Sequence[Distance], *, audited: bool = False) -> Distance:
        """Combine the distances of one value in several steps."""
        eager = [each.eager for each in steps]
        return replace(
            steps[0],
            scale=max(each.scale for each in steps),
            eager=max(eager) if audited else median_low(eager),
            form=min(each.form for each in steps),
        )


Sample = Mapping[str, Distance]


@dataclass(frozen=True)
class Closeness:
    """Evidence on one form, from samples."""

    samples: tuple[Sample, ...] = ()  # distances by name, in the order of sampling
    error: str = ""  # text of the error that the form raised, or empty
    audited: bool = False  # the samples come from audits

    def and_sample(self, found: Sample | str) -> Closeness:
        """With one more sample, or an error."""
        if isinstance(found, str):
            return replace(self, error=found)
        return replace(self, samples=(*self.samples, found))

    @cached_property
    def distances(self) -> Sample:
        """The combined distance of each value over all samples, by name."""
        steps: dict[str, list[Distance]] = {}
        for each in self.samples:
            for name, one in each.items():
                steps.setdefault(name, []).append(one)
        return {name: Distance.of_several(found, audited=self.audited) for name, found in steps.items()}

    @property
    def holds(self) -> bool:
        """True if the samples so far show the form to be close."""
        return not self.error and bool(self.samples) and self._worst[0] <= 1

    @property
    def why(self) -> str:
        """In words what is farthest from what is allowed."""
        if self.error or not self.samples:
            return self.error
        name = self._worst[1]
        return f"{name} is off by {self.distances[name].form:.3g}, eager by {self.distances[name].eager:.3g}"

    @property
    def _worst(self) -> tuple[float, str]:
        """The largest ratio of a form's distance to what is allowed, and where."""
        groups: dict[str, list[Distance]] = {}
        for each in self.distances.values():
            groups.setdefault(each.group, []).append(each)
        usual = {group: median(each.relative for each in found) for group, found in groups.items()}
        scales = {group: median(each.scale for each in found) for group, found in groups.items()}
        # A loss is a single value: the other values show the size of rounding.
        usual["result"] = max(usual.values(), default=0.0)

        def ratio(one: Distance) -> float:
            if not math.isfinite(one.form):
                return math.inf
            floor = FLOOR_ULPS * one.ulp * max(one.scale, scales[one.group])
            allowed = MAX_RATIO * max(one.eager, usual[one.group] * one.scale) + floor
            return one.form / allowed if allowed else math.inf if one.form else 0.0

        return max(((ratio(one), name) for name, one in self.distances.items()), default=(0.0, ""))


def sample(
    captured: Captured,
    eager: Callable[[Any], Any],
    forms: Mapping[str, Callable[[Any], Any]],
    batch: Any,
    number: int | None = None,
    wide: Mapping[str, Captured] | None = None,
) -> tuple[dict[str, Sample | str], Any]:
    """Make one step in float64, by each form, and by eager, all from the state as it is.

    With a `number` of the sample the numbers of the optimizer are moved, and everything is put back afterwards. With
    None they stay, and eager's results are kept: this is a step of the training. `wide` are the compiled forms in
    float64.

    Returns for each form its sample or the text of its error, and eager's result. A `CaptureError` says that there is
    no float64 step (see `float64_step`), or no memory for it: nothing was run.
    """
    expect_room(float64_peak_bytes(captured), MAX_FREE_SHARE, "a step in float64 to compare with")
    tapes = [each.captured.trace.tape for each in forms.values() if hasattr(each, "captured")]
    try:
        with ExitStack() as trust:
            for tape in (captured.trace.tape, *tapes):
                trust.enter_context(tape.trusted())
            return _sampled(captured, eager, forms, batch, number, wide or {})
    finally:
        release_memory()


def _sampled(
    captured: Captured,
    eager: Callable[[Any], Any],
    forms: Mapping[str, Callable[[Any], Any]],
    batch: Any,
    number: int | None,
    wide: Mapping[str, Captured],
) -> tuple[dict[str, Sample | str], Any]:
    back = Saved(captured.trace.places.again(), captured.written(batch), captured.trace.appended).restore

    def moved() -> None:
        if number is not None:
            _move_rates(captured, batch, RATE_FACTORS[number % len(RATE_FACTORS)])

    found: dict[str, Any] = {}
    with ExitStack() as files:
        held = files.enter_context(ExitStack())
        held.enter_context(sinks_held())
        try:
            moved()
            truth = files.enter_context(_truth(captured, batch))
            for form, run in forms.items():
                try:
                    if number is not None:
                        back()
                        run(batch)
                    back()
                    moved()
                    result = run(batch)
                    found[form] = _gaps(captured, truth, result)
                    if form in wide:
                        back()
                        moved()
                        release_memory()
                        limit_bytes = float64_limit_bytes(captured)
                        with float64_step(wide[form], batch, is_wide=True, limit_bytes=limit_bytes) as compiled:
                            found[form] = _wide_problem(truth, compiled) or found[form]
                except Exception as error:  # noqa: BLE001  # whatever it is, the form is left out
                    found[form] = f"{type(error).__name__}: {error}"
        finally:
            back()
        release_memory()
        moved()
        if number is None:
            held.close()
        try:
            returned = eager(batch)
            release_memory()
            own = _gaps(captured, truth, returned)
        finally:
            if number is not None:
                back()
        if "result" in own:
            return dict.fromkeys(forms, "eager returned something else than when it was recorded"), returned
        usual = {
            name: Distance(group, largest(value), ulp, own.get(name, 0.0), math.inf)
            for name, group, value, ulp in _values(truth)
        }
        return {form: gaps if isinstance(gaps, str) else _sample(usual, gaps) for form, gaps in found.items()}, returned


def _truth(captured: Captured, batch: Any) -> Left:
    release_memory()  # a step in float64 comes on top of what is kept of earlier steps
    try:
        return float64_step(captured, batch, limit_bytes=float64_limit_bytes(captured))
    except Exception as error:  # whatever an op says that has no kernel for float64
        raise CaptureError(f"there is no float64 step to compare with: {error}") from error


def _wide_problem(truth: Left, compiled: Left) -> str:
    """Describe a value of a compiled float64 step that rounding does not explain. Empty if there is none."""
    scales: dict[str, list[float]] = {}
    for _, group, value, _ in _values(truth):
        scales.setdefault(group, []).append(largest(value))
    # A place that only one form reads (a constant of the trace) is not changed by the other.
    found = {source.name: source.get() for source, _ in truth.places}
    found |= {source.name: value for source, value in compiled.places}
    found |= {f"result {place}": value for place, value in enumerate(compiled.result)}
    for name, group, value, _ in _values(truth):
        gap = _gap(compiled.memory.present(found[name]), value)
        if not gap <= WIDE_TOLERANCE * max(largest(value), median(scales[group])):
            return f"in float64, {name} is off by {gap:.3g}"
    return ""


def _sample(usual: Sample, gaps: dict[str, float]) -> Sample:
    """The distances of a form, from those of a form that leaves nothing."""
    return {name: replace(one, form=gaps.get(name, math.inf)) for name, one in usual.items()}


def _values(truth: Left) -> Iterator[tuple[str, str, Any, float]]:
    """Each value of the float64 step: its name, its group, the value, and the precision that the step has it in."""
    for source, value in truth.each():
        key = f"{source.kind}.{source.key}" if isinstance(source, Entry) and source.kind != "parameter" else source.kind
        yield source.name, key, value, ulp_of(source.get())
    for place, value in enumerate(truth.result):
        yield f"result {place}", "result", value, torch.finfo(torch.float32).eps


def _gaps(captured: Captured, truth: Left, result: Any) -> dict[str, float]:
    """Distance of the values at the places, and of this result, from the float64 step."""
    found = {source.name: _gap(source.get(), value) for source, value in truth.each()}
    spec = captured.trace.result.spec
    own, *others = tree_unflatten(list(range(spec.num_leaves)), spec)
    try:  # a list or dict of the result that stands at a place is one leaf
        leaves = spec.flatten_up_to((result, *others))[: len(tree_leaves(own))]
    except ValueError:
        return found | {"result": math.inf}  # it is another tree
    return found | {f"result {place}": _gap(leaf, truth.result[place]) for place, leaf in enumerate(leaves)}


def _gap(value: Any, truth: Any) -> float:
    is_equal = not isinstance(value, torch.Tensor) and not isinstance(truth, torch.Tensor) and value == truth
    return 0.0 if is_equal else gap_of(value, truth)


def _move_rates(captured: Captured, batch: Any, factor: float) -> None:
    """Change the numbers of the optimizer, unless the step then takes another branch."""
    places = captured.trace.places
    numbers = [(entry, entry.get()) for entry in places.numbers if entry.kind == "group"]
    for entry, value in numbers:
        if isinstance(value, float):
            entry.set(value * (factor if entry.key == "lr" else OTHER_FACTOR))
    if captured.numbers(batch) is None:
        for entry, value in numbers:
            entry.set(value)
    with torch.no_grad():
        for entry in places.tensors:
            if entry.kind == "group" and entry.key == "lr":
                entry.get().mul_(factor)


def float64_peak_bytes(captured: Captured) -> float:
    """Return the peak size of a step in float64. Tensors of integers count as if they grew, too."""
    values = (node.meta.get("val") for node in captured.lowered.slot_of)
    floats = (v.element_size() for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())
    return serial_peak_bytes(captured.graph) * _LARGEST / min(floats, default=_LARGEST)


def float64_limit_bytes(captured: Captured) -> float:
    """Return how much a step in float64 may hold between two ops."""
    graph = captured.graph
    lasting = sum(buffer.size_bytes for buffer in graph.buffers if buffer.life in ("lasting", "input"))
    return max(LEAST_LIMIT_BYTES, LIMIT_SHARE * (serial_peak_bytes(graph) - lasting))
