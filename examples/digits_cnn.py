"""A convolutional net on scikit-learn's digits: the step as it was, and `hocket.schedule` around it.

python examples/digits_cnn.py 600
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import hocket


def main(steps: int = 600) -> float:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = slice(0, 1500), slice(1500, None)

    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    fast = hocket.schedule(step, model, optimizer)
    for number in range(steps):
        chosen = torch.randint(0, 1500, (32,))
        loss = fast(images[train][chosen], labels[train][chosen])
        if number % 100 == 0:
            print(f"step {number}: loss {loss.item():.3f}")

    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    print(f"accuracy {accuracy:.3f}; the step is {fast.verdict} because {fast.why}")
    return accuracy


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
