"""A language model whose LSTM cells are unrolled by hand, in a Python loop: hundreds of small operations.

Source of the cell: S. Hochreiter & J. Schmidhuber, "Long Short-Term Memory", Neural Computation, 1997. Unlike
``nn.LSTM``, which is one large operation, the loop lays open what could run side by side: step t of one layer
beside step t + 1 of the layer below.

    job = load("lstm-cells", steps=10, depth=1)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hocket.job import Job
from hocket.zoo import data
from hocket.zoo.base import Option, Request, ZooEntry


class CellModel(nn.Module):
    """Embedding, LSTM cells, projection: tokens ``[batch, steps]`` to scores ``[batch, steps, vocab]``."""

    def __init__(self, vocab: int, width: int, depth: int) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(vocab, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(depth))
        self.projection = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        zeros = embedded.new_zeros(embedded.shape[0], self.width)
        states = [(zeros, zeros) for _ in self.cells]
        outputs = []
        for x in embedded.unbind(1):
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x, states[layer])
                x = states[layer][0]
            outputs.append(x)
        scores: Tensor = self.projection(torch.stack(outputs, dim=1))
        return scores


def build(request: Request) -> Job:
    """A language model at the size of one over characters."""
    vocab, steps = request.size["vocab"], request.size["steps"]
    model = CellModel(vocab, request.size["width"], request.size["depth"]).to(request.device)
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
    name="lstm-cells",
    summary="language model, 2 layers of LSTM cells of 128 unrolled by hand over 16 steps: small operations",
    source="Hochreiter & Schmidhuber, Long Short-Term Memory, 1997",
    build=build,
    batch_size=20,
    lr=0.5,
    options=(
        Option("width", 128, "width of the embedding and of every cell"),
        Option("depth", 2, "layers of cells"),
        Option("steps", 16, "tokens in a sequence"),
        Option("vocab", 100, "different tokens", minimum=2),
    ),
)
