"""Ranks whose ops move when the test wants it: numbers and decisions are planted, all else is as ever."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from distributed.stages.trained import Work, divided_by, flat, on_meta, stages_of, work_of
from distributed.training import tensors_of
from hocket import distribute
from hocket.adaptation.assistants import OpMove
from hocket.distributed.stages import rebalancing


class Planted:
    """In the place of `decide`: at each of the first `times` looks, units with state go to the next rank.

    Attributes:
        seen: the shares of all ranks at each look.
    """

    def __init__(self, times: int) -> None:
        self.times, self.seen = times, []

    def __call__(self, shares, rules, assignment) -> tuple[OpMove, ...]:
        self.seen.append(shares)
        if len(self.seen) > self.times:
            return ()
        units: dict[int, list[int]] = {}
        for position, unit in enumerate(rules.unit_of):
            units.setdefault(unit, []).append(position)
        able = [unit for unit in units.values() if any(rules.ops[position].state_bytes for position in unit)]
        able = [unit for unit in able if all(rules.ops[position].is_movable for position in unit)]
        chosen = able[(len(self.seen) - 1) % len(able) :: 2]
        ranks = len(rules.devices)
        return tuple(OpMove(op, assignment[op], (assignment[op] + 1) % ranks) for unit in chosen for op in unit)


def planted(times: int) -> Planted:
    """Plants them in this process; ranks are processes of their own."""
    decide = Planted(times)
    rebalancing.decide = decide
    return decide


class Saver:
    """A thread that wants a checkpoint while ops move, and has to wait until they have moved.

    The checkpoint is gathered, or what `save` makes of the step.

    Attributes:
        found: what happened, in order; on rank 0 with the checkpoint.
    """

    def __init__(self, work: Work, rank: int, save: Callable[[Any], None] | None = None) -> None:
        self.found: list[Any] = []
        self._work, self._rank, self._by_parts = work, rank, save
        self._begun, self._asked = threading.Event(), threading.Event()
        self._move, rebalancing.migrated = rebalancing.migrated, self._slowly

    def start(self, fast: distribute.PartitionedStep) -> None:
        """It is to be asked for during the next migration."""
        self.found, self._fast = [], fast
        self._begun.clear()
        self._asked.clear()
        self._thread = threading.Thread(target=self._save)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _slowly(self, *arguments):
        self._begun.set()
        if hasattr(self, "_thread"):
            assert self._asked.wait(20)
            time.sleep(0.1)  # a checkpoint that does not wait is taken now
        found = self._move(*arguments)
        self.found.append("moved")
        return found

    def _save(self) -> None:
        assert self._begun.wait(30)
        self._asked.set()
        if self._by_parts is not None:
            self._by_parts(self._fast)
            self.found.append("saved")
            return
        self._fast.gather()
        self.found.append(tensors_of(self._work) if self._rank == 0 else "saved")


def rank_of_moves(rank, say, name, optimizer, count, seed, executor, times, every=3, has_values=True):
    """A rank of a whole job in which ops move, and a checkpoint is asked for while they do for the last time.

    Without `has_values` only rank 0 begins with a model that has some. Returns what `rank_of_stages` does, with the
    migrations beside the plan; then what that checkpoint was.
    """
    decide = planted(times)
    work = work_of(name, optimizer) if has_values or rank == 0 else on_meta(name, optimizer)
    saver = Saver(work, rank)
    partition = divided_by(work, rank, seed)
    torch.manual_seed(21 if rank == 0 else 99)
    found = []
    with stages_of(work, partition=partition, executor=executor, rebalance=every) as fast:
        for number in range(count):
            if number == saved_after(times, every) - 1:
                saver.start(fast)
            found.append(flat(fast(work.batches[number % len(work.batches)])))
            if number == saved_after(times, every) - 1:
                saver.join()
        held = {name for name, value in work.model.named_parameters() if value.numel()}
        assert held == {name for name, _ in work.model.named_parameters() if name in fast._job.kept}
        fast.gather()
        ops = [op.name for op in fast.part.graph.ops if op.role not in ("recv", "send")]
        plan, words = str(fast.plan), str(fast)
    migrations = [(m.step, [tuple(each) for each in m.moved], m.size_bytes, m.refused) for m in fast.migrations]
    state = torch.get_rng_state().numpy().copy()
    return found, tensors_of(work), state, ops, (migrations, plan), decide.seen, words, saver.found


def moves_after(every: int) -> Iterator[int]:
    """Number of steps that have run each time ops move; not at the first look, nor with one step alone behind them."""
    return itertools.count(2 * every, max(2, every))


def saved_after(times: int, every: int) -> int:
    """Number of steps that have run when the checkpoint is taken: ops move before the last of them."""
    return next(itertools.islice(moves_after(every), times - 1, None)) + 1
