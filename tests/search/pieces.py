"""Small trainings that tests search over."""

from __future__ import annotations

from typing import Any

import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hocket import Training

generator = torch.Generator().manual_seed(0)
X = torch.randn(48, 6, generator=generator, dtype=torch.float64)
Y = torch.randint(0, 3, (48,), generator=generator)
BATCHES = list(zip(X.split(16), Y.split(16), strict=True))

LR = FloatDistribution(1e-3, 1e-1, log=True)
WIDTH = CategoricalDistribution([8, 12])
SPACE = {"lr": LR, "step": IntDistribution(1, 4), "width": WIDTH}


def classifier(width: int = 8, rate: float = 0.0) -> nn.Module:
    layers = [nn.Linear(6, width), nn.ReLU(), *([nn.Dropout(rate)] if rate else []), nn.Linear(width, 3)]
    return nn.Sequential(*layers).double()


def training(
    model: nn.Module, lr: float = 0.1, kind: Any = torch.optim.SGD, batches: Any = BATCHES, **options: Any
) -> Training:
    """A model that an optimizer of this kind trains to classify; its metric is its loss, or another one."""
    metric = options.pop("metric", functional.cross_entropy)
    return Training(model, kind(model.parameters(), lr=lr), functional.cross_entropy, batches, metric, **options)


def value_of(model: nn.Module) -> float:
    """The mean loss of a model in evaluation."""
    with torch.no_grad():
        return sum(functional.cross_entropy(model.eval()(x), y).item() for x, y in BATCHES) / len(BATCHES)


def train(params: dict[str, Any]) -> Training:
    """Every kind of parameter: of the optimizer, of the scheduler, of the model's shapes, of its dropout."""
    model = classifier(params.get("width", 8), params.get("rate", 0.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=params.get("lr", 0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, params.get("step", 2), 0.5)
    return Training(model, optimizer, functional.cross_entropy, BATCHES, functional.cross_entropy, scheduler)


def train_dropped(params: dict[str, Any]) -> Training:
    return train({**params, "rate": 0.2})


def train_diverging(params: dict[str, Any]) -> Training:
    """One whose rate is large has no finite loss."""
    made = train(params)
    if params["lr"] > 0.05:
        made.optimizer.param_groups[0]["lr"] = 1e200
    return made


def train_normed(params: dict[str, Any]) -> Training:
    """Batch norm, whose buffers move; SGD with a momentum of each trial; a validation set."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=params["momentum"])
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=params["factor"])
    return Training(model, optimizer, nn.CrossEntropyLoss(), BATCHES[:2], accuracy, scheduler, BATCHES[1:])


def train_shuffled(params: dict[str, Any]) -> Training:
    """A loader that shuffles, and dropout, which draws from the same generator."""
    model = classifier(rate=0.2)
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": params["lr"]}, {"params": model[3].parameters()}],
        lr=0.01,
        weight_decay=params["decay"],
    )
    loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + params["decay"] * epoch))
    return Training(model, optimizer, functional.cross_entropy, loader, functional.cross_entropy, scheduler)


def train_smoothed(params: dict[str, Any]) -> Training:
    """A loss of each trial."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), betas=(params["beta"], 0.99))

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs, target, label_smoothing=params["smoothing"])

    return Training(model, optimizer, loss, BATCHES, functional.cross_entropy)


def accuracy(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == target).double().mean() - functional.cross_entropy(outputs, target)


class Counting(nn.Linear):
    """Counts its steps in Python, and computes by the count."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        return super().forward(x) * (1 + 4 / (1 + self.steps))


def train_counting(params: dict[str, Any]) -> Training:
    return training(Counting().double(), params["lr"])
