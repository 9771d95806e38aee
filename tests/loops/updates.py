"""Loops with gradients and parameters treated on the way: clipped, accumulated, penalised, reduced, recomputed."""

from __future__ import annotations

import uuid

import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import Loop, labelled, loop, mlp, ordinary, train, update


@loop(planned=True)
def data_written_before_backward(model, optimizer, batches) -> Loop:
    """Autograd notices no write through `.data`, neither of a parameter nor of what it has saved."""

    def step(batch):
        hidden = model[0](batch[0]).exp()
        hidden.data.mul_(0.5)
        for p in model.parameters():
            p.data.clamp_(-0.5, 0.5)
        return update(optimizer, F.cross_entropy(model[2](hidden), batch[1]))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def data_multiplied_and_added_to(model, optimizer, batches) -> Loop:
    """Python assigns what ``p.data *= x`` has written: the memory that the parameter has already."""
    mask, slow, momentum = torch.ones_like(model[0].weight).tril_(), mlp(), [0.9]

    def step(batch):
        model[0].weight.data *= mask
        model[2].weight.data[0] /= model[2].weight.data[0].norm()
        loss = train(model, optimizer, batch)
        for p, q in zip(model.parameters(), slow.parameters(), strict=True):
            q.data *= momentum[0]
            q.data += (1 - momentum[0]) * p.data
        return loss, slow(batch[0]).detach()

    def after(n, _):
        if n == 60:
            mask.zero_()
        if n == 80:
            momentum[0] = 0.5

    return Loop(step, [model, slow], optimizer, batches, after=after)


@loop(planned=True)
def accumulation_outside(model, optimizer, batches) -> Loop:
    """The step adds to the gradients; every fourth time the code after it updates."""

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1]) / 4
        loss.backward()
        return loss

    def after(n, _):
        if n % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()

    return Loop(step, model, optimizer, batches, after=after)


@loop()
def distributed_data_parallel(folder) -> Loop:
    """A group of one process; gradients are reduced by hooks that no trace sees."""
    store = folder / uuid.uuid4().hex
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    return Loop(ordinary(model, optimizer), model, optimizer, labelled(), close=torch.distributed.destroy_process_group)
