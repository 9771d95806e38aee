"""Optuna as the engine: what is asked of a study, and what is reported to it.

Several searches, on several machines, may share one study through its storage. Those with checkpoints mark their trials
with an owner (Optuna has heartbeats only in databases, and a journal keeps a trial of a killed process running for
ever). A search that is killed between asking for a trial and marking it would leave it running, or take it for another
search's. So a new trial is written with its owner in one write, and an enqueued one is claimed before it is taken::

    nothing --------------------------create with "hocket:owner"----------------------> ours
    waiting --"hocket:claim:<owner>"--> waiting --take--> running --"hocket:owner"--> ours

A running trial without an owner belongs to the search that alone has claimed it. (Two searches that claim one trial at
once, of which the one that takes it is killed before its next write, leave it running.)
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from hocket.errors import ExecutionError, InputError, MissingDependencyError
from hocket.search.run import Run, Status
from hocket.search.training import Hyperparameters, stored_form

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

OWNER = "hocket:owner"
CLAIM = "hocket:claim:"
WHY = "hocket:error"
EXPLOITS = "hocket:exploits"
SEED = "hocket:seed"  # what the trial trains with
PRUNED = "hocket:pruned"  # the epoch after which the user's own function pruned a trial


def load_optuna() -> Any:
    """The module of Optuna, or a MissingDependencyError."""
    try:
        import optuna
    except ImportError:
        raise MissingDependencyError("optuna", "tune", "hocket.tune") from None
    return optuna


def new_study(direction: str, storage: Any, name: str | None) -> optuna.Study:
    """A study in a storage (in memory if None), or the existing one of this name and direction."""
    optuna = load_optuna()
    with _storage_errors(name):
        study: Any = optuna.create_study(
            direction=direction,
            storage=storage,
            study_name=name,
            pruner=optuna.pruners.NopPruner(),
            load_if_exists=name is not None,
        )
        there = [each.name.lower() for each in study.directions]
    if there != [direction]:
        raise InputError(f"direction: study {name} is there already, to {' and '.join(there)}, got {direction!r}")
    return study


class StudyClient:
    """A study as one search uses it.

    Args:
        study: a study of one direction.
        space: distributions by name, or None if `suggesting` proposes them trial by trial.
        owner: name of this search, if it keeps checkpoints.
        seed: seed of a TPE sampler per proposal and parameter, so that a resumed search proposes the same, or None
            for the study's own sampler.
        callbacks: called with the study and each finished trial, as by `optuna.Study.optimize`.
        suggesting: asks a `Hyperparameters` for all hyper-parameters of a trial.
        trained_with: seed of weights and data, which is noted of each trial.
    """

    def __init__(
        self,
        study: optuna.Study,
        space: Mapping[str, Any] | None,
        owner: str | None = None,
        seed: int | None = None,
        callbacks: Sequence[Callable[[Any, Any], object]] = (),
        suggesting: Callable[[Hyperparameters], object] | None = None,
        trained_with: int = 0,
    ) -> None:
        self._optuna = load_optuna()
        if not isinstance(study, self._optuna.Study):
            raise InputError(f"study: expected an optuna.Study, got a value of type {type(study).__name__}")
        if space is not None and (not isinstance(space, Mapping) or not space):
            raise InputError(f"space: expected a dict of Optuna's distributions by name, got {space!r}")
        for name, distribution in (space or {}).items():
            if not isinstance(distribution, self._optuna.distributions.BaseDistribution):
                raise InputError(f"space: {name}: expected one of optuna.distributions, got {distribution!r}")
        with _storage_errors(study.study_name):
            if len(study.directions) != 1:
                raise InputError(f"study: expected one direction, got {len(study.directions)}")
            self.maximize = study.direction == self._optuna.study.StudyDirection.MAXIMIZE
        self.study, self.space = study, dict(space or {})
        self._suggesting = suggesting if space is None else None
        self._keeps_all = isinstance(study._storage, self._optuna.storages.InMemoryStorage)
        self._meanings: dict[str, dict[Any, Any]] = {}  # of values that the storage keeps as text
        self._owner, self._seed, self._callbacks = owner, seed, tuple(callbacks)
        self._trained_with, self._asked = trained_with, 0
        self._trials: dict[int, Any] = {}
        self._reported: dict[int, int] = {}  # how many epochs of each trial the storage knows
        self._said: set[str] = set()
        self._sampler_stopped = False
        study._stop_flag = False  # as `optimize` begins

    @property
    def is_stopped(self) -> bool:
        """True if the user has called ``study.stop()``."""
        return bool(self.study._stop_flag)

    @property
    def is_exhausted(self) -> bool:
        """True if the sampler has nothing more to propose, and no trial is enqueued."""
        states = self._optuna.trial.TrialState
        sampler, samplers = base_sampler(self.study.sampler), self._optuna.samplers
        if not isinstance(sampler, (samplers.GridSampler, samplers.BruteForceSampler)) and not self._sampler_stopped:
            return False
        with _storage_errors(self.study.study_name):
            if self.study.get_trials(deepcopy=False, states=(states.WAITING,)):
                return False
            return self._sampler_stopped or is_exhausted(sampler, self.study)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Let ``study.stop()`` be called, as inside of `optuna.Study.optimize`."""
        before, self.study._thread_local.in_optimize_loop = self.study._thread_local.in_optimize_loop, True
        try:
            yield
        finally:
            self.study._thread_local.in_optimize_loop = before

    def say(self, what: str) -> None:
        """Warn of something that is ignored, once."""
        if what not in self._said:
            self._said.add(what)
            log.warning("hocket.tune: %s", what)

    def say_ignored(self) -> None:
        """Warn of what the study brings along and a search has no use for."""
        pruner = self.study.pruner
        if not isinstance(pruner, self._optuna.pruners.NopPruner):
            self.say(f"the study's {type(pruner).__name__} is not asked: halving= ends the worse trials early")
        if getattr(self.study._storage, "get_heartbeat_interval", lambda: None)() is not None:
            self.say("the storage's heartbeat is not sent: checkpoints= goes on with the trials of a killed search")

    def owned(self) -> list[Any]:
        """The trials of this search from before it was killed. One that was being asked for gets its parameters."""
        if self._owner is None:
            return []
        with _storage_errors(self.study.study_name):
            for trial in self._mine():
                if trial.state.is_finished():
                    self._ask_function(trial)  # whose names are in the space, in the same order as before the kill
                else:
                    if OWNER not in trial.user_attrs:
                        self.study._storage.set_trial_user_attr(trial._trial_id, OWNER, self._owner)
                    self._propose(self._optuna.Trial(self.study, trial._trial_id))
                self._reported[trial.number] = max(trial.intermediate_values, default=0)
                self._asked += 1
            return self._mine()

    def _mine(self) -> list[Any]:
        assert self._owner is not None
        return [trial for trial in self.study.get_trials(deepcopy=False) if is_owned(trial, self._owner)]

    def ask(self) -> tuple[int, dict[str, Any], str | None]:
        """The number and the parameters of a new trial, and what the user's function raised when it was asked."""
        with _storage_errors(self.study.study_name), self.stoppable():
            if self._owner is None:
                trial = self.study.ask()
            else:
                trial = self._optuna.Trial(self.study, begun(self.study, self._owner))
            error = self._propose(trial)
            self._asked += 1
            self._reported[trial.number] = 0
            for name in self.study._storage.get_trial_system_attrs(trial._trial_id).get("fixed_params", {}):
                if name not in trial.params:
                    self.say(f"trial {trial.number} was enqueued with {name!r}, which is not in the space")
            return trial.number, self.params_of(trial), error

    def params_of(self, trial: Any) -> dict[str, Any]:
        """A trial's parameters, as they are in the space."""
        known: dict[str, dict[Any, Any]] = self._meanings
        return {name: known.get(name, {}).get(value, value) for name, value in trial.params.items()}

    def _propose(self, trial: Any) -> str | None:
        """Let the sampler suggest each parameter that a trial does not have."""
        self._trials[trial.number] = trial
        trial.set_user_attr(SEED, self._trained_with)
        for name in self.space if self._suggesting is None else ():
            self._suggest(trial, name, self.space[name])
        return self._ask_function(trial)

    def _ask_function(self, trial: Any) -> str | None:
        """Let the user's function, where it has the space, ask for the parameters of a trial. Return what it raised."""
        if self._suggesting is None:
            return None
        try:
            self._suggesting(Hyperparameters({}, partial(self._suggest, trial)))
        except Exception as error:  # the user's code; this trial ends, no other one
            if isinstance(error, InputError) or (_is_of_storage(error) and not isinstance(error, OSError)):
                raise
            return f"{type(error).__name__}: {error}"
        if not self.space:
            raise InputError("space: none is given, and train suggests no parameter: params.suggest_float(...)")
        return None

    def _suggest(self, trial: Any, name: str, distribution: Any) -> Any:
        self.space.setdefault(name, distribution)
        meaning: dict[Any, Any] = {}
        if not self._keeps_all:
            distribution, meaning = stored_form(distribution)
            self._meanings[name] = meaning
        if name in trial.params:
            return meaning.get(trial.params[name], trial.params[name])
        if self._seed is not None:
            place = list(self.space).index(name)
            seed = 8_191 * (1_000_003 * self._seed + self._asked) + place
            self.study.sampler = self._optuna.samplers.TPESampler(seed=seed % 2**32, constant_liar=True)
        value = trial._suggest(name, distribution)
        return meaning.get(value, value)

    def note(self, run: Run, key: str, value: Any) -> None:
        """Note something of a trial."""
        with _storage_errors(self.study.study_name):
            self._trials[run.number].set_user_attr(key, value)

    def report(self, run: Run) -> None:
        """Note the values of a trial that the storage does not know yet."""
        with _storage_errors(self.study.study_name):
            for epoch in range(self._reported[run.number], run.epochs):
                self._trials[run.number].report(run.values[epoch], epoch + 1)
        self._reported[run.number] = max(self._reported[run.number], run.epochs)  # fewer after a new beginning

    def call_hook(self, run: Run, hook: Callable[[Any, int, float], object]) -> None:
        """Call a user's function with a trial, after an epoch."""
        hook(self._trials[run.number], run.epochs, run.values[-1])

    def is_best(self, run: Run) -> bool:
        """True if a trial that is complete is the best one of the study."""
        with _storage_errors(self.study.study_name):
            return run.status is Status.COMPLETE and self.study.best_trial.number == run.number

    def tell(self, run: Run, value: float | None = None) -> None:
        """Tell the study the value of a trial that is over (the last one if None) or how it ended, with callbacks."""
        states = self._optuna.trial.TrialState
        was_stopped = self.is_stopped
        with _storage_errors(self.study.study_name), self.stoppable():
            if run.status is Status.COMPLETE:
                told = run.values[-1] if value is None else value
                self.study.tell(run.number, told, skip_if_finished=True)
            elif run.status is Status.PRUNED:
                self.study.tell(run.number, state=states.PRUNED, skip_if_finished=True)
            else:
                trial = self._trials[run.number]
                if not self.study._storage.get_trial(trial._trial_id).state.is_finished():
                    trial.set_user_attr(WHY, run.error or "")
                self.study.tell(run.number, state=states.FAIL, skip_if_finished=True)
            frozen = self.study._storage.get_trial(self._trials[run.number]._trial_id)
        if self.is_stopped and not was_stopped:  # by a sampler that is through: trials that have begun go on
            self._sampler_stopped, self.study._stop_flag = True, False
        with self.stoppable():
            for callback in self._callbacks:
                callback(self.study, frozen)


def base_sampler(sampler: Any) -> Any:
    """The sampler that draws, of one that fixes some parameters around another."""
    while isinstance(sampler, load_optuna().samplers.PartialFixedSampler):
        sampler = sampler._base_sampler
    return sampler


def is_exhausted(sampler: Any, study: Any) -> bool:
    """True if each point of a sampler's grid has a trial, finished or not. Otherwise it would propose some again."""
    samplers, states = load_optuna().samplers, load_optuna().trial.TrialState
    trials = study.get_trials(deepcopy=False)
    if isinstance(sampler, samplers.GridSampler):
        running = {trial.system_attrs.get("grid_id") for trial in trials if trial.state is states.RUNNING}
        return set(sampler._get_unvisited_grid_ids(study)) <= running
    from optuna.samplers import _brute_force as brute_force

    begun_ = [trial for trial in trials if trial.state is not states.WAITING and trial.params]
    tree = brute_force._TreeNode()
    sampler._populate_tree(tree, begun_, {})
    return bool(begun_) and not tree.is_any_expandable(exclude_running=True)


@contextmanager
def _storage_errors(name: str | None) -> Iterator[None]:
    """Raise a storage's errors as one ExecutionError that names the study."""
    try:
        yield
    except Exception as error:
        if not _is_of_storage(error):
            raise
        cause = error.__cause__ or error
        whose = "a new study" if name is None else f"study {name}"
        raise ExecutionError(f"{whose}: its storage failed, is it locked or gone? {cause}") from error


def _is_of_storage(error: Exception) -> bool:
    """True if a storage failed: Optuna's own error, that of its database, or a file's."""
    own = [load_optuna().exceptions.StorageInternalError, OSError]
    if database := sys.modules.get("sqlalchemy"):
        own.append(database.exc.SQLAlchemyError)
    return isinstance(error, tuple(own))


def begun(study: optuna.Study, owner: str) -> int:
    """The storage id of a new trial: the first enqueued one that no other search takes, else a new one."""
    optuna = load_optuna()
    states = optuna.trial.TrialState
    storage = study._storage
    study._thread_local.cached_all_trials = None  # as `optuna.Study.ask` begins
    for waiting in storage.get_all_trials(study._study_id, deepcopy=False, states=(states.WAITING,)):
        number: int = waiting._trial_id
        try:
            storage.set_trial_user_attr(number, CLAIM + owner, True)
            if storage.set_trial_state_values(number, state=states.RUNNING):
                storage.set_trial_user_attr(number, OWNER, owner)
                return number
            storage.set_trial_user_attr(number, CLAIM + owner, False)
        except optuna.exceptions.UpdateFinishedTrialError:
            continue
    mine = optuna.trial.create_trial(state=states.RUNNING, user_attrs={OWNER: owner})
    return storage.create_new_trial(study._study_id, template_trial=mine)


def is_owned(trial: Any, owner: str) -> bool:
    """True if a trial of the storage belongs to a search, also if that was killed while it asked for the trial.

    Example:
        >>> import optuna
        >>> study = optuna.create_study()
        >>> study.enqueue_trial({"lr": 0.1})
        >>> for owner in ("a", "b"):
        ...     _ = begun(study, owner)
        >>> [trial.number for trial in study.get_trials(deepcopy=False) if is_owned(trial, "a")]
        [0]
    """
    attributes = trial.user_attrs
    if OWNER in attributes:
        return bool(attributes[OWNER] == owner)
    claims = [key.removeprefix(CLAIM) for key, value in attributes.items() if key.startswith(CLAIM) and value]
    return trial.state.name == "RUNNING" and claims == [owner]
