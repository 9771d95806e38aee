"""A model in training with a folder of decisions, where the outcome of each comparison is given; also by ``python -m``.

Prints as JSON the searches and turns that were made, the reasons of its regions, the log, and the bits in the end.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from hocket.autotune import comparison, tuner
from hocket.dynamo import region
from support.regions import made_regions

NUM_CALLS = 200
# The speedup of the compiled graph in turns with the graph as it stands.
OUTCOMES: dict[str, tuple[float, float, float]] = {
    "faster": (1.2, 1.1, 1.3),
    "slower": (0.8, 0.7, 0.9),
    "unclear": (1.05, 0.9, 1.2),
    "no plan": (1.2, 1.1, 1.3),
    "other bits": (1.2, 1.1, 1.3),
}


class _Net(nn.Module):
    """Under autocast, AOTAutograd casts a weight at each use, which eager casts once: other bits."""

    def __init__(self, is_cast: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU())
        self.is_cast = is_cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=self.is_cast):
            return (self.layers(x) + self.layers(2 * x)).float().tanh()


@contextmanager
def _counted(owner: Any, name: str, counts: dict[str, int]) -> Iterator[None]:
    original: Callable[..., Any] = getattr(owner, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return original(*args, **kwargs)

    counts[name] = 0
    with mock.patch.object(owner, name, counting):
        yield


def trained(outcome: str, folder: str) -> dict[str, Any]:
    """Train for some hundred calls, with this outcome of every comparison."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = _Net(outcome == "other bits")
    run = torch.compile(model, backend="hocket", options={"cache": folder})
    counts: dict[str, int] = {}
    has_plan = outcome != "no plan"
    limits = {} if has_plan else {"NOTHING_LEFT": 1.0, "HARDLY_ANYTHING_LEFT": 1.0}
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hocket.dynamo")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with (
            made_regions(guard=not has_plan, takes_turns=True) as made,
            mock.patch.object(comparison, "NUM_ROUNDS", 2),
            mock.patch.object(comparison, "speedup_of", return_value=OUTCOMES[outcome]),
            mock.patch.multiple(tuner, **limits) if limits else mock.patch.object(region, "PAUSE", 1),
            _counted(tuner.Tuner, "search_again", counts),
            _counted(comparison, "speedup_of", counts),
        ):
            for number in range(NUM_CALLS):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
                run(x).sum().backward()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    bits = [str(parameter.grad.double().sum().item()) for parameter in model.parameters()]
    return {"counts": counts, "reasons": [f"{each.why}; {each.compared}" for each in made], "log": log, "bits": bits}


if __name__ == "__main__":
    print(json.dumps(trained(*sys.argv[1:])))
