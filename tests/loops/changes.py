"""Loops that change their model or their optimizer while they run: other layers, other parameters, other types."""

from __future__ import annotations

import copy
import functools
import types

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from loops.loop import CHANGE, Loop, labelled, loop, mlp, ordinary, task, train, update


def supervised(model, optimizer, after, batches=None, state=dict):
    """The plainest step, and `after` to change what it works on."""

    return Loop(ordinary(model, optimizer), model, optimizer, batches or labelled(), state, after)


@loop(planned=True)
def layer_replaced() -> Loop:
    model, optimizer, _ = task()

    def after(n, _):
        if n == CHANGE:
            model[1] = nn.Tanh()

    return supervised(model, optimizer, after)


@loop(planned=True)
def layer_with_parameters_replaced() -> Loop:
    model, optimizer, _ = task()

    def after(n, _):
        if n == CHANGE:
            model[2] = nn.Linear(12, 4)
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})

    return supervised(model, optimizer, after)


@loop(planned=True)
def layer_appended() -> Loop:
    model, optimizer, _ = task()

    def after(n, _):
        if n == CHANGE:
            model.append(nn.Linear(4, 4))
            optimizer.add_param_group({"params": model[3].parameters()})

    return supervised(model, optimizer, after)


@loop(planned=True)
def parameter_replaced() -> Loop:
    """The optimizer goes on with the old one, which gets no gradients any more."""
    model, optimizer, _ = task()

    def after(n, _):
        if n == CHANGE:
            model[2].bias = nn.Parameter(torch.zeros(4))

    return supervised(model, optimizer, after)


@loop(planned=True)
def parameter_given_other_memory() -> Loop:
    model, optimizer, _ = task()

    def after(n, _):
        if n == CHANGE:
            model[0].weight.data = torch.randn(12, 8)

    return supervised(model, optimizer, after)


@loop(planned=True)
def forward_replaced() -> Loop:
    model, optimizer, _ = task()

    def after(n, _):
        if n == CHANGE:
            model[1].forward = types.MethodType(lambda self, x: x.clamp(-1, 1), model[1])

    return supervised(model, optimizer, after)


@loop(planned=True)
def forward_of_a_class_replaced() -> Loop:
    class Gate(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    model = nn.Sequential(nn.Linear(8, 12), Gate(), nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def after(n, _):
        if n == CHANGE:
            Gate.forward = lambda self, x: x * torch.tanh(x)

    return supervised(model, optimizer, after)


@loop(planned=True)
def layers_thawed_one_by_one() -> Loop:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)], nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for p in model[:3].parameters():
        p.requires_grad_(False)

    def after(n, _):
        if n in (30, 60, 90):
            for p in model[3 - n // 30].parameters():
                p.requires_grad_(True)

    return supervised(model, optimizer, after)


@loop(planned=True)
def layer_frozen() -> Loop:
    model, optimizer, _ = task()

    def after(n, _):
        if n == CHANGE:
            model[0].requires_grad_(False)

    return supervised(model, optimizer, after)


@loop(planned=True)
def batch_norm_evaluated_between() -> Loop:
    # No bias before batch norm: its gradient is all rounding, and eager at one thread has another one than at two.
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = labelled(1, 20)[0]
    scores = []

    def after(n, _):
        if n % 25 == 24:
            model.eval()
            with torch.no_grad():
                scores.append((model(x).argmax(1) == y).float().mean().item())
            model.train()

    return supervised(model, optimizer, after, state=lambda: {"scores": scores})


@loop(planned=True)
def batch_norm_frozen() -> Loop:
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def after(n, _):
        if n == CHANGE:
            model[1].eval()

    return supervised(model, optimizer, after)


@loop(planned=True)
def parameter_group_added() -> Loop:
    model = mlp()
    optimizer = torch.optim.Adam(model[2].parameters(), lr=0.01)

    def after(n, _):
        if n == CHANGE:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.001})

    return supervised(model, optimizer, after)


def converted(kind: torch.dtype, change: int = CHANGE) -> Loop:
    model, optimizer, batches = task()
    halves = [(x.to(kind), y) for x, y in batches]

    def after(n, _):
        if n == change - 1:
            model.to(kind)
            for state in optimizer.state.values():
                state["momentum_buffer"] = state["momentum_buffer"].to(kind)

    return supervised(model, optimizer, after, lambda n: (halves if n >= change else batches)[n % 10])


@loop(planned=True)
def model_made_double() -> Loop:
    return converted(torch.float64)


@loop(planned=True)
def model_made_bfloat16() -> Loop:
    return converted(torch.bfloat16)


@loop(planned=True)
def optimizer_state_cleared() -> Loop:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def after(n, _):
        if n == CHANGE:
            optimizer.state.clear()

    return supervised(model, optimizer, after)


@loop(planned=True)
def optimizer_state_cleared_again_and_again() -> Loop:
    """Whatever the planned step does at that moment: it runs, it is profiled, or it is audited."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def after(n, _):
        if n % 23 == 11:
            optimizer.state.clear()

    return supervised(model, optimizer, after)


@loop(planned=True)
def tensor_replaced_between_steps() -> Loop:
    model, optimizer, batches = task()
    weights = {"of_class": torch.ones(4)}

    def step(batch):
        return update(optimizer, F.cross_entropy(model(batch[0]), batch[1], weight=weights["of_class"]))

    def after(n, _):
        if n % 5 == 4:
            weights["of_class"] = torch.linspace(1, 1 + n % 3, 4)

    return Loop(step, model, optimizer, batches, lambda: dict(weights), after)


@loop(planned=True)
def checkpoint_loaded() -> Loop:
    """Model and optimizer go back to what they were fifty steps ago."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    saved = {}

    def after(n, _):
        if n == CHANGE - 50:
            saved["model"] = copy.deepcopy(model.state_dict())
            saved["optimizer"] = copy.deepcopy(optimizer.state_dict())
        if n == CHANGE:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])

    return supervised(model, optimizer, after)


@loop()
def optimizer_replaced() -> Loop:
    model, optimizer, batches = task()
    used = optimizer

    def after(n, _):
        nonlocal used
        if n == CHANGE:
            used = torch.optim.AdamW(model.parameters(), lr=0.01)

    return Loop(ordinary(model, optimizer), model, optimizer, batches, lambda: {"used": used.state_dict()}, after)


@loop(planned=True)
def adam_begun_anew_and_loaded() -> Loop:
    """Trainers make their optimizer anew at a checkpoint. The schedule knows the first one."""
    model = mlp()
    first = optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(batch):
        return train(model, optimizer, batch)

    def after(n, _):
        nonlocal optimizer
        if n in (20, 50):
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            if n == 50:
                optimizer.load_state_dict(state)

    return Loop(step, model, first, labelled(), lambda: {"used": optimizer.state_dict()}, after)


@loop(planned=True)
def model_and_optimizer_rebound() -> Loop:
    """The names stand for others from some step on; the schedule was told of the first ones."""
    model, optimizer, batches = task()
    first = model

    def step(batch):
        return train(model, optimizer, batch)

    def after(n, _):
        nonlocal model, optimizer
        if n == CHANGE:
            model = copy.deepcopy(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    return Loop(step, first, optimizer, batches, lambda: model.state_dict(), after)


@loop(planned=True)
def layer_pruned() -> Loop:
    """Pruning turns a parameter into two tensors and a hook."""
    model, optimizer, _ = task()

    def after(n, _):
        if n == CHANGE:
            prune.l1_unstructured(model[0], "weight", amount=0.5)

    return supervised(model, optimizer, after)


@loop(planned=True)
def averaged_weights_swapped_in() -> Loop:
    """Evaluation by other weights between two steps, by `data` as many averaging libraries do it."""
    model, optimizer, _ = task()
    average = [p.detach().clone() for p in model.parameters()]
    probe = torch.randn(4, 8)
    seen = []

    def after(n, _):
        for held, p in zip(average, model.parameters(), strict=True):
            held.lerp_(p.detach(), 0.1)
        if n % 50 == 49:
            kept = [p.data for p in model.parameters()]
            for held, p in zip(average, model.parameters(), strict=True):
                p.data = held
            with torch.no_grad():
                seen.append(model(probe).sum().item())
            for data, p in zip(kept, model.parameters(), strict=True):
                p.data = data

    return supervised(model, optimizer, after, state=lambda: {"average": average, "seen": seen})


@loop(planned=True)
def deterministic_algorithms_switched_on() -> Loop:
    model, optimizer, _ = task()

    def after(n, _):
        if n == CHANGE:
            torch.use_deterministic_algorithms(True)

    made = supervised(model, optimizer, after)
    close = functools.partial(torch.use_deterministic_algorithms, False)
    return Loop(made.step, model, optimizer, made.batches, after=after, close=close)
