"""The life of a scheduled step, for one shape of its batch: from eager to a verdict, and to the next one.

Every call is a real training step of the user's::

    call 1          eager; then the step is captured (and that is undone)
    call 2          verified: eager, and once more by plan from the same state (one call for each form of the step)
    calls 3 ...     profiled: the captured step op by op, at each width          <---+
    next calls      tried: eager and the best plans in turn                          |
    perhaps more    pairs of ops that interfered are kept apart: that plan is tried  |
    ever after      whatever was fastest, plan or eager; its step time is watched, --+ and when it has drifted
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from hocket.adapt import CoRun, Drift, DriftLimits, StepWatch, co_runs, interfering
from hocket.capture.captured import Captured, capture_step, relowered
from hocket.capture.forms import forms_of, in_form
from hocket.capture.state import Inventory
from hocket.check import check
from hocket.errors import CaptureError, StaleCaptureError
from hocket.execute.lanes import Executor
from hocket.grounds import Cores, Ground, Streams
from hocket.ir import Costs, Machine, Plan, Timeline
from hocket.plan import plan
from hocket.simulate import simulate
from hocket.verify import Difference, verify

__all__ = ["Candidate", "Life", "Setting", "Standing", "Verdict"]

log = logging.getLogger("hocket")

# Real training steps spent before the verdict: timed runs at each width, and rounds of a contest. Everybody then has
# a few steps in a row. The first of them is not counted: it finds caches and threads as another one left them.
PROFILE_RUNS = 3
TRIAL_ROUNDS = 3
TRIAL_STEPS = 4
# Who is so much slower than the fastest after a round leaves the contest.
HOPELESS = 1.4
# Candidates that come to the contest by their prediction; serial plans always do.
CONTENDERS = 3
# A step's less likely forms are not worth a plan of so many ops.
MAX_OPS = 4000


class Verdict(str):
    """``"planned"`` or ``"eager"``; `why` says on what grounds."""

    why: str

    def __new__(cls, choice: str, why: str) -> Verdict:
        verdict = super().__new__(cls, choice)
        verdict.why = why
        return verdict

    def __repr__(self) -> str:
        return f"{str(self)!r}, because {self.why}"


@dataclass(frozen=True)
class Setting:
    """What a schedule was asked for; see `hocket.schedule`. `clock` counts seconds, as `time.perf_counter` does."""

    step: Callable[[Any], Any]
    model: Any
    optimizer: Any
    places: Inventory
    planner: str
    guard: bool
    strict: bool
    machine: Machine
    executor: str
    clock: Callable[[], float]
    drift: DriftLimits


@dataclass
class Candidate:
    """One plan that may win: of which form of the step, on what it runs, what was predicted, how long its steps took.

    `timelines` are those of the contest's steps, kept for plans in which ops run side by side.
    """

    form: str
    captured: Captured
    costs: Costs
    plan: Plan
    predicted: Timeline
    executor: Executor
    steps_ms: list[float] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        """The median of its steps; what was predicted, as long as there are none."""
        return median(self.steps_ms) if self.steps_ms else self.predicted.makespan_us / 1e3

    @property
    def rank_ms(self) -> float:
        """What it is ranked by: the lower quartile of its steps, or what was predicted."""
        return lower_quartile(self.steps_ms) if self.steps_ms else self.predicted.makespan_us / 1e3

    @property
    def co_runs(self) -> bool:
        """Whether ops may run side by side."""
        return sum(bool(lane.ops) for lane in self.plan.lanes) > 1


@dataclass
class Standing:
    """What one search found: its candidates, how they fared, and the verdict. The next search makes another one.

    Attributes:
        candidates: all plans that came to a contest.
        eager_ms: times of eager steps, from the contest that decided.
        co_runs: pairs of ops that ran side by side in the best such plan, as they were measured.
        best: the plan that is run; None: eager is.
        expected_ms: the median step time that the verdict stands on.
    """

    candidates: list[Candidate] = field(default_factory=list)
    eager_ms: list[float] = field(default_factory=list)
    co_runs: tuple[CoRun, ...] = ()
    best: Candidate | None = None
    verdict: Verdict = field(default_factory=lambda: Verdict("eager", "not decided yet"))

    @property
    def candidate(self) -> Candidate | None:
        """The plan that is run, or would be the best one to run."""
        return self.best or min(self.candidates, key=_rank, default=None)

    @property
    def expected_ms(self) -> float:
        return self.best.step_ms if self.best else median(self.eager_ms)


class Life:
    """One signature's way through capture, profile and contests; called like the step.

    Args:
        setting: what the schedule was asked for.
        refused: why this step may not be captured (any more); empty if it may.
        capture_first: capture before the first step instead of after it: what the step finds (gradients or none) is
            what it will find again.

    Attributes:
        captured: the step as a graph, once it is captured; in its likeliest form (see `hocket.capture.forms`).
        settled: whether a verdict stands and nothing is being searched.
        standing: the last verdict, and what it was found on.
        history: all verdicts, the first one first.
        difference: what the verification found.
    """

    def __init__(self, setting: Setting, *, refused: str = "", capture_first: bool = False) -> None:
        self.captured: Captured | None = None
        self.settled = False
        self.standing = Standing()
        self.history: tuple[Verdict, ...] = ()
        self.difference: Difference | None = None
        self._setting = setting
        self._ground: Ground = Cores(setting.machine, setting.executor)
        self._refused = refused
        self._capture_first = capture_first
        self._forms: dict[str, Captured] = {}  # those that compute what eager computes
        self._begin: Callable[[Any], Generator[Any, Any, None]] = self._first
        self._search: Generator[Any, Any, None] | None = None
        self._searched_s = 0.0
        self._watch: StepWatch | None = None
        self._drift: Drift | None = None

    def __call__(self, batch: Any) -> Any:
        """One training step.

        Raises:
            StaleCaptureError: the capture is one of the past; nothing was run, and this life is over.
            Exception: whatever the step raises. A life without a verdict is over then; a search for a new one is
                given up, and the old one stands.
        """
        clock = self._setting.clock
        best, watch = self.standing.best, self._watch
        start = clock()
        if self.settled:
            result = self._setting.step(batch) if best is None else best.executor(batch)
            if watch is not None and (drift := watch.observe((clock() - start) * 1e3)):
                self._look_again(drift)
            return result
        try:
            if self._search is None:
                self._search = self._begin(batch)
                result = next(self._search)
            else:
                result = self._search.send(batch)
        except BaseException:
            self._search = None
            self.settled = bool(self.history)
            raise
        finally:
            self._searched_s += clock() - start
            if self.settled:
                self._rest()
        return result

    def close(self) -> None:
        """End the threads of all lanes."""
        for candidate in self.standing.candidates:
            candidate.executor.close()

    def _look_again(self, drift: Drift) -> None:
        log.info("hocket: %s: the step is profiled and plans are tried again", drift)
        self.settled = False
        self._drift = drift
        self._begin, self._search = self._decided, None
        self._searched_s = 0.0

    def _rest(self) -> None:
        """Watch the steps from here on, if another search could find another answer."""
        self._search = None
        if self._setting.guard and self.standing.eager_ms:
            self._watch = StepWatch(self.standing.expected_ms, self._searched_s * 1e3, self._setting.drift)

    def _first(self, batch: Any) -> Generator[Any, Any, None]:
        forms = self._captured(batch) if self._capture_first else {}
        result = self._setting.step(batch)
        if not self._capture_first:
            forms = self._captured(batch)
        if not forms:
            yield result
            return
        self.captured = next(iter(forms.values()))
        failed = ""
        for form, captured in forms.items():
            batch = yield result
            if not captured.holds():
                raise StaleCaptureError("captured at a threshold")
            plain = self._ground.lanes(captured, self._ground.plain(captured))
            with in_form(self._setting.places, form):
                found, (result,) = verify(captured, plain, [batch])
            plain.close()
            if found.equal:
                self._forms[form] = captured
            else:
                failed = failed or f"the captured step differs from eager by {found.max_abs_diff:.3g} in {found.where}"
            if self.difference is None or (found.equal and len(self._forms) == 1):
                self.difference, self.captured = found, captured
        if not self._forms:
            self._settle(Standing(), None, failed)
            yield result
            return
        batch = yield result
        yield from self._decided(batch)

    def _captured(self, batch: Any) -> dict[str, Captured]:
        """The step in each of its forms; none if it has to stay eager, and then that is settled."""
        setting = self._setting
        reason = self._refused or self._placed()
        failure: CaptureError | None = None
        found: dict[str, Captured] = {}
        for form in () if reason else forms_of(setting.places):
            try:
                with in_form(setting.places, form):
                    made = capture_step(setting.step, setting.model, setting.optimizer, batch, split=False)
            except CaptureError as error:
                failure = failure or error
                continue
            if not found or len(made.graph) <= MAX_OPS:
                found[form] = made
        if found:
            return found
        if failure is not None and setting.strict:
            raise failure
        reason = reason or f"it could not be captured: {failure}"
        log.warning("hocket: the step stays eager: %s", reason)
        self._settle(Standing(), None, reason)
        return found

    def _placed(self) -> str:
        """Find out what the step stands on; why it cannot be planned there, if so."""
        devices = {entry.get().device for entry in self._setting.places.parameters}
        if len(devices) == 1 and (device := next(iter(devices))).type == "cuda":
            self._ground = Streams(device.index or 0)
        elif devices - {torch.device("cpu")}:
            names = ", ".join(sorted(map(str, devices)))
            return f"its parameters are on {names}; a step is planned on CPU cores or on one GPU"
        return ""

    def _decided(self, batch: Any) -> Generator[Any, Any, None]:
        """Profile, plan, try, and settle; the last result is given back after the verdict stands."""
        found = Standing()
        for form, captured in self._forms.items():
            batch = yield from self._profiled(found, form, captured, batch)
        if not self._setting.guard:
            best = min(found.candidates, key=_rank)
            self._settle(found, best, "guard=False: the plan runs whatever it costs")
            yield best.executor(batch)
            return
        ranked = sorted(found.candidates, key=lambda c: c.predicted.makespan_us)
        found.candidates = [c for n, c in enumerate(ranked) if n < CONTENDERS or c.plan.planner == "serial"]
        contenders = list(found.candidates)
        result = yield from self._contest(found, contenders, batch)
        apart = self._kept_apart(found)
        if apart is not None:
            contenders = [min(contenders, key=_rank), apart]
            found.candidates.append(apart)
            batch = yield result
            result = yield from self._contest(found, contenders, batch)
        self._decide(found, contenders, apart)
        yield result

    def _profiled(self, found: Standing, form: str, captured: Captured, batch: Any) -> Generator[Any, Any, Any]:
        """Profile with real steps, at every width, joint and split; then make the candidates."""
        for variant in self._variants(captured):
            measured: dict[str, list[Timeline]] = {}
            for key, lanes in self._ground.profilers(variant):
                for run in range(PROFILE_RUNS + 1):
                    result = lanes(batch)
                    if run:
                        measured.setdefault(key, []).append(lanes.timeline())
                    batch = yield result
                lanes.close()
            self._propose(found, form, variant, self._ground.costs(variant, measured))
        return batch

    def _variants(self, captured: Captured) -> list[Captured]:
        if not self._ground.splits or self._setting.planner == "serial":
            return [captured]
        taken_apart = relowered(captured, split=True)
        return [captured, taken_apart] if len(taken_apart.graph) > len(captured.graph) else [captured]

    def _propose(self, found: Standing, form: str, captured: Captured, costs: Costs) -> None:
        for name, options in self._ground.tried(self._setting.planner):
            made = self._candidate(found, form, captured, costs, name, options)
            if made is not None:
                found.candidates.append(made)

    def _candidate(
        self, found: Standing, form: str, captured: Captured, costs: Costs, planner: str, options: dict[str, Any]
    ) -> Candidate | None:
        """A plan with all that is needed to run it; None if there is one like it."""
        machine = self._ground.machine
        made = plan(captured.graph, costs, machine, planner=planner, **options)
        if any(_alike(made, other.plan) for other in found.candidates if other.captured is captured):
            return None
        check(captured.graph, made, machine)
        predicted = simulate(captured.graph, made, costs, machine)
        return Candidate(form, captured, costs, made, predicted, self._ground.lanes(captured, made))

    def _contest(self, found: Standing, contenders: Sequence[Candidate], batch: Any) -> Generator[Any, Any, Any]:
        """Eager and every contender in turn, on real steps; the last one's result is returned, not yielded."""
        clock = self._setting.clock
        found.eager_ms.clear()
        for contender in contenders:
            contender.steps_ms.clear()
            contender.timelines.clear()
        left: list[Candidate | None] = [None, *contenders]
        for round_ in range(TRIAL_ROUNDS):
            for turn in left:
                for number in range(TRIAL_STEPS):
                    self._ground.settle()
                    start = clock()
                    result = self._setting.step(batch) if turn is None else turn.executor(batch)
                    self._ground.settle()
                    took_ms = (clock() - start) * 1e3
                    if number:
                        (found.eager_ms if turn is None else turn.steps_ms).append(took_ms)
                        if turn is not None and turn.co_runs and turn.executor.keeps_time:
                            turn.timelines.append(turn.executor.timeline())
                    if number == TRIAL_STEPS - 1 and turn is not None:
                        self._ground.rest(turn.executor)
                    if (round_, turn, number) != (TRIAL_ROUNDS - 1, left[-1], TRIAL_STEPS - 1):
                        batch = yield result
            limit_ms = HOPELESS * min(candidate.rank_ms for candidate in contenders)
            left = [turn for turn in left if turn is None or turn.rank_ms <= limit_ms]
        return result

    def _kept_apart(self, found: Standing) -> Candidate | None:
        """The best plan with ops side by side, made anew without the pairs that interfered; None if there are none."""
        several = [candidate for candidate in found.candidates if candidate.timelines]
        if not several:
            return None
        judged = min(several, key=_rank)
        found.co_runs = co_runs(judged.timelines, judged.plan, judged.costs)
        avoid = interfering(found.co_runs)
        for candidate in several:
            candidate.timelines.clear()
        if not avoid or self._setting.planner not in ("auto", "concurrency"):
            return None
        made = self._candidate(found, judged.form, judged.captured, judged.costs, "concurrency", {"avoid": avoid})
        fastest_ms = min(lower_quartile(found.eager_ms), *(candidate.rank_ms for candidate in found.candidates))
        if made is None or made.rank_ms >= fastest_ms:
            return None  # not even its prediction, which knows of no interference, beats what was measured
        log.info("hocket: %d pair(s) of ops interfered: a plan that keeps them apart is tried", len(avoid))
        return made

    def _decide(self, found: Standing, contenders: Sequence[Candidate], apart: Candidate | None) -> None:
        best = min(contenders, key=_rank)
        ratio = best.rank_ms / lower_quartile(found.eager_ms)
        what = f"plan {best.plan.planner!r} on {len(best.plan.lanes)} lane(s)"
        if len(self._forms) > 1:
            what += f" by {best.form!r}"
        what += f" takes {ratio:.2f}x of eager's time"
        what += f" (lower quartiles of {len(best.steps_ms)} steps each, in turns)"
        if best is apart:
            pairs = interfering(found.co_runs)
            what += f", with {len(pairs)} pair(s) of ops kept apart that interfered"
        if self._drift is not None:
            what += f"; measured again because the {self._drift}"
        self._settle(found, best if ratio < 1 else None, what)

    def _settle(self, found: Standing, best: Candidate | None, why: str) -> None:
        found.best = best
        found.verdict = Verdict("planned" if best else "eager", why)
        for candidate in (*self.standing.candidates, *found.candidates):
            if candidate is not found.candidate:
                candidate.executor.close()
        self.standing = found
        self.history = (*self.history, found.verdict)
        self.settled = True
        log.info("hocket: %s: %s", found.verdict, why)


def lower_quartile(steps_ms: Sequence[float]) -> float:
    """A quarter of the steps took no longer.

    On a shared machine somebody else's work makes whole blocks of steps slower, and nothing makes one faster. A median
    of a few steps then says who was unlucky.
    """
    return sorted(steps_ms)[(len(steps_ms) - 1) // 4]


def _rank(candidate: Candidate) -> float:
    return candidate.rank_ms


def _alike(first: Plan, second: Plan) -> bool:
    lanes = [[(lane.ops, lane.width) for lane in made.lanes] for made in (first, second)]
    return lanes[0] == lanes[1] and first.after == second.after
