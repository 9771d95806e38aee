"""Accelerate: accumulation and clipping by the accelerator, and a model that is compiled before `prepare`.

python examples/with_accelerate.py 300
"""

import itertools
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def main(steps: int = 300) -> float:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    inputs = torch.randn(512, 16)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=32)

    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    net.compile(backend="hocket")
    model, optimizer, data = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader)
    for x, y in itertools.islice(itertools.cycle(data), steps):
        with accelerator.accumulate(model):
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
    return float(loss)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
