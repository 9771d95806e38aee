"""An Optuna search of 60 trials that train together, with successive halving.

python examples/optuna_search.py 60
"""

import sys

import torch
from optuna.distributions import FloatDistribution
from torch import nn
from torch.nn.functional import cross_entropy

import hocket

inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
batches = list(zip(inputs.split(32), inputs[:, :4].argmax(1).split(32), strict=True))

SPACE = {
    "lr": FloatDistribution(1e-4, 1e-1, log=True),
    "decay": FloatDistribution(1e-6, 1e-2, log=True),
    "dropout": FloatDistribution(0.0, 0.5),
}


def train(params: dict[str, float]) -> hocket.Training:
    """One trial, as it would be written for one model."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(params["dropout"]), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=params["lr"], weight_decay=params["decay"])
    return hocket.Training(model, optimizer, cross_entropy, batches[:12], metric=cross_entropy, validation=batches[12:])


def main(trials: int = 60, epochs: int = 9) -> float:
    study = hocket.tune(train, SPACE, trials=trials, epochs=epochs, halving=hocket.Halving(eta=3))
    print(f"trial {study.best_trial.number} of {len(study.trials)}: {study.best_value:.3f} with {study.best_params}")
    model = hocket.best_model(study, train)
    right = (model.eval()(inputs).argmax(1) == inputs[:, :4].argmax(1)).float().mean()
    print(f"accuracy {right:.3f}")
    return float(study.best_value)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
