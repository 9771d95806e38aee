r"""Population-based training: the worst of all trials go on from the states of the best, with other hyper-parameters.

    epoch        2                4                6
    trial 0   best  ---------> best  ---------> worst --exploit--> from trial 1
    trial 1   middle --------> middle --------> best
    trial 2   worst --exploit--> from trial 0   middle

All trials report at one epoch boundary, so a whole population is decided at once, and to exploit is to fill a slot from
a sibling's. To explore is to move the fusible hyper-parameters a little, or to draw them anew. The infusible ones are
the sibling's, whose state would not fit otherwise. A trial then goes on as if it had had its new hyper-parameters from
the beginning: its scheduler is made anew, and stepped to the present epoch.

Source: M. Jaderberg et al., "Population Based Training of Neural Networks", 2017, section 3 and Algorithm 1 (truncation
selection, perturbation and resampling).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hocket.errors import InputError
from hocket.optim.hyper import check_whole
from hocket.search.policy import Bracket, Exploit, LockStep, Move, Policy, Rung, Schedules


@dataclass(frozen=True)
class Population(Schedules):
    """Population-based training (Jaderberg et al., 2017, Algorithm 1), in lock-step.

    Attributes:
        interval: after how many epochs the population is decided on, again and again.
        share: which part of it goes on from the states of as many of the best.
        factors: a number is moved by one of these.
        resample: how probably a hyper-parameter is drawn from the space anew instead.
        seed: of the choice of siblings and of what is explored.

    Raises:
        InputError: a number that is out of bounds. The message names it.

    Example:
        >>> Population(interval=2, share=0.25).factors
        (0.8, 1.2)
    """

    interval: int = 1
    share: float = 0.2
    factors: tuple[float, ...] = (0.8, 1.2)
    resample: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("interval", self.interval, 1)
        check_whole("seed", self.seed, 0)
        if not 0 < self.share <= 0.5:
            raise InputError(f"share: expected a number above 0 and up to 0.5, got {self.share!r}")
        if not 0 <= self.resample <= 1:
            raise InputError(f"resample: expected a number from 0 to 1, got {self.resample!r}")
        if not self.factors or any(not 0 < factor < math.inf for factor in self.factors):
            raise InputError(f"factors: expected numbers above 0, got {self.factors!r}")

    def policy(self, trials: int, epochs: int, maximize: bool) -> Policy:
        return Generations(epochs, maximize, self, trials)

    def explored(
        self, params: Mapping[str, Any], space: Mapping[str, Any], fusible: Sequence[str], seed: str
    ) -> dict[str, Any]:
        """Other hyper-parameters near these, of which only the fusible ones move. `seed` is of what is drawn."""
        drawn = random.Random(f"{self.seed} {seed}")
        moved = [name for name in fusible if name in params]
        return dict(params) | {name: self._moved(params[name], space[name], drawn) for name in moved}

    def _moved(self, value: Any, distribution: Any, drawn: random.Random) -> Any:
        is_resampled = drawn.random() < self.resample
        if (choices := getattr(distribution, "choices", None)) is not None:  # they have no order
            return drawn.choice(choices) if is_resampled else value
        low, high = distribution.low, distribution.high
        if not is_resampled:
            found = value * drawn.choice(self.factors)
        elif distribution.log:
            found = math.exp(drawn.uniform(math.log(low), math.log(high)))
        else:
            found = drawn.uniform(low, high)
        if distribution.step is not None and not (distribution.log and isinstance(value, int)):
            found = low + distribution.step * round((found - low) / distribution.step)
        found = min(max(found, low), high)
        return round(found) if isinstance(value, int) else float(found)


class Generations(LockStep):
    """Decides on a whole population whenever all of it has reported."""

    def __init__(self, epochs: int, maximize: bool, population: Population, trials: int) -> None:
        between = [Rung(epoch, trials) for epoch in range(population.interval, epochs, population.interval)]
        super().__init__(epochs, maximize, [(trials, [*between, Rung(epochs, 0)])])
        self._population = population

    def _moves(self, bracket: Bracket, rung: Rung, ranked: Sequence[int], until: int) -> list[Move]:
        count = min(max(1, int(self._population.share * len(ranked))), len(ranked) // 2)
        best, worst = ranked[:count], ranked[len(ranked) - count :]
        drawn = random.Random(f"{self._population.seed} {rung.epoch}")
        moves: list[Move] = []
        for number in worst:
            explore = partial(self._population.explored, seed=f"{rung.epoch} {number}")
            moves.append(Exploit(number, "exploit", until, parent=drawn.choice(best), explore=explore))
        return [*moves, *(Move(number, "go", until) for number in ranked if number not in worst)]
