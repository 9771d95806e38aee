"""A small Transformer encoder that predicts the next token.

Sources: A. Vaswani et al., "Attention Is All You Need", 2017, for the layers; O. Press & L. Wolf, "Using the
Output Embedding to Improve Language Models", 2016, for the embedding that serves at both ends. The batch is
small, as in fine-tuning, so that many of the operations are small too.

    job = load("transformer", depth=2, width=64, vocab=1000)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from hocket.errors import InputError
from hocket.job import Job
from hocket.zoo import data
from hocket.zoo.base import Option, Request, ZooEntry

DROPOUT = 0.1
INIT_STD = 0.02


class TransformerModel(nn.Module):
    """Encoder layers under a causal mask: tokens ``[batch, steps]`` to scores ``[batch, steps, vocab]``."""

    positions: Tensor
    mask: Tensor

    def __init__(self, vocab: int, width: int, depth: int, heads: int, steps: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.dropout = nn.Dropout(DROPOUT)
        inner = 4 * width
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, inner, DROPOUT, batch_first=True) for _ in range(depth)
        )
        self.projection = nn.Linear(width, vocab)
        nn.init.normal_(self.embedding.weight, std=INIT_STD)
        nn.init.zeros_(self.projection.bias)
        self.projection.weight = self.embedding.weight
        self.scale = math.sqrt(width)
        self.register_buffer("positions", _waves(steps, width), persistent=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(steps), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens) * self.scale + self.positions)
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        scores: Tensor = self.projection(x)
        return scores


def _waves(steps: int, width: int) -> Tensor:
    """The positions as sines and cosines of geometrically spaced wavelengths, ``[steps, width]``."""
    wavelengths = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(steps).unsqueeze(1) * wavelengths
    return torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1)


def build(request: Request) -> Job:
    """A language model over generated text."""
    vocab, width, heads, steps = (request.size[name] for name in ("vocab", "width", "heads", "steps"))
    if width % 2 or width % heads:
        raise InputError(f"{request.name}: width: expected an even multiple of heads ({heads}), got {width}")
    model = TransformerModel(vocab, width, request.size["depth"], heads, steps).to(request.device)
    optimizer = request.optimizer(model.parameters())

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return Job(step, model, optimizer, data.tokens(request, vocab=vocab, steps=steps), name=request.name)


ENTRY = ZooEntry(
    name="transformer",
    summary="language model, 4 Transformer encoder layers of 256, dropout, tied embedding",
    source="Vaswani et al., Attention Is All You Need, 2017",
    build=build,
    batch_size=4,
    optimizer="adamw",
    lr=1e-3,
    options=(
        Option("width", 256, "width of the embedding and of every layer; the inner one has four times that"),
        Option("depth", 4, "encoder layers"),
        Option("heads", 4, "attention heads"),
        Option("steps", 64, "tokens in a sequence"),
        Option("vocab", 10_000, "different tokens", minimum=2),
    ),
)
