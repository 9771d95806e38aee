r"""One search: proposals from a study, trained in groups, reported and decided on at epoch boundaries.

study --ask--> trials --infusible values--> groups --slots--> one epoch of all --values--> policy
  ^                                           ^                                              |
  \------------- tell: complete, pruned, failed                         go on, in place -----/

Its progress is a table that is redrawn on a terminal, and lines elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any, TextIO

from hocket.errors import ExecutionError
from hocket.search.checkpoints import Checkpoints
from hocket.search.decisions import Decisions
from hocket.search.fused import FusedTrainer
from hocket.search.group import TrialGroup, Ways
from hocket.search.policy import Ends, Policy
from hocket.search.run import EpochResult, Run, Status
from hocket.search.study import PRUNED, WHY, StudyClient


@dataclass(frozen=True)
class Epoch:
    """One trial in one slot for one epoch: a bar in the timeline of slots, in seconds since the search began."""

    number: int
    group: int
    kind: str
    slot: int
    epoch: int
    start_s: float
    end_s: float
    value: float | None


@dataclass
class Record:
    """The record of a search."""

    epochs: list[Epoch] = field(default_factory=list)  # every trial's epochs, in the order in which they ended
    # for each group the values that its trials agree on, and why they trained one at a time, if they did
    groups: list[tuple[tuple[Any, ...], str]] = field(default_factory=list)
    searches: int = 0  # how many fused models were made; each is captured and planned once, with a runner that does so
    split: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # the names of the fusible and the infusible parameters


log = logging.getLogger(__name__)


class Search(Decisions):
    """A search in progress."""

    def __init__(
        self,
        client: StudyClient,
        ways: Ways,
        policy: Policy,
        trials: int,
        batch: int,
        checkpoints: Checkpoints | None = None,
        on_progress: Callable[[Search], object] | None = None,
        ends: Ends | None = None,
    ) -> None:
        super().__init__(client, ways, policy, checkpoints, ends)
        self.trials, self.batch = trials, batch
        self.record = Record(split=(ways.split.fusible, ways.split.infusible))
        self._on_progress = on_progress
        self._all_started = False
        self._start_s = perf_counter()

    def run(self) -> None:
        """Search to the end. An `ExecutionError` says that the storage failed, or every trial did."""
        try:
            with self.client.stoppable():
                while True:
                    self._ask()
                    group = self._next_group()
                    if group is None:
                        break
                    self._work(group)
        except BaseException:
            self._abandon()
            raise
        finally:
            for group in self._groups.values():
                group.close()
        self._check_any_succeeded()
        if self.client.is_stopped or (self._is_over_time and self._checkpoints is None):
            self._stop()
        self.record.groups = [(group.key, group.why_serial) for group in self._groups.values()]
        self.record.searches = sum(group.searches for group in self._groups.values())

    @property
    def _is_over_time(self) -> bool:
        limit_s = self._ends.timeout_s
        return limit_s is not None and perf_counter() - self._start_s >= limit_s

    @property
    def _is_stopped(self) -> bool:
        return self.client.is_stopped or self._is_over_time

    def begin(self, number: int, params: dict[str, Any], error: str | None = None) -> None:
        """A trial that was asked for begins, or fails at once."""
        run = self._add(number, params)
        if error is None:
            self._group_of(run).waiting.append(run)
        else:
            self._fail(run, error)

    def resume(self, known: Iterable[Any]) -> None:
        """Take up the trials of this search from before it was killed: `known`, of the storage, in their order."""
        for frozen in known:
            run = self._add(frozen.number, self.client.params_of(frozen))
            run.values = [frozen.intermediate_values[epoch] for epoch in sorted(frozen.intermediate_values)]
            if frozen.state.is_finished():
                over = {"COMPLETE": Status.COMPLETE, "PRUNED": Status.PRUNED}
                run.status = over.get(frozen.state.name, Status.FAILED)
                run.is_left = frozen.user_attrs.get(PRUNED) == run.epochs
                run.error = frozen.user_attrs.get(WHY)
                self._put_away(run)
            else:
                run.resume(None if self._checkpoints is None else self._checkpoints.load(run.number))
        self._is_replaying = True
        self._close_if_full()  # it was before these trials were decided on
        self._replay(list(self.runs.values()))
        self._is_replaying = False
        for run in list(self.runs.values()):
            if run.status is Status.READY and run.values and self._is_stale(run):
                self._leave(run, Status.COMPLETE)
            elif run.status is Status.READY:
                self._group_of(run).waiting.append(run)

    # ------------------------------------------------------------------------------------------------ who trains

    def _ask(self) -> None:
        """Ask for proposals while there is room for them."""
        if self._all_started:
            return
        while self._has_room():
            self.begin(*self.client.ask())
        self._close_if_full()

    def _has_room(self) -> bool:
        """True if another trial is asked for now.

        Proposals come in rounds, so that they rest on the same values whatever trains them. Processes do not wait.
        """
        if self._is_full():
            return False
        if self.ways.processes is not None:
            if self._num_ready() >= self.batch:
                return False
        elif len(self.runs) % self.batch == 0 and self._num_ready():
            return False
        if not self.client.is_exhausted:
            return True
        self.client.say(f"the sampler proposes no more than these {len(self.runs)} of {self.trials} trials")
        self.trials = len(self.runs)
        return False

    def _is_full(self) -> bool:
        return len(self.runs) >= self.trials or self._is_stopped

    def _close_if_full(self) -> None:
        """Let the policy know, once, that no more trials begin."""
        if not self._all_started and self._is_full():
            self._all_started = True
            self._apply(self.policy.all_started())

    def _num_ready(self) -> int:
        return sum(group.num_ready for group in self._groups.values())

    def _next_group(self) -> TrialGroup | None:
        """The group with most trials that are ready. With a limit on memory only one has slots at a time."""
        ready = [group for group in self._groups.values() if group.num_ready]
        if not ready or self._is_stopped:
            return None
        chosen = max(ready, key=lambda group: group.num_ready)
        if self.ways.memory_bytes is not None:
            for group in self._groups.values():
                if group is not chosen:
                    group.close()
        return chosen

    def _work(self, group: TrialGroup) -> None:
        """Train a group until none of its trials may go on."""
        while group.num_ready and not self._is_stopped:
            for run, why in group.fill():
                self._refused(group, run, why)
            trainer = group.trainer
            if trainer is None or not trainer.active:
                return
            start_s = perf_counter() - self._start_s
            try:
                results = trainer.advance()
            except Exception as error:  # also an InputError, of which the array makes errors of ops
                if not isinstance(trainer, FusedTrainer):
                    raise
                for run, why in group.fall_back(error):
                    self._refused(group, run, why)
                continue
            self._note(group, results, start_s)
            self._ended(group, results)
            if self._on_progress is not None:
                self._on_progress(self)
            self._ask()

    def _refused(self, group: TrialGroup, run: Run, why: str) -> None:
        """A trial cannot train in the group that it was put into: it ends, or becomes part of another one."""
        if run.error is not None:
            self._fail(run, run.error)
            return
        run.variant = (*run.variant, why)
        self._group_of(run).waiting.append(run)

    def _note(self, group: TrialGroup, results: Sequence[tuple[Run, EpochResult]], start_s: float) -> None:
        trainer = group.trainer
        assert trainer is not None
        end_s = perf_counter() - self._start_s
        place = list(self._groups).index(group.key)
        for run, result in results:
            slot = trainer.slots.index(run)
            self.record.epochs.append(
                Epoch(run.number, place, trainer.kind, slot, run.epochs + 1, start_s, end_s, result.value)
            )

    def _stop(self) -> None:
        """A callback has ended the search: trials that are not over are pruned, those that have no value fail."""
        for run in self.runs.values():
            if not run.status.is_over:
                run.error = None if run.values else "the search was stopped before the trial began"
                self._finish(run, Status.PRUNED if run.values else Status.FAILED)

    def _abandon(self) -> None:
        """The search ends before its time: what is kept goes on later, and the rest is reported as failed."""
        if self._checkpoints is not None:
            return
        for run in self.runs.values():
            if not run.status.is_over:
                run.error = "the search ended before the trial did"
                run.status = Status.FAILED
                try:
                    self.client.tell(run)
                except ExecutionError:  # it is the storage that failed
                    return

    def _check_any_succeeded(self) -> None:
        failed = [run for run in self.runs.values() if run.status is Status.FAILED]
        if failed and len(failed) == len(self.runs):
            first = failed[0]
            raise ExecutionError(f"all {len(failed)} trials failed; trial {first.number} {first.params}: {first.error}")


BETWEEN_RUNGS_S = 1.0  # at least, from one line to the next
BETWEEN_LINES_S = 60.0  # at most: where a rung takes longer, a line says that the search goes on


def device_time_s(record: Record) -> tuple[float, float]:
    """Seconds that the device trained, and the seconds of all trials' epochs, as if each had it alone meanwhile."""
    passes = {(each.group, each.start_s, each.end_s) for each in record.epochs}
    return sum(end - start for _, start, end in passes), sum(each.end_s - each.start_s for each in record.epochs)


class LiveTable:
    """Table that is redrawn after each epoch. Without a terminal, one line is written for each rung."""

    def __init__(self, file: TextIO, clock: Callable[[], float] = monotonic) -> None:
        self._file = file
        self._clock = clock
        self._live: Any = None
        self._line = ""  # the last one that is not written yet
        self._shown: tuple[int, int] | None = None
        self._shown_s = clock()

    def __enter__(self) -> LiveTable:
        if self._file.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._file), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        self._write()

    def update(self, search: Search) -> None:
        """Paint what a search is doing."""
        if self._live is not None:
            self._live.update("\n".join(lines(search)), refresh=True)
            return
        runs = search.runs.values()
        decided = sum(run.status.is_over for run in runs), sum(run.until for run in runs)
        waited_s = self._clock() - self._shown_s
        is_rung = decided != self._shown and (decided[0] > 0 or self._shown is not None)
        if is_rung or waited_s >= BETWEEN_LINES_S:
            self._line = lines(search)[0]
        self._shown = decided
        if waited_s >= BETWEEN_RUNGS_S:
            self._write()

    def _write(self) -> None:
        if self._line:
            self._file.write(f"{self._line}\n")
            self._file.flush()
            self._line, self._shown_s = "", self._clock()


def lines(search: Search) -> list[str]:
    """A line on all trials, and one for each group."""
    runs = list(search.runs.values())
    over = [run for run in runs if run.status.is_over]
    left_out = (Status.FAILED, Status.PRUNED)  # as in the study's best value
    values = [run.values[-1] for run in runs if run.values and run.status not in left_out]
    best = (max if search.policy.maximize else min)(values, default=None)
    shown = "none yet" if best is None else f"{best:.6g}"
    epochs_done = sum(run.epochs for run in runs)
    found = [f"tune: {len(over)} of {search.trials} trials over, {epochs_done} epochs, best value {shown}"]
    for group in search.groups:
        trainer = group.trainer
        if trainer is not None:
            agreed = ", ".join(map(str, group.key)) or "all trials"
            epochs = sorted(run.epochs for _, run in trainer.active)
            where = f"epoch {epochs[0]} to {epochs[-1]}" if epochs else "done"
            found.append(
                f"  {agreed}: {len(epochs)} of {len(trainer.slots)} slots ({trainer.kind}), {where}, "
                f"{len(group.waiting)} waiting"
            )
    return found
