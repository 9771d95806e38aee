"""The first steps of a variant: watch the step, record its graph, and verify that the graph computes the same.

Every call makes one ordinary training step, and runs the user's Python once::

    calls 1 to 3    watched: state that the step writes and reads, and calls into the outside world
    call 4          recorded: its ops become a graph
    calls 5 to 7    verified: eager, and from the same state once more by plan, eager's results being kept
    three to six    only if forms may differ by rounding: before each, the step in float64, by plan, and in each form

A step that writes state that no graph can write, or that cannot be a graph, is refused with the reason and stays eager.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Mapping
from typing import Any

from hocket.autotune.candidate import (
    Item,
    RecordedStep,
    SampledForms,
    TimedStep,
    TunerConfig,
    VerifiedStep,
    WatchedStep,
)
from hocket.autotune.closeness import MAX_SAMPLES, Closeness
from hocket.autotune.forms import MAX_OPS, FormCompiler, rewritten_forms
from hocket.autotune.recording import RecordedForm
from hocket.autotune.runner import RefusedError
from hocket.autotune.verification import Difference
from hocket.backends import Backend, CpuBackend
from hocket.pystate.changes import in_words, named
from hocket.pystate.guards import Guards
from hocket.pystate.watch import MAX_WATCHED, PurityWatch, Watched
from hocket.tracing.captured import Captured, relowered
from hocket.tracing.lowering.lower import UPDATE_CHAINS
from hocket.tracing.state import inventory
from hocket.tracing.variants import forms_of, plain_of

log = logging.getLogger(__name__)

# Watched steps before a capture: the first one imports and allocates, the second and the third are compared.
WATCHED_STEPS = 3
VERIFIED_STEPS = 3
# Steps that are recorded until one did nothing for the first time.
MAX_RECORDED = 3
# A call that runs no op is no step yet, as while a memory to learn from fills. The pauses between records of such calls
# double, so that the last ones are some 8,000 calls after the first.
MAX_IDLE = 12


class Admission:
    """Watches, captures and verifies one variant of a step."""

    def __init__(self, config: TunerConfig, backend: Backend, compiler: FormCompiler | None = None) -> None:
        # conditions under which this variant may run, or None until a step was watched
        self.guards: Guards | None = None
        self.fingerprints: dict[str, str] = {}  # of all forms that were captured
        self.forms: dict[str, Captured] = {}  # captured forms that compute what eager computes, the likeliest first
        self.left_out: dict[str, str] = {}  # form -> why it is not compared
        self.difference: Difference | None = None  # result of the verification
        self._config = config
        self._backend = backend
        self._compiler = compiler

    def capture(self) -> Generator[Item, Any, None]:
        """Ask for the steps that it takes until the step is captured, or refuse it."""
        if not self._config.is_region:
            yield from self._watched()
        places = inventory(self._config.model, self._config.optimizer)
        reason = ""
        for form in forms_of(places):
            found = yield from self._recorded(form)
            if found.captured is None:
                reason = reason or found.reason
            elif not self.forms or len(found.captured.graph) <= MAX_OPS:
                self.add({form: self._chained(found.captured)})
        if not self.forms:
            raise RefusedError(reason)
        if self._config.numerics == "close":
            self.add(rewritten_forms(next(iter(self.forms.items())), self._compiler))

    def _chained(self, captured: Captured) -> Captured:
        """The captured step with its updates as chains, unless a given plan is one of the ops as they were recorded."""
        if not isinstance(self._backend, CpuBackend):
            return captured
        chained = relowered(captured, split=False, native_ops=(UPDATE_CHAINS,))
        if (plan := self._config.plan) is None:
            return chained
        return min((chained, captured), key=lambda one: len(one.graph.by_name.keys() ^ plan.lane_of.keys()))

    def verify(self, num_steps: int = VERIFIED_STEPS) -> Generator[Item, Any, None]:
        """Ask for `num_steps` verified ones in each form, and leave out those that differ. Without any left, refuse."""
        rewritten = {form: captured for form, captured in self.forms.items() if plain_of(form) != form}
        forms = {form: captured for form, captured in self.forms.items() if form not in rewritten}
        self.forms = dict(forms)
        for number in range(num_steps):
            for form, captured in forms.items():
                if form in self.forms:
                    yield from self._verified(form, captured)
            if number == 0 and len(self.forms) < len(forms):
                log.info("hocket: of the forms %s, %s compute what eager does", list(forms), list(self.forms))
        for plain, captured in list(self.forms.items()):
            others = {form: one for form, one in rewritten.items() if plain_of(form) == plain}
            self.forms |= (yield from self._close(captured, others, num_steps)) if others else {}

    def add(self, forms: Mapping[str, Captured]) -> None:
        """Take in further forms, which are not verified yet."""
        self.forms |= forms
        self.fingerprints |= {form: captured.graph.fingerprint for form, captured in forms.items()}

    def keep(self, forms: Collection[str]) -> None:
        """Forget all forms but these and the plain ones: graphs are not small (8 KB an op), nor is verifying them."""
        self.forms = {
            form: captured for form, captured in self.forms.items() if form in forms or plain_of(form) == form
        }

    def _watched(self) -> Generator[Item, Any, None]:
        watch: PurityWatch = self._config.watch
        for _ in range(MAX_WATCHED):
            seen: Watched = yield WatchedStep()
            if seen.before is not None and (why := self._compiled(watch) or in_words(seen.findings)):
                self.guards = Guards(seen.before, watch)  # what the refusal is about
                raise RefusedError(why)
            if seen.settled and watch.num_watched >= WATCHED_STEPS:
                return
        newest = watch.executed.newest or "of torch's own"
        raise RefusedError(
            f"it ran code for the first time in each of {MAX_WATCHED} steps (the last time {newest}): "
            "make functions once, outside the step, or give it more steps to warm up"
        )

    def _compiled(self, watch: PurityWatch) -> str:
        if not (compiler := watch.executed.compiled) or self._config.numerics != "bitwise":
            return ""
        return (
            f"it calls code that torch.compile has made by {compiler}, whose bits are not those of its ops: leave "
            "torch.compile out, or schedule with numerics='rounding'"
        )

    def _recorded(self, form: str) -> Generator[Item, Any, RecordedForm]:
        found: RecordedForm = yield RecordedStep(form)
        if found.is_idle:
            yield from self._idle(form, found)
            yield from self._watched()  # the first step with ops may have imported something, and made state
            found = yield RecordedStep(form)
        for _ in range(MAX_RECORDED - 1):
            if found.is_settled:
                break
            found = yield RecordedStep(form)
        self.guards = found.guards
        return found

    def _idle(self, form: str, found: RecordedForm) -> Generator[Item, Any, None]:
        """Let ordinary calls pass until one runs ops, or refuse the step. In `found` none did."""
        log.info("hocket: %s; until one runs ops, calls are watched from time to time", found.reason)
        for number in range(1, MAX_IDLE):
            for _ in range(1 << number):
                yield TimedStep(stage=WatchedStep.stage)
            again: RecordedForm = yield RecordedStep(form)
            if not again.is_idle:
                return
        self.guards = found.guards
        raise RefusedError(found.reason)

    def _verified(self, form: str, captured: Captured) -> Generator[Item, Any, None]:
        """One ordinary step, made again by the plan of eager's order."""
        plain = self._backend.executor(captured, self._backend.serial_plan(captured))
        try:
            found: Difference = yield VerifiedStep(form, plain)
        finally:
            plain.close()
        self.expect_no_writes()
        if not found.equal:
            del self.forms[form]
            self.left_out[form] = _words(found)
            if not self.forms:
                raise RefusedError(_words(found))
        elif self.difference is None or found.relative > self.difference.relative:
            self.difference = found

    def _close(
        self, plain: Captured, forms: dict[str, Captured], num_samples: int
    ) -> Generator[Item, Any, dict[str, Captured]]:
        """Those of the rewritten forms that are as close to the float64 step as eager is (see `closeness`)."""
        captures = {"": plain, **forms}
        executors = {
            form: self._backend.executor(one, self._backend.serial_plan(one)) for form, one in captures.items()
        }
        own = executors.pop("")
        seen = dict.fromkeys(forms, Closeness())
        try:
            for number in range(MAX_SAMPLES):
                left = {form: executor for form, executor in executors.items() if not seen[form].error}
                if not left or (number >= num_samples and all(one.holds or one.error for one in seen.values())):
                    break
                found = yield SampledForms(plain, own, left, number)
                self.expect_no_writes()
                seen |= {form: seen[form].and_sample(one) for form, one in found.items()}
        finally:
            for executor in (own, *executors.values()):
                executor.close()
        for form, one in seen.items():
            if not one.holds:
                log.info("hocket: the form %r is left out: %s", form, one.why)
                self.left_out[form] = f"not as close to float64 as eager: {one.why}"
        return {form: captured for form, captured in forms.items() if seen[form].holds}

    def expect_no_writes(self) -> None:
        """Raise if an eager step that was just made has changed what its graph would not."""
        if self.guards is not None and not self.guards.hold() and (changes := self.guards.unexpected()):
            raise RefusedError(f"it changes {named(changes)} in some steps")


def _words(found: Difference) -> str:
    if found.error:
        return f"the captured step failed where eager did not: {found.error}"
    words = f"the captured step differs from eager by {found.max_abs_diff:.3g} in {found.where}"
    return (
        f"{words}, as a step may that is not deterministic; numerics='rounding' allows it"
        if found.is_rounding
        else words
    )
