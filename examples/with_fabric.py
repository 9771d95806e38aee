"""Lightning Fabric: a loop of one's own, with a model that is compiled before `setup`.

python examples/with_fabric.py 300
"""

import itertools
import sys

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def main(steps: int = 300) -> float:
    torch.manual_seed(0)
    fabric = lightning.Fabric(accelerator="cpu")
    inputs = torch.randn(512, 16)
    data = fabric.setup_dataloaders(DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=32))

    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    net.compile(backend="hocket")
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    for x, y in itertools.islice(itertools.cycle(data), steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
    print(f"loss {loss.item():.3f}")
    return float(loss)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
