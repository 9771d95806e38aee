"""Decisions on a search's trials at the end of an epoch: reported to the study, ended or continued."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

from hocket.errors import InputError
from hocket.search.checkpoints import Checkpoints
from hocket.search.group import TrialGroup, Ways
from hocket.search.policy import Ends, Exploit, Move, Policy
from hocket.search.run import EpochResult, Run, Status
from hocket.search.split import fitting
from hocket.search.study import EXPLOITS, PRUNED, StudyClient

log = logging.getLogger(__name__)


class Decisions:
    """The trials of a search, the groups that they are in, and what happens to them between epochs."""

    def __init__(
        self, client: StudyClient, ways: Ways, policy: Policy, checkpoints: Checkpoints | None, ends: Ends | None
    ) -> None:
        self.client, self.ways, self.policy = client, ways, policy
        self.runs: dict[int, Run] = {}
        self._checkpoints = checkpoints
        self._ends = Ends() if ends is None else ends
        self._groups: dict[tuple[Any, ...], TrialGroup] = {}
        self._is_replaying = False

    @property
    def groups(self) -> list[TrialGroup]:
        """All groups so far."""
        return list(self._groups.values())

    def _value(self, run: Run, epochs: int | None = None) -> float:
        """Value of a trial after this number of epochs. None counts all epochs."""
        return self._ends.value(run.values[:epochs], self.policy.maximize)

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

    def _ended(self, group: TrialGroup, results: Sequence[tuple[Run, EpochResult]]) -> None:
        """Note an epoch's values, keep states, then tell the study: a kill in between loses and repeats nothing."""
        due = []
        for run, result in results:
            if result.error is None and result.value is not None and math.isfinite(result.value):
                run.values.append(result.value)
                due.append(run)
            else:
                run.error = result.error or f"its metric is {result.value} in epoch {run.epochs + 1}"
        assert group.trainer is not None
        if self._checkpoints is not None:
            for run in due:
                group.trainer.sync(group.trainer.slots.index(run))
                state = run.state()
                if self._ends.is_best and run.values[-1] == self._value(run):  # of equal ones the last epoch's
                    self._checkpoints.save(run.number, state, is_best=True)
                self._checkpoints.save(run.number, state)
        for run, _ in results:
            if run.error is not None:
                self._fail(run, run.error)
        for run in due:
            self.client.report(run)
            if run.epochs == run.until:
                run.status = Status.PAUSED
            self._call_hook(run)
            if not run.status.is_over and self._is_stale(run):
                self._leave(run, Status.COMPLETE)
        for run in due:
            if run.epochs == run.until and not run.status.is_over:
                self._apply(self.policy.report(run.number, run.epochs, self._value(run)))

    def _call_hook(self, run: Run) -> None:
        """Let the user see an epoch's end, and perhaps end the trial."""
        if run.training is None or run.training.on_epoch is None or run.epochs <= run.seen:
            return
        run.seen = run.epochs
        try:
            self.client.call_hook(run, run.training.on_epoch)
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's code; this trial ends, no other one
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
        """Let a trial go on in its slot. One that has left it waits for another."""
        was, run.status = run.status, Status.READY
        if was is Status.PAUSED and not self._is_replaying:
            group = self._group_of(run)
            if group.trainer is None or run not in group.trainer.slots:
                group.waiting.append(run)

    def _exploit(self, run: Run, move: Exploit) -> bool:
        """Let a trial go on from a sibling's state, unless it has done so before a kill. Returns True if it goes on."""
        if run.status.is_over or run.epochs > run.until:
            return True
        if all(each["epoch"] != run.epochs for each in run.exploits):
            parent = self.runs[move.parent]
            state = self._group_of(parent).state_of(parent)
            self._group_of(run).take_out(run)
            run.variant = parent.variant
            moved = move.explore(parent.params, self.client.space, self.ways.split.fusible)
            params = fitting(self.ways.train, parent.params, moved, self.ways.seed)
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
        self.client.note(run, EXPLOITS, run.exploits)
        return True

    def _fail(self, run: Run, error: str) -> None:
        """Code of the user's has raised, or gave no number. A trial that it prunes does not fail."""
        if error.startswith("TrialPruned: "):  # a text, for it may come from another process
            run.error = None
            self.client.note(run, PRUNED, run.epochs)
            self._leave(run, Status.PRUNED)
        else:
            run.error = error
            self._leave(run, Status.FAILED)

    def _finish(self, run: Run, status: Status) -> None:
        run.status = status
        if status is Status.FAILED:
            log.warning("hocket.tune: trial %d %s fails: %s", run.number, run.params, run.error)
        self.client.report(run)
        self.client.tell(run, self._value(run) if status is Status.COMPLETE else None)
        self._put_away(run)
        if group := self._groups.get(self._key(run)):
            group.remove(run)

    def _put_away(self, run: Run) -> None:
        """Remove the state of a finished trial, unless it is the best one's."""
        if self._checkpoints is not None:
            if self.client.is_best(run):
                self._checkpoints.keep_best(run.number)
            self._checkpoints.remove(run.number)

    def _replay(self, runs: Sequence[Run]) -> None:
        """Let the policy see again all values at the epochs at which it decides, and who failed between them."""
        seen: dict[int, int] = {}
        gone: set[int] = set()
        while True:
            left = [run for run in runs if self._has_left(run) and run.epochs <= run.until and run.number not in gone]
            due = [run for run in runs if seen.get(run.number, 0) < run.until <= run.epochs and run not in left]
            due = [run for run in due if run.number not in gone]
            if not due and not left:
                return
            for run in left:
                gone.add(run.number)
                self._apply(self.policy.fail(run.number))
            for run in due:
                seen[run.number] = run.until
                if not run.status.is_over:
                    run.status = Status.PAUSED
                self._apply(self.policy.report(run.number, run.until, self._value(run, run.until)))

    def _is_stale(self, run: Run) -> bool:
        """True if a trial is out of patience before its last epoch."""
        return run.epochs < self.policy.epochs and self._ends.is_stale(run.values, self.policy.maximize)

    def _has_left(self, run: Run) -> bool:
        """True if a trial has ended before the policy said so."""
        if run.status is Status.FAILED:
            return run.epochs < run.until
        return run.is_left or (run.status is Status.COMPLETE and self._is_stale(run))
