"""Loops with batches and results of all kinds: plain values that change, classes, nothing at all, exceptions."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import CHANGE, Loop, labelled, loop, train, update


@dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
    used: int = 0


@loop(planned=True)
def batch_in_a_dataclass_that_is_written(model, optimizer, batches) -> Loop:
    records = [Record(x, y) for x, y in batches]

    def step(batch):
        batch.used += 1
        return update(optimizer, F.cross_entropy(model(batch.x), batch.y) / batch.used)

    return Loop(step, model, optimizer, records, lambda: {"used": [record.used for record in records]})


@loop(planned=True)
def batch_that_is_emptied(model, optimizer, batches) -> Loop:
    def step(batch):
        y = batch.pop()
        x = batch.pop()
        loss = F.cross_entropy(model(x), y)
        update(optimizer, loss)
        batch.append(loss.item())
        return loss

    made = [[x, y] for x, y in batches for _ in range(20)]
    return Loop(step, model, optimizer, made, lambda: {"left": [len(batch) for batch in made]})


@loop(planned=True)
def nothing_for_a_batch_now_and_then(model, optimizer, batches) -> Loop:
    def step(batch):
        if batch is None:
            return None
        return train(model, optimizer, batch)

    return Loop(step, model, optimizer, [None if n % 5 == 3 else batch for n, batch in enumerate(batches)])


@loop(planned=True)
def index_tensor_that_splits(model, optimizer, batches) -> Loop:
    places = [torch.tensor([2, 4]), torch.tensor([1, 5]), torch.tensor([3, 3])]

    def step(batch):
        x, y, where = batch
        pieces = torch.tensor_split(model(x), where)
        return update(optimizer, F.cross_entropy(torch.cat([piece - piece.detach().sum() for piece in pieces]), y))

    return Loop(step, model, optimizer, lambda n: (*batches[n % 10], places[n % 3 if n > CHANGE else 0]))


@loop()
def mask_that_selects(model, optimizer, batches) -> Loop:
    def step(batch):
        x, y = batch
        keep = x[:, 0] > -0.5
        loss = F.cross_entropy(model(x[keep]), y[keep])
        update(optimizer, loss)
        return loss, int(keep.sum())

    return Loop(step, model, optimizer, batches)


@dataclass
class Outcome:
    loss: torch.Tensor
    scores: torch.Tensor
    rate: float


@loop(planned=True)
def result_is_a_dataclass(model, optimizer, batches) -> Loop:
    def step(batch):
        out = model(batch[0])
        loss = F.cross_entropy(out, batch[1])
        update(optimizer, loss)
        return Outcome(loss, out.detach().softmax(1), optimizer.param_groups[0]["lr"])

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def step_that_fails_on_some_batches(model, optimizer, batches) -> Loop:
    """A label that does not exist: torch itself raises, after the gradients are gone."""
    bad = (batches[0][0], torch.full((6,), 9))

    def step(batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return Loop(step, model, optimizer, lambda n: bad if n in (20, 100) else batches[n % 10])


@loop(planned=True)
def words_that_there_are_not() -> Loop:
    """The step catches what its embedding raises, in steps of the search and in audited ones, too."""
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    words, labels = torch.randint(8, (5, 6)), torch.randint(4, (6,))

    def step(batch):
        optimizer.zero_grad()
        try:
            out = model(batch)
        except IndexError:
            return None
        return update(optimizer, F.cross_entropy(out, labels))

    return Loop(step, model, optimizer, lambda n: words[n % 5] + 8 * (n > 6 and n % 6 == 1))


def _with_words(is_wrong: Callable[[int], bool]) -> Loop:
    """A step that goes on without a table where it has no such words."""
    table = nn.Embedding(8, 6)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    words, batches = torch.randint(8, (5, 6)), torch.randn(5, 6, 6)

    def step(batch):
        optimizer.zero_grad()
        x, found = batch
        try:
            x = x + table(found).detach()
        except IndexError:
            x = 2 * x
        return update(optimizer, model(x).square().mean())

    return Loop(step, model, optimizer, lambda n: (batches[n % 5], words[n % 5] + 8 * is_wrong(n)))


@loop(word="catches what aten.embedding.default raises in the recorded steps")
def words_that_there_are_not_at_first() -> Loop:
    """The step catches the error in the steps that are recorded, and later ones have none."""
    return _with_words(lambda n: n < 25 or n % 11 == 1)


@loop(word="catches what its ops raise in many of its steps")
def words_that_there_are_not_in_many_batches() -> Loop:
    return _with_words(lambda n: n > 3 and n % 3 != 1)


@loop(planned=True)
def labels_that_there_are_not_after_dropout() -> Loop:
    """Draws and writes before the error that the step catches stay, and are not made twice."""
    layers = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 4)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches, skipped = labelled(), [0]

    def step(batch):
        out = model(batch[0])
        try:
            loss = F.cross_entropy(out, batch[1])
        except IndexError:
            skipped[0] += 1
            loss = out.square().mean()
        return update(optimizer, loss)

    def batch(n):
        x, y = batches[n % 10]
        return x, y + 4 * (n > 10 and n % 13 == 1)

    return Loop(step, model, optimizer, batch, lambda: {"skipped": skipped[0]})


@loop(planned=True)
def parts_of_a_batch_with_unknown_labels_are_left_out() -> Loop:
    """The third of four parts may raise, when the gradients of two have been added up."""
    model = nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.1), nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parts = labelled()

    def step(batch):
        optimizer.zero_grad(set_to_none=False)
        for x, y in batch:
            with contextlib.suppress(IndexError):
                (F.cross_entropy(model(x), y) / 4).backward()
        optimizer.step()
        return optimizer.param_groups[0]["lr"]

    def batch(n):
        found = [parts[(n + place) % 10] for place in range(4)]
        found[2] = found[2][0], found[2][1] + 4 * (n > 10 and n % 17 == 1)
        return found

    return Loop(step, model, optimizer, batch)


@loop(planned=True)
def rare_batch_writes_and_draws(model, optimizer, batches) -> Loop:
    """The first call that takes this branch may be the one that is traced."""
    seen, numbers, members = np.zeros(2), iter(range(1000)), set()
    own = random.Random(3)
    drawn = []
    marked = (batches[0][0].clone(), batches[0][1])
    marked[0][0, 0] = 1e3

    def step(batch):
        x, y = batch
        if float(x[0, 0]) > 100:
            seen[0] += 1
            members.add(len(members))
            drawn.append((next(numbers), own.random(), random.random(), float(np.random.rand())))  # noqa: NPY002
        return update(optimizer, F.cross_entropy(model(x), y))

    def batch(n):
        return marked if n % 7 == 3 else batches[n % len(batches)]

    return Loop(step, model, optimizer, batch, lambda: {"seen": seen, "members": members, "drawn": drawn})


@loop(planned=True)
def sizes_in_the_batch_and_in_the_result(model, optimizer, batches) -> Loop:
    seen = []

    def step(batch):
        (x, y), given = batch
        loss = F.cross_entropy(model(x) * given["weight"], y) / given["size"].numel()
        return update(optimizer, loss), given["size"], x.shape

    def batch(n):
        return batches[n % 10], {"size": torch.Size([2, 3]), "weight": 1 / (n + 1)}

    def after(_, result):
        seen.append([(type(each).__name__, each.numel()) for each in result[1:]])

    return Loop(step, model, optimizer, batch, lambda: {"seen": seen}, after)


@loop(planned=True)
def numbers_of_numpy_in_the_batch(model, optimizer, batches) -> Loop:
    def step(batch):
        (x, y), weight, kind, is_doubled = batch
        loss = F.cross_entropy(model(x), y, reduction="none").sum() * weight * (2 if is_doubled else 1)
        return update(optimizer, loss + kind), weight * 2, kind

    def batch(n):
        return batches[n % 10], np.float64(0.1 + n / 7), np.int64(n % 2), np.bool_(n % 3 == 0)

    return Loop(step, model, optimizer, batch)


@loop(planned=True)
def helper_that_asks_for_the_type_of_an_array(model, optimizer, batches) -> Loop:
    def as_tensor(value):
        if type(value) is np.ndarray:
            return torch.from_numpy(value)
        raise TypeError(type(value))

    def step(batch):
        x, y = map(as_tensor, batch)
        return train(model, optimizer, (x, y))

    return Loop(step, model, optimizer, [(x.numpy(), y.numpy()) for x, y in batches])


@loop(planned=True)
def array_cast_and_then_written(model, optimizer, batches) -> Loop:
    def step(batch):
        x, y = batch
        values = x.astype(np.float32)
        values[0] = 0
        return train(model, optimizer, (torch.from_numpy(values), torch.from_numpy(y)))

    return Loop(step, model, optimizer, [(x.double().numpy(), y.numpy()) for x, y in batches])
