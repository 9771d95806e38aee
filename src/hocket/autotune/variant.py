"""One variant of a scheduled step: its search, its guards, its plan, the audits and the watch for drift.

Every call is a real training step of the user's. During the search the variant carries out the requests of its tuner
(see `hocket.autotune.tuner`). After the decision it runs the faster of plan and eager. Planned steps are audited, and
the verdict is watched (`hocket.autotune.upkeep`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any

from hocket.adaptation import Drift
from hocket.autotune.audit import Auditor
from hocket.autotune.candidate import Candidate, Item, TunerConfig
from hocket.autotune.decision import UNDECIDED, Decision, Verdict
from hocket.autotune.options import backend_of, unplannable
from hocket.autotune.runner import InexactError, RefusedError, StepRunner, again_by_eager, refusal
from hocket.autotune.searching import PlanSearch
from hocket.autotune.tuner import Tuner
from hocket.autotune.upkeep import StepWatch, Upkeep
from hocket.autotune.verification import Difference
from hocket.errors import CaptureError, PlanError, StaleCaptureError
from hocket.pystate.changes import named
from hocket.pystate.guards import Guards
from hocket.tracing.captured import Captured
from hocket.tracing.raising import is_other_branch

log = logging.getLogger(__name__)

# Calls in a row that need nothing of Python, and recordings of a step whose branch on data changes.
MAX_DIRECT, MAX_RECORDED = 25, 3
# Steps with another branch, and within how many, for a step to be recorded again.
MAX_BRANCHES, BRANCH_STEPS = 8, 64


class Variant:
    """A step in one signature and Python state, called like the step. `refused` says why it may not be captured."""

    def __init__(self, config: TunerConfig, *, refused: str = "") -> None:
        self.is_refused = False  # the step stays eager as long as the guards hold, or for good if there are none
        self.may_be_rare = False  # it is refused for what the step did, not for what a graph of it has computed
        self.decision: Decision = UNDECIDED  # the last decision
        self.history: tuple[Verdict, ...] = ()  # all verdicts, the first one first
        self._refused = refused or unplannable(config.places)
        self.backend = backend = backend_of(config)
        self._config = config = replace(config, step=backend.eager(config.step))
        self._runner = StepRunner(config, backend)
        self._tuner = Tuner(config, backend)
        self._auditor = Auditor(backend, config.clock)
        self._search: PlanSearch | None = PlanSearch(self._begin)
        self._numbers = count(1)  # of the steps of its searches
        self._followed_wrongly: set[int] = set()  # leaves of the tape whose other values the plan computes wrongly with
        # what the first search took beyond its steps, or None before it has ended with a comparison
        self.search_s: float | None = None
        self._watch: StepWatch | None = None
        self._branches: deque[int] = deque(maxlen=MAX_BRANCHES)  # the last steps that took another one
        self._num_recorded = 1

    @property
    def settled(self) -> bool:
        """True if a decision stands, and no search is under way. A look at the decision is no search."""
        return self._search is None or self._search.is_look

    @property
    def guards(self) -> Guards | None:
        return self._tuner.admission.guards

    @property
    def forms(self) -> dict[str, Captured]:
        """The step as graphs by form, the likeliest first (see `hocket.tracing.variants`). Empty at first."""
        return self._tuner.admission.forms

    @property
    def captured(self) -> Captured | None:
        """Its likeliest form, or None until it is captured."""
        return next(iter(self.forms.values()), None)

    @property
    def difference(self) -> Difference | None:
        """Result of the verification."""
        return self._tuner.admission.difference

    def fits(self, batch: Any) -> bool:
        """Return True if this variant may make the call. A planned one checks its inputs and numbers in the call."""
        if self.guards is not None and not self.guards.hold():
            return False
        if self.settled or self.captured is None:
            return True
        return self.captured.holds(batch) or bool(self.captured.moved(batch))

    @property
    def lacks_state(self) -> bool:
        """True if the graph would be valid once the optimizer has its state, which an eager step makes."""
        lacks = self.captured is not None and self.captured.lacks_state
        return lacks and (self.guards is None or self.guards.hold())

    @property
    def is_eager(self) -> bool:
        """True if a call runs the user's own step and nothing else."""
        return self._search is None and self.decision.best is None

    @property
    def is_final(self) -> bool:
        """True if a decision stands, and no form is being compiled that could change it."""
        return self.settled and (self._tuner.compiler is None or not self._tuner.compiler.has_forms_left)

    @property
    def has_drifted(self) -> bool:
        """True if steps take another time than when it was decided. A region is recorded anew then, by its owner."""
        return self._watch is not None and self._watch.has_drifted

    def renew(self) -> bool:
        """Make the guards anew where they failed though nothing has changed (the code that ran since names more)."""
        guards = self.guards
        return guards is not None and not guards.hold() and guards.renew()

    def __call__(self, batch: Any) -> Any:
        """One training step.

        A `StaleCaptureError` says that the capture is no longer valid: nothing was run, and a search is over. An error
        of the step ends a search, too, and an earlier decision stands then.
        """
        best = self.decision.best
        if self._search is not None and best is not None:
            moved = best.captured.moved(batch)
            if moved:
                return self._moved(best, batch, moved)
        if self._search is None and self._watch is not None and (num_steps := self._watch.counts()):
            recent_ms = tuple(self._watch.recent_ms)
            self._search = PlanSearch(lambda: self._tuner.look(self.decision, num_steps, recent_ms), is_look=True)
        if self._search is not None:
            return self._searched(self._search, batch)
        if best is None:
            return self._config.step(batch) if self._watch is None else self._observed(self._config.step, batch)
        if self._auditor.audit.counts():
            return self._audited(best, batch)
        try:
            return self._observed(best.executor, batch)
        except StaleCaptureError:
            moved = best.captured.moved(batch)
            if not moved:
                raise
            return self._moved(best, batch, moved)
        except Exception as error:  # noqa: BLE001  # raised again, unless eager can make the step
            failure = error
        return self.made_again(failure, batch)

    def made_again(self, error: BaseException, batch: Any) -> Any:
        """The step by eager, where a planned one has raised that left no trace, else its error again.

        What the user's step does before it raises is done then, and its error is that of his own line.
        """
        if self.decision.best is None:
            raise error
        result = again_by_eager(error, self.decision.best.executor, self._config.step, batch)
        if is_other_branch(error.args):
            self._note_branch(str(error), self._auditor.audit.num_steps)
        return result

    def direct(self, recognised: Any) -> Any:
        """The planned step as native calls until Python is needed next, or None if it has no such form.

        `recognised` is the native check of this variant's signature.
        """
        best = self.decision.best
        num_calls = self.calls_until_upkeep(MAX_DIRECT)
        if recognised is None or best is None or num_calls < 1 or self._config.clock is not perf_counter:
            return None
        if (binding := best.executor.binding) is None:
            return None
        guards = () if self.guards is None else (self.guards.condition,)
        return binding.direct((recognised, *guards), num_calls)

    def calls_until_upkeep(self, limit: int) -> int:
        """Planned calls, at most `limit`, that need nothing of Python before the next audit or look."""
        return min(limit, *(one.due - one.num_steps - 1 for one in self._upkeep)) if self._search is None else 0

    @property
    def _upkeep(self) -> tuple[Upkeep, ...]:
        looks = None if self._watch is None else self._watch.upkeep
        return (self._auditor.audit,) if looks is None else (self._auditor.audit, looks)

    def note_direct(self, times_ms: Sequence[float], error: BaseException | None) -> None:
        """Direct calls took these times, and the last one ended with an error."""
        for one in self._upkeep:
            one.num_steps += len(times_ms)
        for time_ms in times_ms:
            self._note(time_ms)
        if error is not None and self.decision.best is not None:
            self.decision.best.executor.annotate(error)

    def compile(self) -> bool:
        """Compile further forms now and wait for them. Return True if there are any, which the next calls try."""
        compiler = self._tuner.compiler
        if compiler is None or not self.settled or self._watch is None:
            return False
        compiler.start()
        compiler.wait()
        if compiler.is_done:
            self._search_anew()
        return compiler.is_done

    def close(self) -> None:
        """Close all lanes, and end what is being compiled."""
        self.decision.close()
        if self._tuner.compiler is not None:
            self._tuner.compiler.close()

    def _observed(self, run: Callable[[Any], Any], batch: Any) -> Any:
        clock = self._config.clock
        start = clock()
        result = run(batch)
        self._note((clock() - start) * 1e3)
        return result

    def _note(self, step_ms: float) -> None:
        compiler = self._tuner.compiler
        if self._watch is None or self._search is not None:
            return
        if compiler is not None and compiler.note(step_ms, self.decision.ahead):
            log.info("hocket: the step was compiled: plans of these forms are tried, too")
            self._search_anew()
        elif (drift := self._watch.note(step_ms)) and not self._config.is_region:
            log.info("hocket: %s: the step is profiled and plans are tried again", drift)
            self._search_anew(drift)

    def _audited(self, best: Candidate, batch: Any) -> Any:
        """Compare a planned step with eager, whose results are kept. The step goes eager if they differ."""
        result, error = self._runner.audited(self._auditor.step, best, batch)
        changes = self.guards.unexpected() if self.guards is not None and not self.guards.hold() else []
        if changes:
            problem = f"it changes {named(changes)} in some steps; planned steps before this one did not"
            error = RefusedError(problem)
        if isinstance(error, InexactError) and self.backend.distrust_widths():
            log.info("hocket: %s; searching again with all ops at eager's number of threads", error)
            self._search_anew()
        elif error is not None:
            self._refuse(error)
        return result

    def _search_anew(self, drift: Drift | None = None) -> None:
        self._search = PlanSearch(lambda: self._tuner.search_again(drift))

    def _begin(self) -> Generator[Item, Any, Decision]:
        if self._refused:
            raise RefusedError(self._refused)
        return self._tuner.search()

    def _moved(self, best: Candidate, batch: Any, moved: set[int]) -> Any:
        """A step in which numbers have values that were never compared with eager: they are now.

        Where the plan does not follow them, it is good for the values that it was recorded with. Where that is known
        already, nothing is run, and a `StaleCaptureError` says so.
        """
        if not moved.isdisjoint(self._followed_wrongly):
            raise StaleCaptureError("captured for other values of numbers that the plan does not follow")
        result, error = self._runner.audited(self._auditor.step, best, batch)
        if error is not None or not moved.isdisjoint(best.captured.moved(batch)):
            log.info("hocket: a number that changes is not followed: %s", error)
            self._followed_wrongly |= moved
        return result

    def _searched(self, search: PlanSearch, batch: Any) -> Any:
        clock, runner, before = self._config.clock, self._runner, self.decision
        start = clock()
        runner.start()
        if self._config.is_region:
            for captured in self.forms.values():
                captured.example.value = batch  # its owner may have freed what the batch before had in memory
        try:
            self._go_on(search, batch)
        except StaleCaptureError as error:
            if not runner.is_done:
                raise  # another variant makes this call
            if is_other_branch(error.args):
                self._note_branch(str(error), 0)
        except BaseException as error:  # noqa: BLE001  # whatever fails in a search, eager can still make the step
            self._failed(search, error, batch)
        finally:
            search.spent_s += clock() - start
            search.num_calls += 1
            if self._search is None:
                self._keep_up(search, before)
        return runner.taken()

    def _keep_up(self, search: PlanSearch, before: Decision) -> None:
        """`search` is over, and `before` stood at its last step: watch what steps take from now on."""
        decision = self.decision
        if self.search_s is None and decision.eager_ms:
            self.search_s = max(0.0, search.spent_s - search.num_calls * median(decision.eager_ms) / 1e3)
        if not self._config.guard or not decision.eager_ms or self.backend.is_asynchronous:
            self._watch = None
            return
        if self._watch is None:
            self._watch = StepWatch(self._config.drift, looks=not self._config.is_region)
        self._watch.decided(decision, before, search)

    def _go_on(self, search: PlanSearch, batch: Any) -> None:
        """Carry out items of the search until one of them has made the step of this call."""
        runner = self._runner
        while not runner.is_done and self._search is not None:
            item = search.item
            try:
                found = runner.perform(item, batch)
            except InexactError as error:
                found = error
            decision = search.answer(found)
            if decision is self.decision:
                self._search = None  # a look: it stands
            elif decision is not None:
                self._settle(decision)
                if not decision.is_recalled:
                    self._tuner.recall.keep(decision)
            if runner.is_done and self._config.on_progress is not None:
                self._config.on_progress(item.stage, next(self._numbers))

    def _failed(self, search: PlanSearch, error: BaseException, batch: Any) -> None:
        """Refuse the step, which eager has made then, where an error is not the user's own. That one is raised."""
        config, runner = self._config, self._runner
        is_branch = is_other_branch(error.args)  # of a step on copies
        asked_for = config.strict and isinstance(error, (CaptureError, RefusedError))
        asked_for = asked_for or (config.plan is not None and isinstance(error, PlanError))
        if not isinstance(error, Exception) or runner.failed or asked_for:
            self._give_up(search)
            if isinstance(error, RefusedError):
                raise CaptureError(str(error)) from error.__cause__
            raise error
        if not runner.is_done:
            try:
                runner.eager(batch)
            except BaseException:
                self._give_up(search)  # eager fails, too: it was the batch
                raise
        if is_branch:
            self._give_up(search)
            self._note_branch(str(error), 0)
        else:
            self._refuse(error)

    def _give_up(self, search: PlanSearch) -> None:
        """End the search. An earlier decision stands, and without one the first search begins anew."""
        self._search = None if self.history else PlanSearch(self._begin, search.spent_s)

    def _note_branch(self, text: str, number: int) -> None:
        """Eager has made a step that takes another branch than the recorded one."""
        self._branches.append(number)
        if len(self._branches) < MAX_BRANCHES or number - self._branches[0] >= BRANCH_STEPS:
            return
        self._branches.clear()
        if self._num_recorded >= MAX_RECORDED:
            line = text.splitlines()[0].rpartition(" at ")[2]
            self._refuse(RefusedError(f"the branch that it takes on data at {line} changes from step to step"))
            return
        log.info("hocket: the step has another branch now, and is recorded again: %s", text.splitlines()[0])
        self._num_recorded += 1
        self.decision.close()
        self.decision, self._watch = UNDECIDED, None
        self._tuner = Tuner(self._config, self.backend)
        self._auditor = Auditor(self.backend, self._config.clock)
        self._search = PlanSearch(self._begin)

    def _refuse(self, error: Exception) -> None:
        """Stay eager as long as the guards hold, or for good if there are none."""
        reason = refusal(error)
        level = logging.INFO if self._config.is_tentative else logging.WARNING
        log.log(level, "hocket: the step stays eager: %s", reason)
        self.is_refused, self._watch = True, None
        self.may_be_rare = self.guards is not None and not self._tuner.admission.fingerprints
        self._settle(Decision("eager", reason))

    def _settle(self, decision: Decision) -> None:
        chosen = decision.candidate
        for candidate in (*self.decision.candidates, *decision.candidates):
            if chosen is None or candidate.executor is not chosen.executor:
                candidate.executor.close()
        self._search = None
        self.conclude(decision)

    def conclude(self, decision: Decision) -> None:
        """Let this decision stand after those before it."""
        self.decision = decision
        self.history = (*self.history, decision.verdict)
        log.info("hocket: %s: %s", decision.kind, decision.reason)
