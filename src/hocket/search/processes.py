"""Trials side by side in processes, a way for models that do not fuse.

this process --params, saved state, epochs to go--> worker: an epoch of the plain loop of `hocket.search.trainer`
             <--its value, state at the end--
             --go on, or another trial-->
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Sequence
from multiprocessing import connection, resource_tracker
from typing import Any

import torch

from hocket.errors import InputError
from hocket.ir.limits import usable_cpus
from hocket.search.run import EpochResult, Run
from hocket.search.split import Train
from hocket.search.trainer import SerialTrainer, Trainer

# The time for a process to end after it has closed its pipe.
END_S = 5.0


class ProcessTrainer(Trainer):
    """A slot for each of several spawned processes, which import the module of `train`."""

    kind = "processes"

    def __init__(self, train: Train, seed: int, num_processes: int | None = None, *, keep: bool = False) -> None:
        try:
            self._train = pickle.dumps(train)
        except Exception as error:
            raise InputError(f"train: executor='processes' needs a function that can be imported: {error}") from error
        super().__init__(num_processes or max(2, usable_cpus() // 2))
        self._seed, self._keep = seed, keep
        self._workers: dict[int, Any] = {}
        self._pipes: dict[int, Any] = {}
        self._busy: set[int] = set()
        self._held: dict[int, Run] = {}  # by slot, the trial that its process can go on with

    def put(self, slot: int, run: Run) -> None:
        self.slots[slot] = run

    def sync(self, slot: int) -> None:
        """States come with the results."""

    def advance(self) -> Sequence[tuple[Run, EpochResult]]:
        for slot, run in self.active:
            if slot not in self._busy:
                job = (run.number, dict(run.params), run.seed, run.state(), run.until, self._keep)
                self._pipe(slot).send(None if self._held.get(slot) is run else job)
                self._busy.add(slot)
                self._held[slot] = run
        ready = connection.wait([self._pipes[slot] for slot in self._busy])
        found = []
        for slot in [slot for slot in sorted(self._busy) if self._pipes[slot] in ready]:
            trained = self.slots[slot]
            assert trained is not None
            self._busy.discard(slot)
            try:
                value, error, state = self._pipes[slot].recv()
            except (EOFError, ConnectionError):
                worker = self._workers[slot]
                worker.join(END_S)
                value, error, state = None, f"its process ended with status {worker.exitcode}", None
                if worker.exitcode == 1:
                    error += ", as one of a script that has no `if __name__ == '__main__':` (it has said why)"
                self._stop(slot)
            if isinstance(error, InputError):
                raise error
            trained.saved = state if state is not None else trained.saved
            if trained.epochs + 1 >= trained.until:  # from where it may go on elsewhere
                self._held.pop(slot, None)
            found.append((trained, EpochResult(value, error)))
        return found

    def close(self) -> None:
        for slot in list(self._workers):
            self._stop(slot)
        self.slots = [None] * len(self.slots)

    def _pipe(self, slot: int) -> Any:
        """The pipe to a slot's process, which is started when it is first needed."""
        if slot not in self._workers:
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            threads = max(1, usable_cpus() // len(self.slots))
            worker = context.Process(target=_work, args=(theirs, self._train, self._seed, threads), daemon=True)
            resource_tracker.ensure_running()  # before, since it lets signals through again
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # Ctrl-C is for this process alone
            try:
                worker.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            self._workers[slot], self._pipes[slot] = worker, ours
        return self._pipes[slot]

    def _stop(self, slot: int) -> None:
        worker = self._workers.pop(slot)
        self._pipes.pop(slot).close()
        self._busy.discard(slot)
        self._held.pop(slot, None)
        worker.terminate()
        worker.join()


def _work(pipe: Any, pickled: bytes, seed: int, threads: int) -> None:
    """A process: train an epoch of what comes, or of what was there, until the sender closes."""
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        train: Train = pickle.loads(pickled)
    except Exception as error:  # noqa: BLE001 - importing the user's module; raised by the other process
        what = f"{type(error).__name__}: {error}"
        pipe.send((None, InputError(f"train: executor='processes' cannot import it in a process: {what}"), None))
        return
    trainer = SerialTrainer(train, seed)
    while True:
        try:
            job = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if job is not None:
            number, params, own_seed, saved, until, keep = job
            run = Run(number, params, own_seed, until, saved=saved or None)
        try:
            if job is not None:
                trainer.put(0, run)
            if run.made.on_epoch is not None:
                raise InputError("Training.on_epoch: executor='processes' has no trial to call it with")
            [(_, result)] = trainer.advance()
        except Exception as error:  # noqa: BLE001 - the user's code; serialised for the other process
            pipe.send((None, error if isinstance(error, InputError) else f"{type(error).__name__}: {error}", None))
            continue
        if result.value is None:
            pipe.send((None, result.error, None))
            continue
        run.values.append(result.value)
        pipe.send((result.value, None, run.state() if keep or run.epochs == until else None))


def _end_with_parent() -> None:
    """End this process with the one that has started it, however that ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
