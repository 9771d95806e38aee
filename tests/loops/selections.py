"""Loops that select by masks, count classes, and compute with numbers that they have read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import CHANGE, Loop, loop, mlp, update


@loop(planned=True)
def similarities_without_the_diagonal(model, optimizer, batches) -> Loop:
    """A contrastive loss: a mask of constants selects what is compared."""

    def step(batch):
        x, _ = batch
        z = F.normalize(torch.cat([model(x), model(x + 0.1)]), dim=1)
        same = torch.eye(len(z), dtype=torch.bool)
        similarity = (z @ z.T)[~same].view(len(z), -1) / 0.5
        return update(optimizer, F.cross_entropy(similarity, torch.arange(len(z)) % (len(z) - 1)))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def as_many_labels_ignored_in_every_batch(model, optimizer, batches) -> Loop:
    for n, (_, y) in enumerate(batches):
        y[n % len(y)] = -100

    def step(batch):
        x, y = batch
        kept = y != -100
        return update(optimizer, F.cross_entropy(model(x)[kept], y[kept]))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def two_counts_of_positives_in_turns(model, optimizer, batches) -> Loop:
    """A masked loss, as of boxes or of padding, whose count takes two values."""
    masks = [torch.arange(6) < count for count in (4, 2)]

    def batch(n):
        return (*batches[n % len(batches)], masks[n % 2])

    def step(batch):
        x, y, positive = batch
        out = model(x)
        places = positive.nonzero().squeeze(1)
        box = out.index_select(0, places).square().mean()
        return update(optimizer, F.cross_entropy(out, y) + torch.masked_select(out[:, 0], positive).mean() + box)

    return Loop(step, model, optimizer, batch)


@loop()
def another_count_in_every_batch(model, optimizer, batches) -> Loop:
    generator = torch.Generator().manual_seed(3)
    masks = [torch.rand(6, 4, generator=generator) < 0.5 for _ in range(400)]

    def batch(n):
        return (*batches[n % len(batches)], masks[n % len(masks)])

    def step(batch):
        x, _, mask = batch
        return update(optimizer, model(x)[mask].square().sum())

    return Loop(step, model, optimizer, batch)


@loop(planned=True)
def a_class_that_there_is_not(model, optimizer, batches) -> Loop:
    """The label of one batch has no class: the same kind of error, and nothing written."""

    def batch(n):
        x, y = batches[n % len(batches)]
        return (x, y.clone().fill_(7 if n % 2 else -1)) if n in (CHANGE, CHANGE + 1) else (x, y)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()  # a step that raises has given up the gradients that it would have replaced
        try:
            wanted = F.one_hot(y, num_classes=4).to(torch.float32)
        except RuntimeError:
            return None
        return update(optimizer, (wanted - model(x)).square().mean())

    return Loop(step, model, optimizer, batch)


@loop(planned=True)
def means_of_graphs_by_counts(model, optimizer, batches) -> Loop:
    """A graph net: the nodes of each graph are counted, and once the last graph has none."""

    def batch(n):
        x, y = batches[n % len(batches)]
        return x, torch.arange(6) // (3 if n == CHANGE else 2), y[:3]

    def step(batch):
        x, graph, y = batch
        pooled = (
            torch.zeros(3, 4).index_add(0, graph, model(x)) / torch.bincount(graph, minlength=3).clamp(min=1)[:, None]
        )
        return update(optimizer, F.cross_entropy(pooled, y))

    return Loop(step, model, optimizer, batch)


@loop(planned=True)
def items_once_and_repeated() -> Loop:
    """Rows of a table for the items that there are, each as often as the batch says."""
    model = nn.Embedding(12, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    often = (torch.tensor([1, 2, 3]), torch.tensor([2, 2, 2]))

    def batch(n):
        return torch.arange(9) % 4 + n % 3, often[n % 2]

    def step(batch):
        items, counts = batch
        kinds, place = items.unique(return_inverse=True)
        repeated = torch.repeat_interleave(model(items[:3]), counts, dim=0)
        return update(optimizer, (model(kinds)[place].mean(0) + repeated.sum(0)).square().sum())

    return Loop(step, model, optimizer, batch)


@loop(planned=True)
def texts_of_several_lengths() -> Loop:
    """CTC: the longest text of a batch gives a shape, and it is longer from some step on."""
    model = nn.Linear(4, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def batch(n):
        frames, letters = torch.randn(9, 3, 4), torch.randint(1, 6, (3, 3))
        return frames, letters, torch.randint(7, 10, (3,)), torch.tensor([n % 2 + 1, 1, 2 + (n > CHANGE)])

    def step(batch):
        frames, *texts = batch
        return update(optimizer, F.ctc_loss(model(frames).log_softmax(-1), *texts, zero_infinity=True))

    return Loop(step, model, optimizer, batch)


class Codebook(nn.Module):
    """Quantizes to the nearest of some vectors, and counts how often each was."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(8, 12, 3), mlp(3, 12, 8)
        self.codes = nn.Parameter(torch.randn(5, 3))
        self.register_buffer("uses", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.encoder(x)
        chosen = torch.cdist(z, self.codes).argmin(1)
        kinds = F.one_hot(chosen, len(self.codes)).to(z.dtype)
        self.uses.lerp_(kinds.detach().sum(0), 0.1)
        codes = kinds @ self.codes
        commitment = (codes - z.detach()).square().mean() + 0.25 * (codes.detach() - z).square().mean()
        return self.decoder(z + (codes - z).detach()), commitment


@loop(planned=True)
def vectors_quantized(batches) -> Loop:
    model = Codebook()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(batch):
        out, commitment = model(batch[0])
        return update(optimizer, (out - batch[0]).square().mean() + commitment)

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def loss_over_its_own_average(model, optimizer, batches) -> Loop:
    """Two losses weighed by what they were read as. A division asks whether the number is zero."""
    state = {"mean": 1.0}

    def step(batch):
        x, y = batch
        first = F.cross_entropy(model(x), y)
        second = model(x).square().mean()
        total = first / first.item() + second * (1 / (second.item() + 1e-3))
        state["mean"] = 0.9 * state["mean"] + 0.1 * first.item()
        return update(optimizer, total)

    return Loop(step, model, optimizer, batches, lambda: state)


@loop(planned=True)
def a_loss_of_zero_to_divide_by(model, optimizer, batches) -> Loop:
    """Eager raises in one step, where the number read is zero."""

    def batch(n):
        x, y = batches[n % len(batches)]
        return (x, y, torch.tensor(0.0 if n in (CHANGE, CHANGE + 3) else 1.0))

    def step(batch):
        x, y, factor = batch
        loss = F.cross_entropy(model(x), y)
        try:
            scale = 1 / (loss * factor).item()
        except ZeroDivisionError:
            return None
        return update(optimizer, loss * scale + loss)

    return Loop(step, model, optimizer, batch)


@loop(word="calls cross_entropy_loss, which computes otherwise")
def weighted_and_smoothed_labels_of_which_some_are_ignored(model, optimizer, batches) -> Loop:
    """The first of them is met when the plan stands."""
    criterion = nn.CrossEntropyLoss(torch.rand(4) + 0.1, label_smoothing=0.1)

    def step(batch):
        return update(optimizer, criterion(model(batch[0]), batch[1]))

    def batch(n):
        x, y = batches[n % 10]
        return x, y.masked_fill(torch.arange(len(y)) % 3 == 0, -100) if n > 40 else y

    return Loop(step, model, optimizer, batch)
