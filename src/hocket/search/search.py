r"""One search: proposals from a study, trained in groups, reported and decided on at epoch boundaries.

study --ask--> trials --infusible values--> groups --slots--> one epoch of all --values--> policy
  ^                                           ^                                              |
  \------------- tell: complete, pruned, failed                         go on, in place -----/
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

from hocket.errors import ExecutionError, InputError
from hocket.search.checkpoints import Checkpoints
from hocket.search.fused import FusedTrainer
from hocket.search.group import TrialGroup, Ways
from hocket.search.policy import Exploit, Move, Policy
from hocket.search.record import Epoch, Record
from hocket.search.run import EpochResult, Run, Status
from hocket.search.study import StudyClient

__all__ = ["Search"]

log = logging.getLogger(__name__)


class Search:
    """A search in progress.

    Args:
        client: the study.
        ways: how groups train.
        policy: how long each trial trains.
        trials: how many trials begin, those from before a kill included.
        batch: how many proposals are asked for at a time.
        checkpoints: where states are kept, or None.
        on_progress: called after each epoch with the search.
    """

    def __init__(
        self,
        client: StudyClient,
        ways: Ways,
        policy: Policy,
        trials: int,
        batch: int,
        checkpoints: Checkpoints | None = None,
        on_progress: Callable[[Search], object] | None = None,
    ) -> None:
        self.client, self.ways, self.policy = client, ways, policy
        self.trials, self.batch = trials, batch
        self.runs: dict[int, Run] = {}
        self.record = Record(split=(ways.split.fusible, ways.split.infusible))
        self._checkpoints = checkpoints
        self._on_progress = on_progress
        self._groups: dict[tuple[Any, ...], TrialGroup] = {}
        self._all_started = False
        self._is_replaying = False
        self._start_s = perf_counter()

    @property
    def groups(self) -> list[TrialGroup]:
        """All groups so far."""
        return list(self._groups.values())

    def run(self) -> None:
        """Search to the end.

        Raises:
            ExecutionError: the storage failed, or every trial did.
            InputError: the user's batches or metric are nothing to work with.
        """
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
        if self.client.is_stopped:
            self._stop()
        self.record.groups = [(group.key, group.why_serial) for group in self._groups.values()]
        self.record.searches = sum(group.searches for group in self._groups.values())
        self._check_any_succeeded()

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
            run = self._add(frozen.number, frozen.params)
            run.values = [frozen.intermediate_values[epoch] for epoch in sorted(frozen.intermediate_values)]
            if frozen.state.is_finished():
                over = {"COMPLETE": Status.COMPLETE, "PRUNED": Status.PRUNED}
                run.status = over.get(frozen.state.name, Status.FAILED)
                self._put_away(run)
            else:
                run.resume(None if self._checkpoints is None else self._checkpoints.load(run.number))
        self._is_replaying = True
        self._close_if_full()  # it was before these trials were decided on
        self._replay(list(self.runs.values()))
        self._is_replaying = False
        for run in self.runs.values():
            if run.status is Status.READY:
                self._group_of(run).waiting.append(run)

    def _replay(self, runs: Sequence[Run]) -> None:
        """Let the policy see again all values at the epochs at which it decides, and who failed between them."""
        seen: dict[int, int] = {}
        gone: set[int] = set()
        while True:
            due = [run for run in runs if seen.get(run.number, 0) < run.until <= run.epochs]
            failed = [run for run in runs if run.status is Status.FAILED and run.epochs < run.until]
            failed = [run for run in failed if run.number not in gone]
            if not due and not failed:
                return
            for run in failed:
                gone.add(run.number)
                self._apply(self.policy.fail(run.number))
            for run in due:
                seen[run.number] = run.until
                if not run.status.is_over:
                    run.status = Status.PAUSED
                self._apply(self.policy.report(run.number, run.until, run.values[run.until - 1]))

    # ------------------------------------------------------------------------------------------------ who trains

    def _ask(self) -> None:
        """Ask for proposals while there is room for them."""
        if self._all_started:
            return
        while self._has_room():
            self.begin(*self.client.ask())
        self._close_if_full()

    def _has_room(self) -> bool:
        """Whether a trial more is asked for now.

        Proposals come in rounds, the next one when the last one is over: so they rest on the same values whatever
        trains them, and whether or not the search was killed, and the slots of a fused model are full. Processes do not
        wait for each other.
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
        return len(self.runs) >= self.trials or self.client.is_stopped

    def _close_if_full(self) -> None:
        """Let the policy know, once, that no more trials begin."""
        if not self._all_started and self._is_full():
            self._all_started = True
            self._apply(self.policy.all_started())

    def _num_ready(self) -> int:
        return sum(group.num_ready for group in self._groups.values())

    def _add(self, number: int, params: dict[str, Any]) -> Run:
        run = Run(number, params, self.ways.seed)
        run.until = self.policy.start(number)
        self.runs[number] = run
        return run

    def _key(self, run: Run) -> tuple[Any, ...]:
        return () if self.ways.processes is not None else (*self.ways.split.key(run.params), *run.variant)

    def _group_of(self, run: Run) -> TrialGroup:
        key = self._key(run)
        return self._groups.setdefault(key, TrialGroup(key, self.ways))

    def _next_group(self) -> TrialGroup | None:
        """The group with most trials that are ready; with a limit on memory only one has slots at a time."""
        ready = [group for group in self._groups.values() if group.num_ready]
        if not ready or self.client.is_stopped:
            return None
        chosen = max(ready, key=lambda group: group.num_ready)
        if self.ways.memory_bytes is not None:
            for group in self._groups.values():
                if group is not chosen:
                    group.close()
        return chosen

    def _work(self, group: TrialGroup) -> None:
        """Train a group until none of its trials may go on."""
        while group.num_ready and not self.client.is_stopped:
            for run, why in group.fill():
                self._refused(group, run, why)
            trainer = group.trainer
            if trainer is None or not trainer.active:
                return
            start_s = perf_counter() - self._start_s
            try:
                results = trainer.advance()
            except InputError:
                raise
            except Exception as error:
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
        if self.ways.is_declared:
            names = ", ".join(self.ways.split.fusible)
            raise InputError(f"fusible: trial {run.number} {run.params} cannot fuse with others ({names}): {why}")
        run.variant = (*run.variant, why)
        self._group_of(run).waiting.append(run)

    # --------------------------------------------------------------------------------------------- what becomes of it

    def _ended(self, group: TrialGroup, results: Sequence[tuple[Run, EpochResult]]) -> None:
        """Note an epoch's values, keep states, then tell the study: a kill in between loses and repeats nothing."""
        due = []
        for run, result in results:
            if result.error is None and result.value is not None and not math.isnan(result.value):
                run.values.append(result.value)
                due.append(run)
            else:
                run.error = result.error or f"its metric is {result.value} in epoch {run.epochs + 1}"
        assert group.trainer is not None
        if self._checkpoints is not None:
            for run in due:
                group.trainer.sync(group.trainer.slots.index(run))
                self._checkpoints.save(run.number, run.state())
        for run, _ in results:
            if run.error is not None:
                self._fail(run, run.error)
        for run in due:
            self.client.report(run)
            if run.epochs == run.until:
                run.status = Status.PAUSED
            self._call_hook(run)
        for run in due:
            if run.epochs == run.until and not run.status.is_over:
                self._apply(self.policy.report(run.number, run.epochs, run.values[-1]))

    def _call_hook(self, run: Run) -> None:
        """Let the user see an epoch's end, and perhaps end the trial."""
        if run.training is None or run.training.on_epoch is None:
            return
        try:
            self.client.call_hook(run, run.training.on_epoch)
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's code; this trial ends, no other one
            if self.client.is_pruned(error):
                self._leave(run, Status.PRUNED)
            else:
                self._fail(run, f"{type(error).__name__}: {error}")

    def _leave(self, run: Run, status: Status) -> None:
        """A trial ends before the policy says so."""
        self._finish(run, status)
        self._apply(self.policy.fail(run.number))

    def _apply(self, decisions: Iterable[Move]) -> None:
        for decision in decisions:
            run = self.runs[decision.number]
            if isinstance(decision, Exploit) and not self._exploit(run, decision):
                continue
            if decision.what in ("go", "exploit"):
                run.until = decision.until
                if not run.status.is_over:
                    self._go_on(run)
            elif not run.status.is_over:
                self._finish(run, Status.COMPLETE if decision.what == "complete" else Status.PRUNED)

    def _go_on(self, run: Run) -> None:
        """In place, where it is in a slot still; else it waits for one."""
        was, run.status = run.status, Status.READY
        if was is Status.PAUSED and not self._is_replaying:
            group = self._group_of(run)
            if group.trainer is None or run not in group.trainer.slots:
                group.waiting.append(run)

    def _exploit(self, run: Run, move: Exploit) -> bool:
        """Let a trial go on from a sibling's state, unless it has done so before a kill; whether it goes on."""
        if run.status.is_over or run.epochs > run.until:
            return True
        if all(each["epoch"] != run.epochs for each in run.exploits):
            parent = self.runs[move.parent]
            state = self._group_of(parent).state_of(parent)
            self._group_of(run).take_out(run)
            run.variant = parent.variant
            params = move.explore(parent.params, self.client.space, self.ways.split.fusible)
            run.exploits.append({"epoch": run.epochs, "parent": parent.number, "params": params})
            try:
                run.go_on_from(state, params, self.ways.train)
            except InputError:
                raise
            except Exception as error:  # noqa: BLE001 - the user's code, or a state that does not fit: this trial ends
                self._fail(run, f"cannot go on from trial {parent.number}: {type(error).__name__}: {error}")
                return False
            if self._checkpoints is not None:
                self._checkpoints.save(run.number, run.state())
        self.client.note_exploits(run)
        return True

    def _fail(self, run: Run, error: str) -> None:
        run.error = error
        self._leave(run, Status.FAILED)

    def _finish(self, run: Run, status: Status) -> None:
        run.status = status
        if status is Status.FAILED:
            log.warning("hocket.tune: trial %d %s fails: %s", run.number, run.params, run.error)
        self.client.report(run)
        self.client.tell(run)
        self._put_away(run)
        if group := self._groups.get(self._key(run)):
            group.remove(run)

    def _put_away(self, run: Run) -> None:
        """Of a trial that is over no state is needed, unless it is the best one's."""
        if self._checkpoints is not None:
            if self.client.is_best(run):
                self._checkpoints.keep_best(run.number)
            self._checkpoints.remove(run.number)

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
        """The search ends before its time: what is kept goes on later, and the rest is told as failed."""
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
