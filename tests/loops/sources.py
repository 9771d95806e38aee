"""Loops whose step gets something from elsewhere: the next batch, a file, the environment, the time."""

from __future__ import annotations

import itertools
import json

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from loops.loop import CHANGE, Loop, loop, train, update


@loop(planned=True)
def cycle_advanced_inside(model, optimizer, batches) -> Loop:
    data = itertools.cycle(batches)

    def step(_):
        x, y = next(data)
        return update(optimizer, F.cross_entropy(model(x), y))

    return Loop(step, model, optimizer, [None])


@loop(planned=True)
def data_loader_inside(model, optimizer) -> Loop:
    """Shuffles by torch's own generator, anew at the start of every epoch."""
    loader = DataLoader(TensorDataset(torch.randn(30, 8), torch.randint(4, (30,))), batch_size=6, shuffle=True)
    data = iter(loader)

    def step(_):
        nonlocal data
        batch = next(data, None)
        if batch is None:
            data = iter(loader)
            batch = next(data)
        return train(model, optimizer, batch)

    return Loop(step, model, optimizer, [None])


@loop(planned=True)
def file_read_inside(folder, model, optimizer, batches) -> Loop:
    """The rate is read from a file, as people do who want to change it while a job runs."""
    path = folder / "options.json"
    path.write_text(json.dumps({"weight": 1.0}))

    def step(batch):
        options = json.loads(path.read_text())
        return update(optimizer, options["weight"] * F.cross_entropy(model(batch[0]), batch[1]))

    def after(n, _):
        if n == CHANGE:
            path.write_text(json.dumps({"weight": 0.1}))

    return Loop(step, model, optimizer, batches, after=after)


@loop(planned=True)
def file_written_inside(folder, model, optimizer, batches) -> Loop:
    path = folder / "log.txt"
    path.write_text("")

    def step(batch):
        loss = train(model, optimizer, batch)
        with path.open("a") as file:
            file.write("a step\n")
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"lines": path.read_text().count("\n")})


@loop(planned=True)
def file_kept_open(folder, model, optimizer, batches) -> Loop:
    path = folder / "numbers.txt"
    path.write_text("\n".join(str(1 + n % 3) for n in range(400)))
    file = path.open()

    def step(batch):
        weight = float(file.readline())
        return update(optimizer, weight * F.cross_entropy(model(batch[0]), batch[1]))

    return Loop(step, model, optimizer, batches, lambda: {"place": file.tell()}, close=file.close)


@loop(planned=True)
def clock_that_decides(model, optimizer, batches) -> Loop:
    """A clock of the test's own, so that both runs read the same."""
    clock = {"now": 0.0}

    def monotonic():
        clock["now"] += 0.25
        return clock["now"]

    last = monotonic()

    def step(batch):
        nonlocal last
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if monotonic() - last > 4:
            last = monotonic()
            return update(optimizer, loss + 0.1 * model[0].weight.square().sum())

    return Loop(step, model, optimizer, batches, lambda: {"last": last, **clock})
