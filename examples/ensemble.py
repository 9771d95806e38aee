"""An ensemble of eight nets, trained as one fused model, each with a learning rate of its own.

python examples/ensemble.py 300
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hocket

RATES = [1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2, 2e-2, 3e-2]


def main(steps: int = 300) -> float:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)) for _ in RATES]
    array = hocket.fuse(models)
    optimizer = hocket.optim.Adam(array.parameters(), lr=RATES)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        losses: torch.Tensor = array.losses(cross_entropy, x, y)  # one for each model
        losses.backward()
        optimizer.step()
        return losses

    fast = hocket.schedule(step, array, optimizer)
    for _ in range(steps):
        x = torch.randn(32, 16)
        losses = fast(x, x[:, :4].argmax(1))
    print("losses", " ".join(f"{loss:.2f}" for loss in losses.tolist()))

    x = torch.randn(1000, 16)
    votes = sum(model(x).softmax(1) for model in array.unfuse())  # plain modules again
    assert isinstance(votes, torch.Tensor)
    accuracy = (votes.argmax(1) == x[:, :4].argmax(1)).float().mean().item()
    print(f"accuracy of all together {accuracy:.3f}; the step is {fast.verdict} because {fast.why}")
    return accuracy


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
