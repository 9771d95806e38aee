"""Training steps that ranks divide between them, and one process that trains the same."""

import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from distributed.training import tensors_of
from hocket import distribute, zoo
from hocket.distributed.job import captured_for
from hocket.distributed.stages.crossings import Borders
from hocket.tracing.captured import Captured
from support.steps import update


class Mixed(nn.Module):
    """Crosses borders in more than one way: a norm, ops in place, dropout, a skip, strides, a tied weight."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(8, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.25)
        self.middle = nn.Linear(width, width)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.middle.weight
        self.last = nn.Linear(width, 2)

    def forward(self, x):
        x = self.relu(self.norm(self.first(x)))
        skip = self.drop(x)
        x = self.middle(skip)
        x += skip
        x = self.tied(torch.tanh(x.t()).t())
        return self.last(torch.tanh(x))


@dataclass
class Work:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Any
    batches: list


def mixed(optimizer: str = "adam", count: int = 4) -> Work:
    torch.manual_seed(5)
    model = Mixed()
    made = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]
    settings = {"lr": 0.05, "momentum": 0.9} if optimizer == "sgd" else {"lr": 0.01}
    optim = made(model.parameters(), **settings)

    def step(batch):
        x, y = batch
        optim.zero_grad()
        scores = model(x)
        loss = nn.functional.mse_loss(scores, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optim.step()
        return {"loss": loss, "scores": scores}

    generator = torch.Generator().manual_seed(9)
    batches = [(torch.randn(6, 8, generator=generator), torch.randn(6, 2, generator=generator)) for _ in range(count)]
    return Work(model, optim, step, batches)


def squared(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list) -> Work:
    """Trains the mean of the squares of what a model returns."""

    def step(batch):
        return update(optimizer, model(batch).square().mean())

    return Work(model, optimizer, step, batches)


def wide(width: int, depth: int, rows: int, device: str = "cpu") -> Work:
    """Blocks of one linear layer, with Adam: little to compute, and much to keep."""
    with torch.device(device):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    return squared(model, optimizer, [torch.ones(rows, width)])


def first_blocks(captured: Captured, count: int) -> dict[str, int]:
    """The first blocks of a `wide` model, and their updates, on rank 0; all else on rank 1."""
    block_of = {op.name: op.layer.partition(".")[0] for op in captured.graph.ops}
    return {name: int(not block.isdecimal() or int(block) >= count) for name, block in block_of.items()}


SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"depth": 4, "width": 64},
    "resnet20": {"batch_size": 4},
    "lstm-cells": {"steps": 4, "width": 32},
    "transformer": {"depth": 2, "width": 32, "vocab": 100, "batch_size": 2},
}


def gpt2(optimizer: str) -> Work:
    """A small GPT-2 of `transformers`, with dropout and a tied embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)).train()
    made = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]
    optim = made(model.parameters(), lr=0.001)

    def step(batch):
        optim.zero_grad()
        logits = model(batch, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optim.step()
        return loss

    generator = torch.Generator().manual_seed(9)
    return Work(model, optim, step, [torch.randint(0, 64, (2, 16), generator=generator) for _ in range(4)])


def work_of(name: str, optimizer: str) -> Work:
    if name == "mixed":
        return mixed(optimizer)
    if name == "gpt2":
        return gpt2(optimizer)
    job = zoo.load(name, optimizer=optimizer, seed=1, **SIZES[name])
    return Work(job.model, job.optimizer, job.step, [job.batch(number) for number in range(4)])


def on_meta(name: str, optimizer: str = "adam") -> Work:
    """The same work, but its model has no values."""
    work = work_of(name, optimizer)
    for tensor in {id(t): t for t in (*work.model.parameters(), *work.model.buffers())}.values():
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        torch.utils.swap_tensors(tensor, nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made)
    return work


def stages_of(work: Work, **settings: Any) -> distribute.PartitionedStep:
    """A rank's part of the work; by Python threads, unless something else is asked for."""
    return distribute.stages(
        work.step, work.model, work.optimizer, **{"executor": "python", "timeout_s": 60.0} | settings
    )


def flat(result: Any) -> list:
    leaves = result.values() if isinstance(result, dict) else [result]
    return [leaf.detach().cpu().numpy().copy() for leaf in leaves]


def alone(name: str, optimizer: str, count: int) -> tuple[list, dict[str, Any], Any]:
    """Results of one process: those of the steps, all of a checkpoint, the random state."""
    torch.set_num_threads(1)
    work = work_of(name, optimizer)
    torch.manual_seed(21)
    found = [flat(work.step(work.batches[number % len(work.batches)])) for number in range(count)]
    return found, tensors_of(work), torch.get_rng_state().numpy().copy()


def check_as_alone(ends: list, expected: tuple[list, dict[str, Any], Any]) -> None:
    """Each rank returned what `alone` did, to the bit, and rank 0 its checkpoint.

    Args:
        ends: of each rank what its steps returned, (rank 0) all of a checkpoint, the random state; and more.
        expected: what `alone` returns.
    """
    results, checkpoint, random_state = expected
    for rank, (mine, _, state, *_) in enumerate(ends):
        for step, (one, other) in enumerate(zip(results, mine, strict=True)):
            assert all(same(a, b) for a, b in zip(one, other, strict=True)), (rank, step)
        assert same(state, random_state), rank
    check_same(ends[0][1], checkpoint)


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two checkpoints, to the bit."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert same(found[key], value), key


def scattered(work: Work, ranks: int, seed: int) -> dict[str, int]:
    """Ops that need not share a rank on any one: a partition that is not even a chain."""
    captured = captured_for(work.step, work.model, work.optimizer, work.batches[0])
    leader = {name: name for name in captured.graph.by_name}

    def find(name):
        while leader[name] != name:
            name = leader[name]
        return name

    for ops, _ in Borders(captured).together:
        for op in ops[1:]:
            leader[find(op)] = find(ops[0])
    draw = random.Random(seed)
    rank_of_leader = {name: draw.randrange(ranks) for name in leader}
    return {name: rank_of_leader[find(name)] for name in leader}


def divided_by(work: Work, rank: int, seed: int) -> dict[str, int]:
    """The partition of rank 0: see `scattered`."""
    return scattered(work, int(os.environ["WORLD_SIZE"]), seed) if rank == 0 else {}


def rank_of_stages(rank, say, name, optimizer, count, division, executor="python", has_values=True):
    """A rank of a whole job; returns what the steps return, (rank 0) all of a checkpoint, random state, ops, plan.

    Without `has_values` only rank 0 begins with a model that has some.
    """
    work = work_of(name, optimizer) if has_values or rank == 0 else on_meta(name, optimizer)
    settings = {"partition": divided_by(work, rank, division)} if isinstance(division, int) else division
    torch.manual_seed(21 if rank == 0 else 99)
    if rank != 0 and has_values:
        with torch.no_grad():
            for parameter in work.model.parameters():
                parameter.add_(1.0)  # what rank 0 has counts
    with stages_of(work, executor=executor, **settings) as fast:
        found = [flat(fast(work.batches[number % len(work.batches)])) for number in range(count)]
        fast.gather()
        ops = [op.name for op in fast.part.graph.ops if op.role not in ("recv", "send")]
        plan = str(fast.plan)
    return found, tensors_of(work) if rank == 0 else None, torch.get_rng_state().numpy().copy(), ops, plan


def same(one, other) -> bool:
    return np.array_equal(one, other, equal_nan=True)
