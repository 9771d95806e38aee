"""Small nets of several kinds, for tests of what holds for all of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Convolutions, batch norm, a residual, a concatenation, pooling, a linear layer."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.block = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(2 * width, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        y = x + self.block(x)
        y = torch.cat([y, x], dim=1)
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


class Words(nn.Module):
    """Embedding, LSTM, layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 11)

    def forward(self, tokens):
        states, _ = self.lstm(self.table(tokens))
        return self.head(self.norm(states[:, -1]))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.BatchNorm1d(8), nn.Linear(8, 5))


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(6, 8), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(32, 5))


class Tied(nn.Module):
    """A weight that serves twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens):
        return self.out(self.table(tokens).mean(1))


# name -> (make, one model's input)
NETS = {
    "residual": (Residual, lambda: torch.randn(4, 3, 6, 6, dtype=torch.float64)),
    "words": (Words, lambda: torch.randint(0, 11, (4, 5))),
    "mlp": (mlp, lambda: torch.randn(4, 6, dtype=torch.float64)),
    "attention": (attention, lambda: torch.randn(3, 4, 6, dtype=torch.float64)),
    "tied": (Tied, lambda: torch.randint(0, 11, (4, 5))),
}
# Biases that a batch norm takes out again; in a Sequential the oracle sees it.
VANISHING = {"residual": frozenset({"stem.bias"})}
