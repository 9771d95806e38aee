"""A decision met again: its plan is checked, one step verified, a few compared, and then it runs.

What was clear before only has to hold in one short comparison, which begins with the plan. What was not clear, a plan
that made no difference or eager beside other programs, is compared in full, without a search. A plan that no
longer checks, or that now loses, is searched for as if nothing had been remembered.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any

from hocket.autotune.admission import Admission
from hocket.autotune.candidate import Candidate, Item, TimedStep, TunerConfig
from hocket.autotune.comparison import MOMENTS_DIFFER, StepComparison, compare_steps, release_wide, take_turn
from hocket.autotune.decision import Decision
from hocket.autotune.store import Remembered, RememberedPlan, about_step
from hocket.backends import Backend
from hocket.checking import check
from hocket.errors import FormatError, HocketError
from hocket.ir import Plan
from hocket.reporting import lower_quartile
from hocket.tracing.captured import relowered
from hocket.tracing.variants import reference_of

log = logging.getLogger(__name__)


class Recall:
    """Keeps the decisions of one variant of a step, and finds those that were kept."""

    def __init__(self, config: TunerConfig, backend: Backend, admission: Admission) -> None:
        self._config = config
        self._backend = backend
        self._admission = admission

    def search(self) -> Generator[Item, Any, Decision | StepComparison | None]:
        """Ask for the steps that it takes. A `RefusedError` says that the captured step is not what eager computes.

        Returns the remembered decision, a new comparison of its plan if the old one was not clear or promised more than
        a few steps show now, or None to search.
        """
        known = self._config.store.find(self._about()) if self._config.recalls else None
        if known is None:
            return None
        if known.plan is None:
            if known.was_beside_others:
                return None
            yield TimedStep()
            return _decision(known, None)
        try:
            candidate = self._candidate(known.plan)
        except HocketError as error:
            log.warning("hocket: a remembered decision is ignored: %s", error)
            return None
        found = yield from self._checked(known, candidate)
        if found is None:
            candidate.executor.close()
        return found

    def _checked(
        self, known: Remembered, candidate: Candidate
    ) -> Generator[Item, Any, Decision | StepComparison | None]:
        if known.kind == "eager" and known.is_clear and not known.was_beside_others:
            yield TimedStep()
            return _decision(known, candidate)
        yield from self._admission.verify(1)
        if candidate.form not in self._admission.forms:
            return None
        after_eager = self._admission.expect_no_writes
        if not known.is_clear or known.kind == "eager":
            return (yield from compare_steps([candidate], self._backend, after_eager))
        decision = _decision(known, candidate)
        if self._config.guard:
            planned_ms = yield from take_turn(candidate, lambda: None)
            release_wide(candidate, self._backend)
            slowdown = lower_quartile(planned_ms) / lower_quartile((yield from take_turn(None, after_eager)))
            if slowdown > MOMENTS_DIFFER:
                # Other plans may be faster. Where it is slower than its interval says, only its promise is renewed.
                log.info("hocket: the remembered plan takes %.2fx of eager's time now; plans are searched", slowdown)
                return None
            if not decision.is_kept(slowdown):
                return (yield from compare_steps([candidate], self._backend, after_eager))
        return decision

    def keep(self, decision: Decision) -> None:
        """Remember what a search has found."""
        best = decision.candidate
        plan = None
        if best is not None:
            plan = RememberedPlan(
                best.form,
                best.captured is not self._admission.forms[best.form],
                str(best.plan),
                best.steps_ms,
                best.costs,
            )
        self._config.store.keep(self._about(), Remembered(**decision.figures, plan=plan))

    def _about(self) -> dict[str, Any]:
        config = self._config
        return about_step(
            self._admission.fingerprints,
            self._backend.machine,
            planner=config.planner if config.plan is None else f"given: {config.plan}",
            guard=config.guard,
            executor=config.executor,
            numerics=config.numerics,
        )

    def _candidate(self, known: RememberedPlan) -> Candidate:
        captured = self._admission.forms.get(known.form)
        if captured is None:
            raise FormatError("plan", "form", f"the step has no form {known.form!r}")
        if known.split:
            captured = relowered(captured, split=True)
        plan = Plan.parse(known.text)
        check(captured.graph, plan, self._backend.machine)
        predicted = self._backend.predict(captured, plan, known.costs)
        reference = reference_of(known.form, self._admission.forms)
        lanes = self._backend.executor(captured, plan)
        return Candidate(known.form, captured, known.costs, plan, predicted, lanes, reference, known.steps_ms)


def _decision(known: Remembered, candidate: Candidate | None) -> Decision:
    return Decision(
        **known.figures | {"reason": f"{known.reason}; found by an earlier search", "cores_of_others": 0.0},
        best=candidate if known.kind == "planned" else None,
        candidates=() if candidate is None else (candidate,),
        is_recalled=True,
    )
