"""`hocket.schedule`: the one place that joins capture, profile, plan, check and execute.

A schedule is called like the step. `hocket.autotune.pool` chooses the plan of a call, and `hocket.autotune.tuner` finds
plans. This module holds the arguments and the properties that users read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hocket.adaptation import CoRun
from hocket.arguments import packed, spreading
from hocket.autotune.candidate import Candidate, TunerConfig
from hocket.autotune.decision import Decision, Verdict
from hocket.autotune.options import check_options, until_it_raises
from hocket.autotune.parted import PartedPool
from hocket.autotune.pool import VariantPool
from hocket.autotune.store import DecisionStore
from hocket.autotune.verification import Difference
from hocket.backends import Backend
from hocket.errors import ExecutionError, InputError
from hocket.execution.process import advise_spinning
from hocket.function_like import FunctionLike, keep_from_dynamo
from hocket.interrupts import native_holders
from hocket.ir import Costs, Graph, Machine, Plan, Timeline
from hocket.planning import Bounds
from hocket.pystate.drawn import DrawnAhead
from hocket.pystate.step_parts import StepParts
from hocket.pystate.watch import PurityWatch
from hocket.reporting import Comparison, Report, schedule_html, write_report
from hocket.step_regions import StepRegions
from hocket.summary import attempts_of, comparison_of, notes_of
from hocket.tracing.captured import Captured
from hocket.tracing.state import inventory


class Schedule(FunctionLike):
    """A training step that finds its own plan, called like the step. See `schedule`.

    `graph`, `costs`, `plan` and `captured` are those of the last call's shape. They raise `InputError` before there
    is a plan.

    Args:
        machine: as for `schedule`.
        cache: as for `schedule`, but off by default.
        **options: those of `schedule`, and of `hocket.autotune.candidate.TunerConfig`: a `clock`, the limits of a
            `drift`, or what makes the `backend` of plans.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: Any,
        optimizer: Any,
        *,
        machine: Machine | None = None,
        cache: bool | str | os.PathLike[str] = False,
        **options: Any,
    ) -> None:
        machine = Machine.here() if machine is None else machine
        check_options(step, machine, **options)
        if options.get("on_progress") is not None:
            options["on_progress"] = until_it_raises(options["on_progress"])
        places = inventory(model, optimizer)
        config = TunerConfig(
            step=spreading(step),
            model=model,
            optimizer=optimizer,
            places=places,
            watch=PurityWatch(step, (*places.models, *places.optimizers)),
            machine=machine,
            store=DecisionStore.of(cache),
            **options,
        )
        self._begin(step, config)
        self.backend.candidate_planners(config.planner)  # raises for one that plans other devices

    def _begin(self, step: Callable[..., Any], config: TunerConfig) -> None:
        self.stand_for(step)
        self.machine = config.machine
        self._regions: StepRegions | None = None
        self._pool = PartedPool(config, self._let_go, self._begin_regions)
        self._busy = threading.Lock()
        self._held = False
        self._hold, self._release = native_holders()

    def of_method(self, method: Callable[..., Any], instance: Any) -> Schedule:
        """A schedule of `method`, with the same models, optimizers and options."""
        config, made = self._pool.config, object.__new__(Schedule)
        places = inventory(config.model, config.optimizer)
        watch = PurityWatch(method, (*places.models, *places.optimizers))
        store = DecisionStore(config.store.folder)
        made._begin(method, replace(config, step=spreading(method), places=places, watch=watch, store=store, leaves={}))
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One training step, called as the user's own is.

        Raises:
            ExecutionError: the step is running already, in another thread or further up in this one.
            Exception: whatever the step raises, from a planned op with the op and its layer in a note.
        """
        # A Ctrl-C waits until the step is whole (a second one does not).
        held = self._hold()
        try:
            if not self._busy.acquire(blocking=False):
                raise ExecutionError("this step is already running; give each thread a schedule of its own")
            self._held = held
            try:
                return self._pool(args[0] if len(args) == 1 and not kwargs else packed(args, kwargs))
            finally:
                held = self._held
                self._busy.release()
        finally:
            if held:
                self._release()

    def _let_go(self) -> None:
        """A Ctrl-C need not wait any more: this call runs the user's own step and nothing else."""
        if self._held:
            self._held = False
            self._release()

    def _begin_regions(self, pool: VariantPool) -> StepRegions:
        self._regions = StepRegions(pool, self._let_go)
        return self._regions

    @property
    def decision(self) -> Decision:
        """The last decision for the batches of the last call's shape, with what it stands on."""
        return self._pool.current.decision

    @property
    def verdict(self) -> Verdict:
        """``"planned"``, ``"regions"`` or ``"eager"`` for the last call's shape, with the reason in ``.why``."""
        return self._pool.current.decision.verdict

    @property
    def why(self) -> str:
        """The reason for the verdict."""
        return self.verdict.why

    @property
    def history(self) -> tuple[Verdict, ...]:
        """Every verdict for the last call's shape, the first one first: more than one where the step time drifted."""
        return self._pool.current.history

    @property
    def decided(self) -> bool:
        """True if the verdict for the last call's shape stands, and no search is under way."""
        return self._pool.current.settled

    @property
    def candidate(self) -> Candidate | None:
        """The plan that runs, or the best one that was found. None before there is a verdict."""
        return self._pool.current.decision.candidate

    @property
    def parts(self) -> StepParts | DrawnAhead | None:
        """The parts of a step of which some Python runs as it is (see `hocket.pystate.parts`), or None."""
        return self._pool.parts

    @property
    def captured(self) -> Captured:
        return self._found().captured

    @property
    def graph(self) -> Graph:
        return self._found().captured.graph

    @property
    def costs(self) -> Costs:
        return self._found().costs

    @property
    def plan(self) -> Plan:
        return self._found().plan

    @property
    def co_runs(self) -> tuple[CoRun, ...]:
        """Pairs of ops that ran side by side in the comparison, as measured, those that lost most first."""
        return self._pool.current.decision.co_runs

    @property
    def backend(self) -> Backend:
        """The backend of plans for the last call's shape: cores, or one GPU."""
        return self._pool.current.backend

    @property
    def bounds(self) -> Bounds:
        """Between which times any plan of this graph lies, by the measured costs."""
        found = self._found()
        return self.backend.bounds(found.captured.graph, found.costs)

    @property
    def difference(self) -> Difference | None:
        """Result of the verification, once it was made."""
        return self._pool.current.difference

    def compile(self) -> bool:
        """Compile the step now and wait, instead of in the background once it has run for a while.

        Returns: True if there are new forms, which the next calls try. Only with ``numerics="close"``, after a verdict.
        """
        return self._pool.current.compile()

    def search_regions(self) -> bool:
        """Search for regions of a step that stays eager now, instead of once the program has run for a while.

        Returns: True as long as the next calls search for them, after a verdict.
        """
        return self._regions is not None and self._regions.hurry()

    def timeline(self) -> Timeline:
        """When each op of the last planned step ran."""
        return self._found().executor.timeline()

    def comparison(self, target: str = "step") -> Comparison:
        """Eager and planned side by side, from the steps that the decision stands on."""
        if not self.decision.eager_ms or not self._found().steps_ms:
            raise InputError("nothing has been compared yet: that follows the profiling steps, and needs guard=True")
        return comparison_of(target, self.decision, self.backend, self.difference)

    def report(self, directory: str | os.PathLike[str]) -> Mapping[str, Path]:
        """Write the page, the trace, the drawing and all files behind them into `directory`."""
        found = self._found()
        limits = self.bounds
        contested = self._is_contested
        return write_report(
            Path(directory),
            Report(
                title="Hocket report",
                graph=found.captured.graph,
                plan=found.plan,
                costs=found.costs,
                timelines={"planned": found.executor.timeline(), "simulated": found.predicted},
                comparison=self.comparison() if contested else None,
                lower_us=limits.lower_us,
                upper_us=limits.upper_us,
                notes=self.notes if contested else (*self.backend.notes, *self.notes),
                attempts=attempts_of(self.decision),
            ),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of a report: earlier verdicts, and how pairs of ops fared side by side."""
        lines = self._pool.python
        python = (f"Python of {lines} runs as it is, before and after the planned ops",) if lines else ()
        return (*notes_of(self.decision, self.history), *python)

    def overrule(self, decision: Decision) -> None:
        """Put a decision that the caller's loop has made in the place of the last one, and close all lanes."""
        self.close()
        self._pool.current.conclude(decision)

    def state_dict(self) -> dict[str, Any]:
        """The decisions that were made or met, as plain values, to be saved with a checkpoint."""
        return self._pool.config.store.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load decisions of another run of the same step. The next calls decide anew, starting from these.

        Raises:
            InputError: `state` is not what `state_dict` gave.
        """
        self._pool.config.store.load(state)
        self._pool.start_anew()

    def __enter__(self) -> Schedule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"{self.verdict}: {self.why}" if self.decided else self.why
        return f"<hocket schedule of {self.__qualname__}, {state}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the outcome and the times, once eager and a plan are compared."""
        state = f"{self.verdict}: {self.why}" if self.decided else self.why
        return schedule_html(self.__qualname__, state, self.comparison() if self._is_contested else None)

    def close(self) -> None:
        """Close all lanes: their memory is freed, and threads that no other plan of this process uses become idle."""
        self._pool.close()
        if self._regions is not None:
            self._regions.close()

    @property
    def _is_contested(self) -> bool:
        return bool(self.decision.eager_ms and self.candidate and self.candidate.steps_ms)

    def _found(self) -> Candidate:
        found = self.candidate
        if found is None:
            raise InputError(f"there is no plan: {self.why}")
        return found


def schedule(
    step: Callable[..., Any],
    model: Any,
    optimizer: Any = (),
    *,
    planner: str = "auto",
    plan: Plan | None = None,
    numerics: str = "bitwise",
    guard: bool = True,
    strict: bool = False,
    machine: Machine | None = None,
    executor: str = "auto",
    cache: bool | str | os.PathLike[str] = True,
    on_progress: Callable[[str, int], object] | None = None,
) -> Schedule:
    """Schedule a training step's ops into the machine's idle time, without changing what the step computes.

    Args:
        step: the user's own, unchanged, with any arguments and any result. What it does in Python before its first op
            and after its last one runs as it is. Between them it may not ask a clock (see ``docs/eager.md``).
        model: the module it trains, or a list of modules.
        optimizer: the optimizer it steps, or a list of optimizers. None is needed for a step that updates by hand.
        planner: ``auto`` for every planner, or one of `hocket.planners()`.
        plan: try this plan and no planner's: one that was edited, say. A call raises `PlanError` where it does not fit.
        numerics: ``bitwise``: an op runs only with numbers of threads at which it has eager's bits. ``rounding``: an op
            may run with any number of threads, which rounds sums otherwise. ``close``: a form of the step that rounds
            otherwise may run, too (channels last, fused updates), if it is no farther from the step in float64 than
            four times what eager is. See ``docs/forms.md``.
        guard: measure the plan against eager and keep the faster. Without it the plan runs in any case.
        strict: raise `CaptureError` where a step cannot be captured, instead of staying eager.
        machine: the machine to run on, `Machine.here()` by default.
        executor: ``native`` lanes, ``python`` threads, or ``auto``: native where they can be built.
        cache: remember decisions in the user's cache folder, or in this folder. A remembered plan runs from call 6 on.
        on_progress: called after each step of a search with its stage (``watch``, ``verify``, ``profile`` or
            ``compare``) and how many there were. One that raises is named in the log and not called again.

    Returns:
        A `Schedule`, called like the step. The first 60 to 200 calls are ordinary training steps that are captured,
        verified, profiled and compared. After that ``verdict`` gives the result and the reason, and ``history`` all
        verdicts. A step that cannot be planned may have regions later (see ``docs/schedule.md``).

    Raises:
        InputError: an argument cannot be used. The message names it. Calls raise what the step raises.

    Example:
        >>> from hocket import zoo
        >>> job = zoo.load("mlp", depth=2, width=16)
        >>> fast = schedule(job.step, job.model, job.optimizer, cache=False)
        >>> _ = fast(job.batch(0)); str(fast.verdict), fast.why
        ('eager', 'not decided yet')
    """
    advise_spinning()
    return Schedule(
        *(step, model, optimizer),
        planner=planner,
        plan=plan,
        numerics=numerics,
        guard=guard,
        strict=strict,
        machine=machine,
        executor=executor,
        cache=cache,
        on_progress=on_progress,
    )


keep_from_dynamo(Schedule.__call__)
