"""A hyper-parameter search from its arguments: checked, its parts made, run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hocket.errors import InputError
from hocket.optim.hyper import check_whole, one_of
from hocket.search.checkpoints import Checkpoints
from hocket.search.fused import Runner
from hocket.search.group import MAX_SLOTS, Ways
from hocket.search.policy import Ends, Schedules
from hocket.search.processes import ProcessTrainer
from hocket.search.search import Record, Search
from hocket.search.split import Split, Train, find_split, suggest_all
from hocket.search.study import StudyClient, base_sampler, load_optuna, new_study

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

EXECUTORS = ("auto", "serial", "processes", "fused", "scheduled")
TRIALS = 60
ROUNDS = 4
FEW_TRIALS = 24  # of a round: up to there a fused step hardly takes longer with more of them


@dataclass(frozen=True)
class SearchConfig:
    """The arguments of `hocket.tune` beside the function and the space, with their names and meanings, checked."""

    trials: int | None = None
    epochs: int = 10
    halving: Schedules | None = None
    study: optuna.Study | None = None
    direction: str = "minimize"
    storage: Any = None
    name: str | None = None
    executor: str = "auto"
    slots: int | None = None
    memory_bytes: int | None = None
    fusible: Sequence[str] | None = None
    seed: int = 0
    timeout: float | None = None
    patience: int | None = None
    value: str = "last"
    checkpoints: str | os.PathLike[str] | None = None
    callbacks: Sequence[Callable[[Any, Any], object]] = ()
    processes: int | None = None
    # makes what is called in place of a fused step. See `hocket.search.fused.FusedTrainer`.
    runner: Runner | None = None
    on_progress: Callable[[Search], object] | None = None  # called after each epoch with the search

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs, 1)
        check_whole("seed", self.seed, 0)
        for field in ("trials", "slots", "memory_bytes", "processes", "patience"):
            if getattr(self, field) is not None:
                check_whole(field, getattr(self, field), 1)
        if self.timeout is not None and not (isinstance(self.timeout, (int, float)) and self.timeout > 0):
            raise InputError(f"timeout: expected seconds above 0, got {self.timeout!r}")
        directions = ("minimize", "maximize")
        for field, known in (("executor", EXECUTORS), ("direction", directions), ("value", ("last", "best"))):
            one_of(field, getattr(self, field), known)
        if not isinstance(self.callbacks, (list, tuple)) or not all(map(callable, self.callbacks)):
            raise InputError(f"callbacks: expected a list of functions, got {self.callbacks!r}")
        if self.halving is not None and not isinstance(self.halving, Schedules):
            raise InputError(f"halving: expected hocket.Halving, Hyperband, Asha or Population, got {self.halving!r}")
        if self.study is not None and (self.storage, self.name, self.direction) != (None, None, "minimize"):
            raise InputError("study: expected it without direction, storage and name, which are the study's own")

    @property
    def total(self) -> int:
        """The number of trials that begin."""
        needed = None if self.halving is None else self.halving.trials(self.epochs)
        if needed is not None and self.trials is not None and self.trials != needed:
            raise InputError(
                f"trials: {type(self.halving).__name__} of {self.epochs} epochs takes {needed}, got {self.trials}"
            )
        return needed or self.trials or TRIALS

    def batch(self, study: optuna.Study) -> int:
        """The number of proposals asked for at a time: all, where none of them rests on results of others.

        A sampler that learns from results, such as TPE, is asked in rounds: four of them, or fewer of `FEW_TRIALS`.
        """
        samplers = load_optuna().samplers
        fixed = (samplers.RandomSampler, samplers.GridSampler, samplers.QMCSampler, samplers.BruteForceSampler)
        if self.halving is not None or isinstance(base_sampler(study.sampler), fixed):
            return self.total
        return min(self.total, self.slots or max(FEW_TRIALS, -(-self.total // ROUNDS)))


def search(train: Train, space: Mapping[str, Any] | None, config: SearchConfig) -> tuple[optuna.Study, Record]:
    """Search for hyper-parameters (see `hocket.tune`). Return the study, and what was done."""
    load_optuna()
    if not callable(train):
        raise InputError(f"train: expected a function of the parameters, got a value of type {type(train).__name__}")
    total = config.total
    kept = None if config.checkpoints is None else Checkpoints(config.checkpoints)
    try:
        study = config.study or new_study(config.direction, config.storage, config.name)
        owner = None if kept is None else kept.owner
        client = StudyClient(
            study,
            space,
            owner,
            config.seed if config.study is None else None,
            config.callbacks,
            lambda proposal: suggest_all(train, proposal, config.seed),
            config.seed,
        )
        client.say_ignored()
        known = client.owned()
        asked, split = _first_split(train, client, known, config)
        processes = None
        if config.executor == "processes":
            processes = partial(ProcessTrainer, train, config.seed, config.processes, keep=kept is not None)
        ways = Ways(
            train,
            split,
            config.executor,
            config.seed,
            config.slots or MAX_SLOTS,
            config.memory_bytes,
            config.runner,
            processes,
        )
        policy = (config.halving or Schedules()).policy(total, config.epochs, client.maximize)
        is_known = split.why or config.fusible is not None  # else no trial can be built, which each of them says
        if processes is None and config.executor != "serial" and not split.fusible and is_known:
            why = next(iter(split.why.values()), "none is declared fusible")
            log.warning("hocket.tune: nothing in the space is fusible, so trials train one at a time: %s", why)
        ends = Ends(config.timeout, config.patience, is_best=config.value == "best")
        work = Search(client, ways, policy, total, config.batch(study), kept, config.on_progress, ends)
        work.resume(known)
        for number, params, error in asked:
            work.begin(number, params, error)
        work.run()
    finally:
        if kept is not None:
            kept.close()
    return study, work.record


def _first_split(
    train: Train, client: StudyClient, known: Sequence[Any], config: SearchConfig
) -> tuple[list[tuple[int, dict[str, Any], str | None]], Split]:
    """The split by the first trial that can be built, and the trials asked for meanwhile with their errors."""
    asked: list[tuple[int, dict[str, Any], str | None]] = []
    tried = [client.params_of(frozen) for frozen in known if frozen.params]
    while True:
        is_new = not tried
        if is_new:
            if client.is_exhausted:
                return asked, Split((), tuple(client.space))
            number, params, error = client.ask()
            asked.append((number, params, error))
            if error is not None:
                if len(known) + len(asked) >= config.total:
                    return asked, Split((), tuple(client.space))
                continue
        else:
            params = tried.pop(0)
        try:
            # Other trials' names come later, or have come before a kill.
            own = {name: distribution for name, distribution in client.space.items() if name in params}
            return asked, find_split(train, own, params, config.seed, config.fusible)
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's code; this trial ends, no other one
            if is_new:
                asked[-1] = (number, params, f"{type(error).__name__}: {error}")
            if len(known) + len(asked) >= config.total:
                return asked, Split((), tuple(client.space))
