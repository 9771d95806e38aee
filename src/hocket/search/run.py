"""One trial on its way: its parameters, how far it is, and all that it trains with."""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.fusion.shared_objects import attributes_of
from hocket.fusion.stacked import is_same
from hocket.search.data import RandomState
from hocket.search.split import Signature, Train, built, signature
from hocket.search.training import PLAIN, Training


class Status(enum.Enum):
    """The status of a trial."""

    READY = "ready"  # may train, in a slot or waiting for one
    PAUSED = "paused"  # at the end of a rung, until the rung is decided
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """True if the trial trains no more."""
        return self in (Status.COMPLETE, Status.PRUNED, Status.FAILED)


@dataclass(frozen=True)
class EpochResult:
    """The result of one epoch of one trial: a value, or the error that ended it."""

    value: float | None = None
    error: str | None = None


@dataclass(eq=False)
class Run:
    """A trial in training."""

    number: int  # of the trial in its study
    params: Mapping[str, Any]  # its hyper-parameters
    seed: int  # of its weights and its random numbers
    until: int = 0  # how many epochs it may go before it is decided on
    status: Status = Status.READY
    values: list[float] = field(default_factory=list)  # the metric after each epoch so far
    steps: int = 0  # of its scheduler so far, where that steps after each of the optimizer
    error: str | None = None
    seen: int = 0  # up to which epoch the user's hook was called; a trial that begins anew makes epochs twice
    # what `train` made, whose tensors and numbers are the trial's own while it is in no fused slot; None before
    # it is built and after it is over
    training: Training | None = None
    signature: Signature = ()
    random: RandomState | None = None  # the generators of the model's draws
    saved: Mapping[str, Any] | None = None  # a state to go on from, once it is built
    # tells groups apart whose infusible parameters agree and whose signatures or data do not
    variant: tuple[Any, ...] = ()
    # when it went on from a sibling's state: the epoch, the sibling's number, and its parameters since
    exploits: list[dict[str, Any]] = field(default_factory=list)
    origin: Mapping[str, Any] | None = None  # its state when it last did so, from which it begins anew
    is_left: bool = False  # whether the user's own function pruned it, before a kill

    @property
    def epochs(self) -> int:
        """The number of finished epochs."""
        return len(self.values)

    @property
    def made(self) -> Training:
        """All it trains with, once it is built."""
        assert self.training is not None
        return self.training

    def build(self, train: Train) -> Training:
        """Make all that it trains with, from the saved state if there is one."""
        if self.training is None:
            made = built(train, self.params, self.seed)
            self.random = RandomState(self.seed)
            self.signature = signature(made)
            self.training, self.steps = made, 0
            if self.saved is not None:
                self.load_state(self.saved)
                self.saved = None
        return self.training

    def state(self) -> dict[str, Any]:
        """All of it as plain tensors and numbers, which `load_state` takes."""
        if self.training is None:
            return dict(self.saved or {})
        assert self.random is not None
        scheduler = self.training.scheduler
        return {
            "values": list(self.values),
            "steps": self.steps,
            "params": dict(self.params),
            "exploits": list(self.exploits),
            "model": self.training.model.state_dict(),
            "buffers": dict(self.training.model.named_buffers()),  # a state dict leaves some out
            "attributes": plain_attributes(self.training.model),
            "optimizer": self.training.optimizer.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "random": self.random.tensors(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        assert self.random is not None
        self.values, self.steps = list(state["values"]), state.get("steps", 0)
        load_model(self.made.model, state)
        set_attributes(self.made.model, state.get("attributes", {}))
        self.made.optimizer.load_state_dict(state["optimizer"])
        if self.made.scheduler is not None:
            self.made.scheduler.load_state_dict(state["scheduler"])
        self.random.load(state["random"])

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Take up a state that was saved before a kill, or begin."""
        self.saved = saved
        self.values = [] if saved is None else list(saved["values"])
        if saved is not None and saved["exploits"]:
            self.params, self.exploits = saved["params"], list(saved["exploits"])
            self.origin = copy.deepcopy(saved)

    def go_on_from(self, state: Mapping[str, Any], params: Mapping[str, Any], train: Train) -> None:
        """Go on with a sibling's state and other parameters. The scheduler is made anew and stepped to this epoch."""
        random = self.random if self.random is not None else RandomState(self.seed)
        if self.saved is not None:
            random.load(self.saved["random"])
        self.release()
        self.params = dict(params)
        training = self.build(train)
        self.random = random
        load_model(training.model, state)
        own = training.optimizer.state_dict()
        training.optimizer.load_state_dict({**own, "state": copy.deepcopy(state["optimizer"]["state"])})
        training.optimizer._opt_called = True  # type: ignore[attr-defined]  # the scheduler asks for it
        for value in self.values:
            step_scheduler(training, value)
        if training.scheduler is not None and training.scheduler_interval == "batch":
            for _ in range(state["steps"]):  # the sibling has made as many
                training.scheduler.step()
        self.steps = state["steps"]
        self.origin = copy.deepcopy(self.state())
        self.release()
        self.saved = copy.deepcopy(self.origin)

    def restart(self) -> None:
        """Begin anew: from the first epoch, or from where it last went on from a sibling's state."""
        self.release()
        self.values = [] if self.origin is None else list(self.origin["values"])
        self.saved = copy.deepcopy(self.origin)

    def release(self) -> None:
        """Let go of model and data."""
        self.training, self.saved, self.random = None, None, None


def load_model(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Set a model's tensors to those of a trial's state."""
    model.load_state_dict(state["model"])
    for name, buffer in model.named_buffers():
        buffer.copy_(state["buffers"][name])


def plain_attributes(model: torch.nn.Module) -> dict[str, Any]:
    """The numbers, texts and containers of these that a model's layers hold, by path: forwards may count there."""
    return {
        path: copy.deepcopy(value)
        for path, value in attributes_of(model)
        if _is_plain(value) and path.rpartition(".")[2] != "training"
    }


def set_attributes(model: torch.nn.Module, attributes: Mapping[str, Any]) -> None:
    """Set what `plain_attributes` gave where a model has something else."""
    for path, value in attributes.items():
        layer, _, name = path.rpartition(".")
        own = vars(model.get_submodule(layer))
        if name in own and not is_same(own[name], value):
            own[name] = value


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    return type(value) in PLAIN


def step_scheduler(training: Training, value: float | None = None) -> None:
    """Step a scheduler with the value of an epoch, or after a step of the optimizer."""
    if training.scheduler is None or (value is None) is not (training.scheduler_interval == "batch"):
        return
    is_by_metric = isinstance(training.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    training.scheduler.step(*([value] if is_by_metric else []))
