"""The search for the fastest way of making a step, as a coroutine that yields what to run next.

It never sees a batch or a result: a variant of the schedule carries out each item on the user's real step (see
`hocket.autotune.candidate`) and sends back an observation::

    admission    watch, record, verify           the step is pure, its graph computes the same
    recall       a remembered decision: a short comparison, and no search
    profile      duration of each op at chosen widths, joint and split. A step with nothing to gain ends here
    plans        by every planner, checked and simulated. Those predicted to be fastest go on
    comparison   eager and these plans in turns
    once more    without the pairs of ops that disturbed each other side by side
    Decision
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from hocket.adaptation import CoRun, Drift, co_runs, interfering
from hocket.adaptation.cpu_use import CpuUse
from hocket.autotune.admission import Admission
from hocket.autotune.candidate import Candidate, Item, TimedStep, TunerConfig
from hocket.autotune.comparison import (
    SETTLING_MS,
    StepComparison,
    compare_steps,
    expected_interval,
    release_wide,
    speedup_text,
    take_turn,
)
from hocket.autotune.decision import Decision
from hocket.autotune.forms import FormCompiler
from hocket.autotune.recall import Recall
from hocket.autotune.runner import InexactError, RefusedError
from hocket.autotune.shortlist import Profile, Proposal, finalists, longest_chain, profile_of
from hocket.autotune.store import MAX_CORES_OF_OTHERS
from hocket.backends import Backend, CpuBackend
from hocket.checking import check
from hocket.errors import PlanError
from hocket.execution.base import Executor
from hocket.ir import Plan
from hocket.planning import plan
from hocket.planning.base import misplaced
from hocket.reporting import lower_quartile
from hocket.tracing.captured import Captured, relowered
from hocket.tracing.lowering.passes import has_joint_backward
from hocket.tracing.variants import plain_of, reference_of

log = logging.getLogger(__name__)

# A form is not planned where its serial steps take this many times those of the same form rewritten.
SLOWER_FORM = 1.1
# A step of which the longest chain of ops leaves less than this share of eager's time is decided at once; eager steps
# to see whether are spent where the chain leaves less than the other of the fastest profiled step.
NOTHING_LEFT, HARDLY_ANYTHING_LEFT = 0.02, 0.1


@dataclass(frozen=True)
class Missed:
    """A decision that was not kept `num_steps` after it: the plan took `slowdown` of eager's time."""

    slowdown: float
    num_steps: int

    def __str__(self) -> str:
        return f"plan took {self.slowdown:.2f}x of eager's time {self.num_steps} steps after the verdict"


class Tuner:
    """Searches for one variant of a step."""

    compiler: FormCompiler | None = None  # compiles further forms in the background, or None
    _cpu_use: CpuUse

    def __init__(self, config: TunerConfig, backend: Backend) -> None:
        # Kernels of compiled forms need native lanes.
        if config.numerics == "close" and config.guard and config.plan is None and isinstance(backend, CpuBackend):
            self.compiler = FormCompiler(config.store.compiled_folder)
        self.admission = Admission(config, backend, self.compiler)  # knowledge of the step so far
        self.recall = Recall(config, backend, self.admission)  # keeps decisions, and finds those that were kept
        self._config = config
        self._backend = backend

    def search(self) -> Generator[Item, Any, Decision]:
        """Ask for steps until it is decided, or refuse the step."""
        yield from self.admission.capture()
        self._cpu_use = CpuUse()
        try:
            recalled = yield from self.recall.search()
        except InexactError:
            recalled = None
        if isinstance(recalled, Decision):
            if self.compiler is not None and recalled.candidate is not None:
                self.compiler.only_fastest_layout({recalled.candidate.form: recalled.candidate.rank_ms})
            return recalled
        if recalled is not None:
            return self._decided(recalled, None, None)
        yield from self.admission.verify()
        return (yield from self.search_again(None))

    def search_again(self, drift: Drift | None) -> Generator[Item, Any, Decision]:
        """Search for a step that is admitted, because of `drift` if it is given."""
        try:
            return (yield from self._searched(drift))
        except InexactError as error:
            if not self._backend.distrust_widths():
                raise
            log.info("hocket: %s; searching again with all ops at eager's number of threads", error)
            return (yield from self._searched(drift))

    def look(self, decision: Decision, num_steps: int, recent_ms: Sequence[float]) -> Generator[Item, Any, Decision]:
        """Compare the candidates of a decision with eager once more, `num_steps` after it.

        The latest of these steps took `recent_ms`. Returns `decision` itself where its best plan is as it says beside
        them, else a comparison.
        """
        after_eager, settling_ms = self.admission.expect_no_writes, self._settling_ms()
        self._cpu_use = CpuUse()
        other = decision.candidates[0] if decision.best is None else None
        if decision.best is not None:
            release_wide(decision.best, self._backend)
        other_ms = yield from take_turn(other, after_eager, settling_ms)
        ratio = lower_quartile(recent_ms) / lower_quartile(other_ms)
        slowdown = ratio if other is None else 1 / ratio
        if decision.is_kept(slowdown):
            return decision
        missed = Missed(slowdown, num_steps)
        log.info("hocket: %s: the plans are compared again", missed)
        found = yield from compare_steps(decision.candidates, self._backend, after_eager, settling_ms)
        return self._decided(replace(found, co_runs=decision.co_runs), None, missed)

    def _searched(self, drift: Drift | None) -> Generator[Item, Any, Decision]:
        self._cpu_use = CpuUse()
        if self.compiler is not None and self.compiler.is_done:
            self.admission.add(self.compiler.take())
            yield from self.admission.verify()
        profiles = yield from self._profiles()
        if self._config.guard and self._config.plan is None:
            at_once = yield from self._decided_at_once(profiles, drift)
            if at_once is not None:
                return at_once
        proposals: list[Proposal] = []
        for profile in profiles:
            self._propose(profile, proposals)
        if not proposals:
            raise RefusedError(
                f"no plan of {self._config.planner!r} has eager's bits, of {torch.get_num_threads()} thread(s): call "
                "torch.set_num_threads with as many as a plan has cores, or schedule with numerics='rounding'"
            )
        if not self._config.guard:
            best = self._candidate(min(proposals, key=lambda proposal: proposal.predicted_ms))
            reason = "guard=False: the plan runs whatever it costs"
            return Decision("planned", reason, best=best, candidates=(best,))
        chosen = [self._candidate(proposal) for proposal in finalists(proposals)]
        found = yield from self._compared(chosen)
        apart, pairs = self._kept_apart(found, profiles)
        if apart is not None:
            second = yield from self._compared([found.best, apart])
            found = replace(second, candidates=(*second.candidates, *found.candidates[1:]))
        return self._decided(replace(found, co_runs=pairs), apart, drift)

    def _profiles(self) -> Generator[TimedStep, float, list[Profile]]:
        """Profile each form, with the backward of convolutions whole and split. For a given plan, only its own form.

        Rewritten forms slower than 1.1x the fastest of their group are dropped, also for later searches (after
        compiling or drift).
        """
        given, forms = self._config.plan, self.admission.forms
        if given is not None:
            found = [*forms.items(), *self._taken_apart(list(forms))]
            form, captured = max(found, key=lambda one: len(given.lane_of.keys() & one[1].graph.by_name.keys()))
            check(captured.graph, given, self._backend.machine)
            return [(yield from self._profiled(form, captured))]
        profiles: list[Profile] = []
        for form, captured in forms.items():
            profiles.append((yield from self._profiled(form, captured)))
        if self.compiler is not None:
            self.compiler.only_fastest_layout({profile.form: profile.fastest_ms for profile in profiles})
        fastest_ms: dict[str, float] = {}
        for profile in profiles:
            plain = plain_of(profile.form)
            fastest_ms[plain] = min(profile.fastest_ms, fastest_ms.get(plain, profile.fastest_ms))
        for profile in profiles:
            ratio = profile.fastest_ms / fastest_ms[plain_of(profile.form)]
            if ratio > SLOWER_FORM:
                self.admission.left_out[profile.form] = f"its ops in a row take {ratio:.2f}x of the fastest form's time"
        profiles = [p for p in profiles if p.fastest_ms <= SLOWER_FORM * fastest_ms[plain_of(p.form)]]
        self.admission.keep([profile.form for profile in profiles])
        for form, captured in self._taken_apart([profile.form for profile in profiles]):
            profiles.append((yield from self._profiled(form, captured)))
        return profiles

    def _taken_apart(self, forms: Sequence[str]) -> list[tuple[str, Captured]]:
        """These forms with their convolutions' backward taken apart, where there is such."""
        if not self._backend.splits or self._config.planner == "serial":
            return []
        whole = {form: self.admission.forms[form] for form in forms}
        found = [(form, relowered(one, split=True)) for form, one in whole.items() if has_joint_backward(one.program)]
        return [(form, one) for form, one in found if len(one.graph) > len(whole[form].graph)]

    def _profiled(self, form: str, captured: Captured) -> Generator[TimedStep, float, Profile]:
        rounds = self._backend.profiled(captured)
        steps: list[tuple[Executor, list[float]]] = []
        while True:
            try:
                executor = next(rounds)
            except StopIteration as end:
                ran = [(executor.plan, times_ms) for executor, times_ms in steps]
                return profile_of(form, captured, end.value, self._backend, ran)
            if not steps or steps[-1][0] is not executor:
                steps.append((executor, []))
            steps[-1][1].append((yield TimedStep(executor, "profile", form)))

    def _decided_at_once(
        self, profiles: Sequence[Profile], drift: Drift | None
    ) -> Generator[TimedStep, float, Decision | None]:
        """Decide for eager if a chain of dependent ops takes all of eager's time, or return None.

        Serial plans save the interpreter's time, so the measured time of eager is compared, not the simulated one.
        """
        chain = min((longest_chain(p.captured.graph, p.costs) for p in profiles), key=lambda each: each.duration_ms)
        if chain.duration_ms < (1 - HARDLY_ANYTHING_LEFT) * min(profile.fastest_ms for profile in profiles):
            return None
        eager_ms = yield from take_turn(None, self.admission.expect_no_writes)
        if chain.duration_ms < (1 - NOTHING_LEFT) * lower_quartile(eager_ms):
            return None
        reason = f"no plan can be faster: of {lower_quartile(eager_ms):.4g} ms that eager takes, "
        if chain.op_ms >= (1 - HARDLY_ANYTHING_LEFT) * chain.duration_ms:
            reason += f"op {chain.op!r} alone takes {chain.op_ms / lower_quartile(eager_ms):.0%}"
        else:
            reason += f"ops that wait for each other take {chain.duration_ms / lower_quartile(eager_ms):.0%}"
        others = self._cores_of_others()
        reason += _beside(others) + _because(drift)
        return Decision("eager", reason, eager_ms=tuple(eager_ms), cores_of_others=others)

    def _propose(self, profile: Profile, proposals: list[Proposal]) -> None:
        """Add every planner's plan that differs from the present ones, or the given plan."""
        for made in self._plans(profile):
            proposal = self._proposal(profile, [other.plan for other in proposals if other.profile is profile], made)
            if proposal is not None:
                proposals.append(proposal)

    def _plans(self, profile: Profile) -> Iterator[Plan]:
        if self._config.plan is not None:
            yield self._config.plan
            return
        cores, costs = self._backend.num_cores, profile.costs
        wide = [op for op in costs.durations_us if not any(costs.allows(op, width) for width in range(1, cores + 1))]
        if costs.only_listed and wide:
            log.info("hocket: op %r has eager's bits on more than %d core(s) only", wide[0], cores)
            return
        for name, options in self._backend.candidate_planners(self._config.planner):
            yield plan(profile.captured.graph, profile.costs, self._backend.machine, planner=name, **options)

    def _proposal(self, profile: Profile, known: Sequence[Plan], made: Plan) -> Proposal | None:
        """A plan, checked and simulated. None if there is one like it, or if it has other bits than eager."""
        if any(_alike(made, other) for other in known):
            return None
        check(profile.captured.graph, made, self._backend.machine)
        inexact = misplaced(made, profile.costs)
        if inexact is None:
            return Proposal(profile, made, self._backend.predict(profile.captured, made, profile.costs))
        words = f"op {inexact[0]!r} has not eager's bits with {inexact[1]} thread(s)"
        if made is self._config.plan:
            raise PlanError(f"{words}; numerics='rounding' allows that")
        log.info("hocket: a plan of %s is left out: %s", made.planner, words)
        return None

    def _candidate(self, proposal: Proposal) -> Candidate:
        profile = proposal.profile
        executor = self._backend.executor(profile.captured, proposal.plan)
        plain = reference_of(profile.form, self.admission.forms)
        return Candidate(
            profile.form, profile.captured, profile.costs, proposal.plan, proposal.predicted, executor, plain
        )

    def _compared(self, candidates: Sequence[Candidate]) -> Generator[TimedStep, float, StepComparison]:
        after_eager = self.admission.expect_no_writes
        return compare_steps(candidates, self._backend, after_eager, self._settling_ms())

    def _kept_apart(
        self, found: StepComparison, profiles: Sequence[Profile]
    ) -> tuple[Candidate | None, tuple[CoRun, ...]]:
        """The best plan with ops side by side, made anew without the pairs that interfered (None if there are none).

        Also returns the pairs that ran side by side.
        """
        several = [candidate for candidate in found.candidates if candidate.timelines]
        if not several:
            return None, ()
        judged = min(several, key=attrgetter("rank_ms"))
        pairs = co_runs(judged.timelines, judged.plan, judged.costs)
        avoid = interfering(pairs)
        if not avoid or self._config.plan is not None or self._config.planner not in ("auto", "concurrency"):
            return None, pairs
        profile = next(profile for profile in profiles if profile.captured is judged.captured)
        known = [candidate.plan for candidate in found.candidates if candidate.captured is judged.captured]
        graph, machine = judged.captured.graph, self._backend.machine
        kept_apart = plan(graph, judged.costs, machine, planner="concurrency", avoid=avoid)
        made = self._proposal(profile, known, kept_apart)
        fastest_ms = min(lower_quartile(found.eager_ms), found.best.rank_ms)
        if made is None or made.predicted_ms >= fastest_ms:
            return None, pairs  # not even its prediction, which knows of no interference, beats what was measured
        log.info("hocket: %d pair(s) of ops interfered: a plan that keeps them apart is tried", len(avoid))
        return self._candidate(made), pairs

    def _decided(self, found: StepComparison, apart: Candidate | None, cause: Drift | Missed | None) -> Decision:
        best = found.best
        reason = f"plan {best.plan.planner!r} on {len(best.plan.lanes)} lane(s)"
        if len(self.admission.forms) > 1:
            reason += f" by {best.form!r}"
        others = self._cores_of_others()
        expected = expected_interval(found.low, found.high, others)
        details = f"lower quartiles of {len(best.steps_ms)} steps each, in turns"
        reason += f" takes {speedup_text(found.speedup, expected, details)}"
        if not found.is_clear:
            reason += ": no difference"
        if apart is not None and best.executor is apart.executor:
            reason += f", with {len(interfering(found.co_runs))} pair(s) of ops kept apart that interfered"
        reason += _beside(others) + _because(cause)
        planned = found.is_clear and found.speedup > 1
        return Decision(
            "planned" if planned else "eager",
            reason,
            *(found.speedup, found.low, found.high),
            found.eager_ms,
            others,
            best=replace(best, timelines=()) if planned else None,
            candidates=tuple(replace(candidate, timelines=()) for candidate in found.candidates),
            co_runs=found.co_runs,
            left_out=tuple(self.admission.left_out.items()),
        )

    def _settling_ms(self) -> float:
        return SETTLING_MS if self._cores_of_others() > MAX_CORES_OF_OTHERS else 0.0

    def _cores_of_others(self) -> float:
        """The cores that other programs have used in this search. Steps on a GPU or a simulated device need none."""
        return self._cpu_use.cores_of_others() if isinstance(self._backend, CpuBackend) else 0.0


def _beside(cores: float) -> str:
    return f"; beside other processes that used {cores:.1f} cores" if cores > MAX_CORES_OF_OTHERS else ""


def _because(cause: Drift | Missed | None) -> str:
    return f"; measured again because the {cause}" if cause is not None else ""


def _alike(first: Plan, second: Plan) -> bool:
    lanes = [[(lane.ops, lane.width) for lane in made.lanes] for made in (first, second)]
    return lanes[0] == lanes[1] and first.after == second.after
