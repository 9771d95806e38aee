"""Searches of the tune bench: entries of the zoo, with the hyper-parameters of HFHT.

Source: S. Wang et al., "Horizontally Fused Training Array", MLSys 2021, Table 12: rate, both betas and weight decay of
Adam, factor and period of the schedule, batch size, and an option of the model. PointNet's option is whether points are
transformed, which ours do not have: its width stands for it. Data are generated or bundled, and one set for all trials.

Sizes are scaled down so that a search by serial, processes, fused and auto takes less than four minutes on two cores:
PointNet has a quarter of its width and of the points, MobileNet eight trials of 15 epochs and one batch size.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hocket import zoo
from hocket.search.training import Training


@dataclass(frozen=True)
class Workload:
    """A search: what is trained, and over which parameters.

    Attributes:
        entry: a name of the zoo.
        size: options of the entry.
        num_batches: batches of an epoch. Another half as many are for validation.
        trials: of random search.
        epochs: of each of these.
        algorithms: what it is searched by, unless others are asked for.
        batch_sizes: what the batch size is chosen from.
        choices: what the entry's option is chosen from, by the option's name.
        entries: what the entry itself is chosen from, if it is.
    """

    entry: str
    size: tuple[tuple[str, int], ...] = ()
    num_batches: int = 16
    trials: int = 60
    epochs: int = 25
    batch_sizes: tuple[int, ...] = (32,)
    choices: tuple[tuple[str, tuple[int, ...]], ...] = ()
    entries: tuple[str, ...] = field(default=())
    algorithms: tuple[str, ...] = ("random",)

    def space(self) -> dict[str, Any]:
        """Optuna's distributions: the fusible ones of Table 12, and the infusible ones that this search has."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution

        found: dict[str, Any] = {
            "lr": FloatDistribution(1e-4, 1e-2, log=True),
            "beta1": FloatDistribution(0.001, 0.999),
            "beta2": FloatDistribution(0.001, 0.999),
            "weight_decay": FloatDistribution(0.0, 0.5),
            "gamma": FloatDistribution(0.1, 0.9),
            "period": CategoricalDistribution([5, 10, 20, 40]),
        }
        more: dict[str, tuple[Any, ...]] = {"batch_size": self.batch_sizes, "entry": self.entries, **dict(self.choices)}
        return found | {name: CategoricalDistribution(values) for name, values in more.items() if len(values) > 1}

    def __call__(self, params: Mapping[str, Any]) -> Training:
        """One trial."""
        size = dict(self.size) | {name: params[name] for name, _ in self.choices}
        entry = params.get("entry", self.entry)
        batch_size = params.get("batch_size", self.batch_sizes[0])
        first, batches = _loaded(entry, batch_size, self.num_batches * 3 // 2, tuple(size.items()))
        model = copy.deepcopy(first)
        optimizer = torch.optim.Adam(
            model.parameters(),
            lr=params["lr"],
            betas=(params["beta1"], params["beta2"]),
            weight_decay=params["weight_decay"],
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, params["period"], params["gamma"])
        return Training(
            model,
            optimizer,
            functional.cross_entropy,
            batches[: self.num_batches],
            functional.cross_entropy,
            scheduler,
            batches[self.num_batches :],
        )


@functools.cache
def _loaded(
    entry: str, batch_size: int, num_batches: int, size: tuple[tuple[str, int], ...]
) -> tuple[nn.Module, list[Any]]:
    """A model to copy, and batches that all trials share."""
    options: dict[str, Any] = dict(size)
    job = zoo.load(entry, seed=0, batch_size=batch_size, num_batches=num_batches, **options)
    return job.models[0], list(job.batches)


SEARCHES = {
    "mlp-32": Workload("mlp", (("width", 32),), algorithms=("random", "hyperband")),
    "mlp-128": Workload("mlp", (("width", 128),)),
    "digits-cnn": Workload("digits-cnn", epochs=20),
    "pointnet": Workload(
        "pointnet-cls", (("points", 64),), num_batches=4, batch_sizes=(8, 16), choices=(("width", (8, 16)),)
    ),
    "mobilenet": Workload(
        "mobilenet-v2",
        (("image_size", 32),),
        num_batches=4,
        trials=8,
        epochs=15,
        batch_sizes=(8,),
        entries=("mobilenet-v2", "mobilenet-v3-large"),
    ),
}
