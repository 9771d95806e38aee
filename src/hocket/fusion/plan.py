"""How a call or a step of B models runs: how many models at a time, how far, and in which layout.

Fusing all B models makes every activation B times as large. Where one model's fill the caches already, B models' do not
fit any more, and what is larger than 32 MiB costs page faults too, because malloc gives it back to the system every
time. So it is all models or one at a time, the plain model. Groups of half of them were the fastest of one zoo entry, 8
digits CNNs, and not in every run (docs/research, 2026-11-22 and 23): too little for a mechanism of its own.

    array(x), then loss, then backward          each model to the end of its backward
    forward 0, forward 1, ... forward B-1       forward 0, loss 0, backward 0
    loss                                        forward 1, loss 1, backward 1
    backward B-1, ... backward 0                ...
    in memory: B models' activations            one model's, in the memory of the one before it
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hocket.errors import InputError

__all__ = ["ExecutionPlan", "plans_for", "usual_of"]


@dataclass(frozen=True)
class ExecutionPlan:
    """One way to run B models.

    Attributes:
        group_size: models at a time; one, or B.
        per_group_backward: whether each model goes through its loss and backward before the next one begins.
        channels_last: whether convolutions of single models get their images with the channels last.

    Example:
        >>> str(ExecutionPlan(8)), str(ExecutionPlan(1, per_group_backward=True, channels_last=True))
        ('8 at a time', '1 at a time with backward, channels last')
    """

    group_size: int
    per_group_backward: bool = False
    channels_last: bool = False

    def __post_init__(self) -> None:
        if self.group_size < 1 or (self.channels_last and self.group_size > 1):
            raise InputError(
                f"execution plan: expected groups of at least one model, and of one in channels last: {self}"
            )

    def __str__(self) -> str:
        backward, layout = " with backward" * self.per_group_backward, ", channels last" * self.channels_last
        return f"{self.group_size} at a time{backward}{layout}"


def plans_for(num_models: int, *, with_losses: bool, has_images: bool) -> list[ExecutionPlan]:
    """The plans that are worth a try, the plain models first and all at once last."""
    backward = with_losses and num_models > 1
    plans = [ExecutionPlan(1, backward)]
    if has_images:
        plans.append(ExecutionPlan(1, backward, channels_last=True))
    return plans if num_models == 1 else [*plans, ExecutionPlan(num_models)]


def usual_of(plans: Iterable[ExecutionPlan]) -> ExecutionPlan:
    """The plan that others have to beat: that of the most models at a time, with images as they come."""
    return max(plans, key=lambda plan: (plan.group_size, not plan.channels_last))
