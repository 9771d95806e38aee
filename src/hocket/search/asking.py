"""Trials marked with their search in the storage, so that a kill leaves none without an owner.

A search that is killed between asking for a trial and marking it as its own would leave it running for ever, or take it
for another one's. So a new trial is written with its owner, in one write; an enqueued one, which every search of the
study may take, is claimed before it is taken::

    nothing --------------------------create with "hocket:owner"----------------------> ours
    waiting --"hocket:claim:<owner>"--> waiting --take--> running --"hocket:owner"--> ours

A trial that runs without an owner belongs to the search that alone has claimed it. (Two searches that claim one trial
at once, of which the one that takes it is killed before its next write, leave it running: whose it is cannot be told.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna

__all__ = ["begun", "is_owned"]

OWNER = "hocket:owner"
CLAIM = "hocket:claim:"


def begun(study: optuna.Study, owner: str) -> int:
    """The storage id of a new trial: the first enqueued one that no other search takes, else a new one."""
    import optuna

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
    created: int = storage.create_new_trial(study._study_id, template_trial=mine)
    return created


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
