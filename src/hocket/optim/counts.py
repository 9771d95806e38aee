"""Models that step and models that are frozen, and their step counts, kept as torch keeps them.

all models step together      step 7        one number on the CPU, which parameters that are in step share
a model rests on its own      step (7, 6, 7)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch

from hocket.optim.hyper import Number
from hocket.optim.options import Options

__all__ = ["Counted", "count_dtype", "step_of"]


def count_dtype() -> torch.dtype:
    """What torch's optimizers count in."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def step_of(state: dict[str, Any]) -> Number:
    """How many steps a parameter has seen, where that is counted: one number, or B of them."""
    count = state.get("step")
    return 0.0 if count is None else count if count.dim() else count.item()


class Counted(Options):
    """The part of `hocket.optim.base.FusedOptimizer` that counts the steps of models, frozen ones left out."""

    counters: ClassVar[Mapping[str, float]] = {"step": 0.0}
    _frozen: list[bool]
    _per_model_steps: bool  # whether each model's steps are counted on their own

    @property
    def frozen(self) -> tuple[bool, ...]:
        """For each model whether it is frozen."""
        return tuple(self._frozen)

    def freeze(self, model: int) -> None:
        """Leave this model as it is, parameters and state, in all steps to come."""
        self._frozen[self.checked_model(model)] = True
        self._hocket_version += 1
        self.count_per_model()

    def unfreeze(self, model: int) -> None:
        """Let this model take part in the steps again."""
        self._frozen[self.checked_model(model)] = False
        self._hocket_version += 1

    def count_per_model(self) -> None:
        """From now on count the steps of each model on its own."""
        self._per_model_steps = True
        steps = ((p, own["step"]) for p, own in self.state.items() if "step" in own)
        if any(not step.dim() and self._slots[p] is None for p, step in steps):
            self.share_all_counts()

    def count(self, group: dict[str, Any], states: Sequence[dict[str, Any]]) -> None:
        """Count a step in these states, of which some may share their count."""
        for step in {id(state["step"]): state["step"] for state in states if "step" in state}.values():
            step += 1

    def first_count(self, key: str, p: torch.Tensor) -> torch.Tensor:
        """A counter before the first step: a step count is one on the CPU, as in torch, or B beside the parameter."""
        first = self.counters[key]
        if key != "step":
            return torch.full((self.num_models,), first, dtype=count_dtype(), device=p.device)
        if self._per_model_steps and self._slots[p] is None:
            return torch.full((self.num_models,), first, dtype=torch.float64, device=p.device)
        return torch.full((), first, dtype=count_dtype())

    def share_all_counts(self) -> None:
        """Let parameters that are in step share a count, after the state was set; per model if any model has to."""
        if any(self._frozen) or any(own["step"].dim() for own in self.state.values() if "step" in own):
            self._per_model_steps = True
        for group in self.param_groups:
            self.share_counts(group)

    def share_counts(self, group: dict[str, Any], resting: Collection[torch.Tensor] = ()) -> None:
        """Let parameters of a group that have equal counts share one; those that rest in a step share none with others.

        A count is one per model wherever models have to be counted on their own.
        """
        known: dict[Any, torch.Tensor] = {}
        for p in group["params"]:
            entries, is_fused = self.state.get(p, {}), self._slots[p] is None
            for key in self.counters.keys() & entries.keys():
                count = torch.as_tensor(entries[key])
                if key == "step" and not count.dim() and self._per_model_steps and is_fused:
                    count = self.first_count(key, p) + count.item()
                count = count.to("cpu" if key == "step" and not count.dim() else p.device)
                same = (key, p in resting, count.device, count.dtype, count.dim(), *count.reshape(-1).tolist())
                if p in resting and same not in known:
                    count = count.clone()
                entries[key] = known.setdefault(same, count)
