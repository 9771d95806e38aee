"""A word-level language model of two LSTM layers, at the size of the "small" model of Zaremba et al.

Source: W. Zaremba, I. Sutskever, O. Vinyals, "Recurrent Neural Network Regularization", 2014: hidden size
200, 35 steps, 20 streams, 10,000 words, gradients clipped to a norm of 5, no dropout. Two things differ: the
text is generated, and each window starts from a state of zeros, where the paper carries the state along. The
default rate of 0.1 at momentum 0.9 moves as far as the paper's 1.0 without momentum.

    job = load("lstm-lm", vocab=1000, steps=20)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hocket.job import Job
from hocket.zoo import data
from hocket.zoo.base import Option, Request, ZooEntry

INIT_RANGE = 0.1
MAX_GRADIENT_NORM = 5.0


class LanguageModel(nn.Module):
    """Embedding, LSTM, projection: tokens ``[batch, steps]`` to scores ``[batch, steps, vocab]``."""

    def __init__(self, vocab: int, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, num_layers=depth, batch_first=True)
        self.projection = nn.Linear(width, vocab)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -INIT_RANGE, INIT_RANGE)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        scores: Tensor = self.projection(hidden)
        return scores


def build(request: Request) -> Job:
    """A language model with a step that clips its gradients."""
    vocab, steps = request.size["vocab"], request.size["steps"]
    model = LanguageModel(vocab, request.size["width"], request.size["depth"]).to(request.device)
    optimizer = request.optimizer(model.parameters())

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        return loss

    return Job(step, model, optimizer, data.tokens(request, vocab=vocab, steps=steps), name=request.name)


ENTRY = ZooEntry(
    name="lstm-lm",
    summary="language model, 2 LSTM layers of 200, 35 steps, gradients clipped",
    source="Zaremba et al., Recurrent Neural Network Regularization, 2014",
    build=build,
    batch_size=20,
    lr=0.1,
    options=(
        Option("width", 200, "width of the embedding and of every LSTM layer"),
        Option("depth", 2, "LSTM layers"),
        Option("steps", 35, "tokens in a sequence"),
        Option("vocab", 10_000, "different tokens", minimum=2),
    ),
)
