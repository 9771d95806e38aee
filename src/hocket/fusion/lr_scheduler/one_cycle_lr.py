"""OneCycleLR (Smith and Topin: "Super-Convergence", arXiv 1708.07120)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hocket.errors import InputError
from hocket.fusion.lr_scheduler.base import FusedScheduler, check_optimizer, read_rates, widen
from hocket.fusion.lr_scheduler.checks import number, whole, within
from hocket.fusion.optim.base import FusedOptimizer
from hocket.fusion.optim.hyper import one_of, per_model

__all__ = ["OneCycleLR"]


@dataclass(frozen=True)
class _Phase:
    end: float
    rates: tuple[float, float]
    momenta: tuple[float, float]


class OneCycleLR(FusedScheduler):
    """`torch.optim.lr_scheduler.OneCycleLR` of B models: up to `max_lr`, then down below the first rate.

    A model whose cycle is over keeps its last rate while others still have steps to go (torch, with one model, raises).

    Args:
        optimizer: one of `hocket.optim`, with a momentum or betas if `cycle_momentum`.
        max_lr: one, or B in a list (in torch a list is one for each group: here that is a list of lists).
        total_steps: one, or B in a list; or `epochs` and `steps_per_epoch`, whose product it is.
        pct_start, base_momentum, max_momentum, div_factor, final_div_factor: one, or B in a list.
        anneal_strategy: ``"cos"`` or ``"linear"``, for all models.
        cycle_momentum, three_phase: for all models.
        last_epoch: see `FusedScheduler`.

    Raises:
        InputError: neither of the ways to say how many steps, numbers out of bounds, lists of the wrong length; in
            `step`, that every model's cycle is over.

    Example:
        >>> import torch
        >>> from hocket.fusion.optim import SGD
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.ones(2, 3)
        >>> optimizer = SGD([weights], lr=1.0, momentum=0.9, num_models=2)
        >>> scheduler = OneCycleLR(optimizer, max_lr=[1.0, 2.0], total_steps=10, div_factor=4, pct_start=0.2)
        >>> optimizer.step(); scheduler.step(); scheduler.get_last_lr()[0].tolist()
        [1.0, 2.0]
    """

    def __init__(
        self,
        optimizer: FusedOptimizer,
        max_lr: Any,
        total_steps: Any = None,
        epochs: Any = None,
        steps_per_epoch: Any = None,
        pct_start: Any = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: Any = 0.85,
        max_momentum: Any = 0.95,
        div_factor: Any = 25.0,
        final_div_factor: Any = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        check_optimizer(self, optimizer)
        self.total_steps = self.argument("total_steps", *self._steps(total_steps, epochs, steps_per_epoch))
        self.pct_start = self.argument("pct_start", pct_start, within(0, 1))
        self.max_lr = self.argument("max_lr", max_lr, within(0))
        self.div_factor = self.argument("div_factor", div_factor, within(1e-300))
        self.final_div_factor = self.argument("final_div_factor", final_div_factor, within(1e-300))
        self.base_momentum = self.argument("base_momentum", base_momentum, number)
        self.max_momentum = self.argument("max_momentum", max_momentum, number)
        self.anneal_strategy = one_of("anneal_strategy", anneal_strategy, ("cos", "linear"))
        self.cycle_momentum = cycle_momentum
        self.three_phase = three_phase
        if cycle_momentum and not {"momentum", "betas"} & set(optimizer.bounds):
            raise InputError(
                f"cycle_momentum: expected an optimizer with a momentum or betas, got {type(optimizer).__name__}; "
                "pass cycle_momentum=False"
            )
        if last_epoch == -1:
            for number_, group in enumerate(optimizer.param_groups):
                rates = [self._first_rate(model, number_) for model in range(optimizer.num_models)]
                optimizer.set_number(group, "lr", rates if rates.count(rates[0]) < len(rates) else rates[0])
            self._note()
        paces = (self.total_steps, self.pct_start, self.base_momentum, self.max_momentum)
        if cycle_momentum and any(argument.differs for argument in paces):
            widen(optimizer, "betas" if "betas" in optimizer.bounds else "momentum")
        super().__init__(optimizer, last_epoch)

    def _steps(self, total: Any, epochs: Any, each: Any) -> tuple[Any, Any]:
        if total is not None:
            return total, whole(1)
        if epochs is None or each is None:
            raise InputError("total_steps: expected it, or both epochs and steps_per_epoch")
        rounds, lengths = self.argument("epochs", epochs, whole(1)), self.argument("steps_per_epoch", each, whole(1))
        return [
            [many * long for many, long in zip(*both, strict=True)]
            for both in zip(rounds.rows, lengths.rows, strict=True)
        ], whole(1)

    def begin_model(self, model: int) -> None:
        for group, rates in enumerate(self.base_rates):
            rates[model] = self._first_rate(model, group)
        self._note()

    def _note(self) -> None:
        """The ends of the cycle, in the groups: there torch's own looks for them when it goes on after `unfuse`."""
        models = range(self.optimizer.num_models)
        for number_, group in enumerate(self.optimizer.param_groups):
            notes: dict[str, list[float]] = {
                "initial_lr": [self._first_rate(model, number_) for model in models],
                "max_lr": [self.max_lr(model, number_) for model in models],
                "min_lr": [
                    self._first_rate(model, number_) / self.final_div_factor(model, number_) for model in models
                ],
            }
            if self.cycle_momentum:
                notes["max_momentum"] = [self.max_momentum(model, number_) for model in models]
                notes["base_momentum"] = [self.base_momentum(model, number_) for model in models]
            for key, values in notes.items():
                group[key] = values[0] if values.count(values[0]) == len(values) else per_model(values)

    def _first_rate(self, model: int, group: int) -> float:
        return self.max_lr(model, group) / self.div_factor(model, group)

    def advance(self, models: Any) -> None:
        over = [
            epoch > steps for values in self.total_steps.rows for epoch, steps in zip(self.epochs, values, strict=True)
        ]
        if all(over):
            longest = max(max(steps) for steps in self.total_steps.rows)
            raise InputError(f"step: expected at most {longest} steps, the longest cycle of these models")
        super().advance(models)
        if self.cycle_momentum:
            self._set_momenta(models)

    def next_rate(self, model: int, group: int, epoch: int, rate: float) -> float:
        phase, share = self._phase(model, group, epoch)
        return self._between(*phase.rates, share)

    def _set_momenta(self, models: Any) -> None:
        optimizer = self.optimizer
        key = "betas" if "betas" in optimizer.bounds else "momentum"
        for number_, group in enumerate(optimizer.param_groups):
            whole_value = group[key]
            inner = {"momentum": whole_value[0] if key == "betas" else whole_value}
            momenta = read_rates(optimizer, inner, "momentum")
            for model in models:
                phase, share = self._phase(model, number_, self.epochs[model])
                momenta[model] = self._between(*phase.momenta, share)
            same = not hasattr(inner["momentum"], "fill_") and momenta.count(momenta[0]) == len(momenta)
            value: Any = momenta[0] if same else momenta
            optimizer.set_number(group, key, (value, whole_value[1]) if key == "betas" else value)

    def _phase(self, model: int, group: int, epoch: int) -> tuple[_Phase, float]:
        total = self.total_steps(model, group)
        epoch = min(epoch, total)
        begin = 0.0
        phases = self._phases(model, group, total)
        for phase in phases:
            if epoch <= phase.end or phase is phases[-1]:
                return phase, (epoch - begin) / (phase.end - begin)
            begin = phase.end
        raise AssertionError("a cycle has phases")

    def _phases(self, model: int, group: int, total: int) -> list[_Phase]:
        top, first = self.max_lr(model, group), self._first_rate(model, group)
        last = first / self.final_div_factor(model, group)
        low, high = self.base_momentum(model, group), self.max_momentum(model, group)
        rising = float(self.pct_start(model, group) * total) - 1
        up = _Phase(rising, (first, top), (high, low))
        if not self.three_phase:
            return [up, _Phase(total - 1, (top, last), (low, high))]
        turn = float(2 * self.pct_start(model, group) * total) - 2
        return [up, _Phase(turn, (top, first), (low, high)), _Phase(total - 1, (first, last), (high, high))]

    def _between(self, start: float, end: float, share: float) -> float:
        if self.anneal_strategy == "linear":
            return (end - start) * share + start
        return end + (start - end) / 2.0 * (math.cos(math.pi * share) + 1)
