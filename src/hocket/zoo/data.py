"""Generated data with a structure that a model can learn.

Each function draws from its own generator, seeded independently of the one that initialises the models: a model and its
data stay the same when the other changes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hocket.zoo.base import Request

NUM_LABELS = 10
"""Labels drawn, also where a model has 1,000 outputs: a few steps then show the loss falling."""

NOISE = 0.5
"""Standard deviation of the noise; that of the patterns under it is 1."""

DATA_SEED = 0x5EED
SUCCESSORS = 4
PATTERN_SIDE = 4


def generator(request: Request) -> torch.Generator:
    """The generator for ``request``'s data."""
    return torch.Generator().manual_seed(request.seed ^ DATA_SEED)


def images(request: Request, *, channels: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of square images with their labels.

    Every label has a coarse pattern, 4 x 4 fields in each channel. An image is its label's pattern under noise.
    Shapes: ``[batch, channels, side, side]`` float32 and ``[batch]`` int64.
    """
    drawn = generator(request)
    patterns = torch.randn(NUM_LABELS, channels, PATTERN_SIDE, PATTERN_SIDE, generator=drawn)
    return _labelled(request, functional.interpolate(patterns, size=(side, side)), drawn)


def vectors(request: Request, *, width: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of vectors with their labels: a centre per label, under noise.

    Shapes: ``[batch, width]`` float32 and ``[batch]`` int64.
    """
    drawn = generator(request)
    return _labelled(request, torch.randn(NUM_LABELS, width, generator=drawn), drawn)


def _labelled(request: Request, patterns: Tensor, drawn: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    batches = []
    for _ in range(request.num_batches):
        labels = torch.randint(NUM_LABELS, (request.batch_size,), generator=drawn)
        noise = torch.randn(request.batch_size, *patterns.shape[1:], generator=drawn)
        batches.append(((patterns[labels] + NOISE * noise).to(request.device), labels.to(request.device)))
    return batches


def tokens(request: Request, *, vocab: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of token sequences, each with the same sequence one token later, to predict.

    The source is a Markov chain: a token is followed by one of four others, which are drawn once for each
    token by Zipf's law, so that a few tokens are frequent, as words are. Each row is one stream, cut into
    consecutive windows. A model that knows the chain reaches a loss of at most ln 4 = 1.39, and guessing has a loss of
    ln(vocab). Shapes: both ``[batch, steps]`` int64.
    """
    drawn = generator(request)
    frequencies = 1.0 / torch.arange(1, vocab + 1)
    successors = torch.multinomial(frequencies, vocab * SUCCESSORS, replacement=True, generator=drawn)
    successors = successors.view(vocab, SUCCESSORS)
    length = request.num_batches * steps
    choices = torch.randint(SUCCESSORS, (length, request.batch_size), generator=drawn)
    stream = [torch.randint(vocab, (request.batch_size,), generator=drawn)]
    for choice in choices:
        stream.append(successors[stream[-1], choice])
    text = torch.stack(stream, dim=1).to(request.device)
    return [
        (text[:, start : start + steps].contiguous(), text[:, start + 1 : start + 1 + steps].contiguous())
        for start in range(0, length, steps)
    ]
