"""Language models: LSTM cells, LSTM layers, a Transformer encoder, and BERT, all on generated text.

- ``lstm-cells`` unrolls its cells by hand in a Python loop. Unlike ``nn.LSTM``, which is one large op, the loop exposes
  what could run in parallel: step t of one layer beside step t + 1 of the layer below.
- ``lstm-lm`` has the size of the "small" model of Zaremba et al.: hidden size 200, 35 steps, 20 streams, 10,000 words,
  gradients clipped to a norm of 5, no dropout. Here each window starts from a state of zeros, where the paper carries
  the state along. The default rate of 0.1 at momentum 0.9 moves as far as the paper's 1.0 without momentum.
- ``transformer`` ties its embedding to its projection (O. Press & L. Wolf, "Using the Output Embedding to Improve
  Language Models", 2016). The batch is small, as in fine-tuning, so that many ops are small too.
- ``bert-tiny`` and ``bert-medium`` fill in masked tokens, with two of the sizes of I. Turc et al., "Well-Read Students
  Learn Better", 2019. The model is that of the package ``transformers``, called with a dictionary, as its users do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hocket.errors import InputError
from hocket.job import Job
from hocket.zoo import data
from hocket.zoo.base import Request
from hocket.zoo.training import language_job

INIT_RANGE = 0.1
MAX_GRADIENT_NORM = 5.0
DROPOUT = 0.1
INIT_STD = 0.02
MASKED_SHARE = 0.15
NOT_SCORED = -100
HEAD_WIDTH = 64


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
        return self.projection(torch.stack(outputs, dim=1))


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
        return self.projection(hidden)


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
        return self.projection(x)


def _waves(steps: int, width: int) -> Tensor:
    """Encode the positions as sines and cosines of geometrically spaced wavelengths, ``[steps, width]``."""
    wavelengths = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(steps).unsqueeze(1) * wavelengths
    return torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1)


def lstm_cells(request: Request) -> Job:
    """Build a language model of LSTM cells, at the size of one over characters."""
    size = request.size
    model = CellModel(size["vocab"], size["width"], size["depth"])
    return language_job(request, model, data.tokens(request, vocab=size["vocab"], steps=size["steps"]))


def lstm_lm(request: Request) -> Job:
    """Build a language model of LSTM layers, whose step clips its gradients."""
    size = request.size
    model = LanguageModel(size["vocab"], size["width"], size["depth"])
    batches = data.tokens(request, vocab=size["vocab"], steps=size["steps"])
    return language_job(request, model, batches, MAX_GRADIENT_NORM)


def transformer(request: Request) -> Job:
    """Build a Transformer encoder that predicts the next token."""
    vocab, width, heads, steps = (request.size[name] for name in ("vocab", "width", "heads", "steps"))
    if width % 2 or width % heads:
        raise InputError(f"{request.name}: width: expected an even multiple of heads ({heads}), got {width}")
    model = TransformerModel(vocab, width, request.size["depth"], heads, steps)
    return language_job(request, model, data.tokens(request, vocab=vocab, steps=steps))


def bert(request: Request) -> Job:
    """Build a masked language model with batches ``{"input_ids", "labels"}``, both int64 ``[batch, steps]``."""
    vocab, width, steps = (request.size[name] for name in ("vocab", "width", "steps"))
    if width % HEAD_WIDTH:
        raise InputError(f"{request.name}: width: expected a multiple of {HEAD_WIDTH}, got {width}")
    package = request.optional("transformers.models.bert")
    config = package.BertConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=request.size["depth"],
        num_attention_heads=width // HEAD_WIDTH,
        intermediate_size=4 * width,
        max_position_embeddings=max(512, steps),
    )
    model = package.BertForMaskedLM(config).to(request.device).train()
    optimizer = request.optimizer(model.parameters())

    def step(batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss

    return Job(step, model, optimizer, _masked(request, vocab, steps), name=request.name)


def _masked(request: Request, vocab: int, steps: int) -> list[dict[str, Tensor]]:
    """Make batches of generated text in which 15% of the tokens are replaced by the last one of the vocabulary."""
    drawn = data.generator(request)
    batches = []
    for tokens, _ in data.tokens(request, vocab=vocab - 1, steps=steps):
        is_masked = (torch.rand(tokens.shape, generator=drawn) < MASKED_SHARE).to(tokens.device)
        is_masked[:, 0] = True  # at least one, or the loss would have no value
        labels = tokens.masked_fill(~is_masked, NOT_SCORED)
        batches.append({"input_ids": tokens.masked_fill(is_masked, vocab - 1), "labels": labels})
    return batches
