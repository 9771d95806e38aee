"""Truncated backpropagation through time: an LSTM whose hidden state goes from one batch to the next.

python examples/lstm_hidden.py 300
"""

import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss

import hocket

BATCH, LENGTH, WIDTH = 16, 20, 32


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(1, WIDTH), nn.Linear(WIDTH, 1)

    def forward(
        self, series: torch.Tensor, hidden: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        outputs = []
        for value in series.unbind(1):
            hidden, memory = self.cell(value.unsqueeze(1), (hidden, memory))
            outputs.append(self.head(hidden))
        return torch.cat(outputs, 1), hidden, memory


def main(steps: int = 300) -> float:
    torch.manual_seed(0)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    phase = torch.rand(BATCH, 1) * 6.28

    def step(
        x: torch.Tensor, y: torch.Tensor, hidden: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        outputs, hidden, memory = model(x, hidden, memory)
        loss = mse_loss(outputs, y)
        loss.backward()
        optimizer.step()
        return loss, hidden.detach(), memory.detach()

    fast = hocket.schedule(step, model, optimizer)
    hidden = memory = torch.zeros(BATCH, WIDTH)
    for number in range(steps):
        time = torch.arange(number * LENGTH, (number + 1) * LENGTH + 1) * 0.2
        wave = torch.sin(time + phase)
        loss, hidden, memory = fast(wave[:, :-1], wave[:, 1:], hidden, memory)
    print(f"loss {loss.item():.4f}; the step is {fast.verdict} because {fast.why}")
    return float(loss)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
