"""Loops of particular methods: adversarial, reinforcement, curricula, meta-learning, several models and steps."""

from __future__ import annotations

import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from loops.loop import Loop, labelled, loop, mlp, train, update


def adversaries():
    generator, critic = mlp(3, 8, 8), mlp(8, 8, 1)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.002, betas=(0.5, 0.9)) for m in (generator, critic)]
    return generator, critic, optimizers, [torch.randn(6, 8) for _ in range(10)]


def critic_loss(generator, critic, real):
    fake = generator(torch.randn(6, 3)).detach()
    ones = torch.ones(6, 1)
    return F.binary_cross_entropy_with_logits(critic(real), ones) + F.binary_cross_entropy_with_logits(
        critic(fake), torch.zeros(6, 1)
    )


def generator_loss(generator, critic):
    return F.binary_cross_entropy_with_logits(critic(generator(torch.randn(6, 3))), torch.ones(6, 1))


@loop(planned=True)
def adversaries_as_two_steps() -> Loop:
    """Each has a schedule of its own; the two share both models."""
    generator, critic, optimizers, batches = adversaries()

    def train_critic(real):
        return update(optimizers[1], critic_loss(generator, critic, real))

    def train_generator(real):
        return update(optimizers[0], generator_loss(generator, critic))

    models = [generator, critic]
    also = Loop(train_generator, models, optimizers, batches)
    return Loop(train_critic, models, optimizers, batches, also=(also,))


@loop(planned=True)
def two_schedules_of_one_model(model, optimizer, batches) -> Loop:
    """Two tasks in turn, one optimizer: each step finds state that the other one has left."""

    def classify(batch):
        return train(model, optimizer, batch)

    def shrink(batch):
        return update(optimizer, model(batch[0]).square().mean())

    return Loop(classify, model, optimizer, batches, also=(Loop(shrink, model, optimizer, batches),))


@loop(planned=True)
def learning_to_learn() -> Loop:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(batch):
        x, y = batch
        weights = dict(model.named_parameters())
        inner = F.cross_entropy(functional_call(model, weights, x[:3]), y[:3])
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), grads, strict=True)}
        return update(optimizer, F.cross_entropy(functional_call(model, moved, x[3:]), y[3:]))

    return Loop(step, model, optimizer, labelled())


class Walk:
    """An environment in Python: a position on a line, and a reward at its end."""

    def __init__(self) -> None:
        self.place, self.episodes = 3, 0

    def act(self, right: bool) -> float:
        self.place += 1 if right else -1
        if 0 < self.place < 6:
            return 0.0
        reward = float(self.place == 6)
        self.place, self.episodes = 3, self.episodes + 1
        return reward


@loop()
def q_learning() -> Loop:
    """Acts greedily but for chance, learns from what it replays, and copies its target every 20 steps."""
    model, target = nn.Linear(7, 2), nn.Linear(7, 2)
    target.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    walk, memory, steps = Walk(), deque(maxlen=100), 0

    def step(_):
        nonlocal steps
        steps += 1
        here = walk.place
        values = model(F.one_hot(torch.tensor(here), 7).float())
        action = random.randrange(2) if random.random() < 0.2 else int(values.argmax())
        reward = walk.act(action == 1)
        memory.append((here, action, reward, walk.place))
        rows = [random.choice(memory) for _ in range(8)]
        states, actions, gained, following = (torch.tensor(column) for column in zip(*rows, strict=True))
        with torch.no_grad():
            aim = gained.float() + 0.9 * target(F.one_hot(following, 7).float()).amax(1)
        loss = F.mse_loss(model(F.one_hot(states, 7).float()).gather(1, actions[:, None])[:, 0], aim)
        update(optimizer, loss)
        if steps % 20 == 0:
            target.load_state_dict(model.state_dict())
        return loss

    def state():
        return {"target": target.state_dict(), "walk": vars(walk), "memory": memory, "steps": steps}

    return Loop(step, model, optimizer, [None], state)


@loop(planned=True)
def curriculum_inside(model, optimizer, batches) -> Loop:
    """The step itself decides how much of the batch it takes, by how well it does."""
    stage = {"rows": 2, "good": 0}

    def step(batch):
        x, y = batch[0][: stage["rows"]], batch[1][: stage["rows"]]
        loss = F.cross_entropy(model(x), y)
        update(optimizer, loss)
        stage["good"] = stage["good"] + 1 if loss.item() < 1.2 else 0
        if stage["good"] > 5 and stage["rows"] < 6:
            stage.update(rows=stage["rows"] + 1, good=0)
        return loss

    return Loop(step, model, optimizer, batches, lambda: stage)


@loop(planned=True)
def tasks_in_turn() -> Loop:
    """A generator of Python's gives the name of the next task."""
    body, heads = mlp(8, 8, 6), nn.ModuleDict({"sum": nn.Linear(6, 1), "max": nn.Linear(6, 1), "sign": nn.Linear(6, 1)})
    model = nn.ModuleList([body, heads])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    order = ["sum", "max", "sign"]

    def step(x):
        name = order[0]
        order.append(order.pop(0))
        aim = {"sum": x.sum(1), "max": x.amax(1), "sign": x[:, 0].sign()}[name]
        loss = F.mse_loss(heads[name](body(x))[:, 0], aim)
        update(optimizer, loss)
        return name, loss

    return Loop(step, model, optimizer, [torch.randn(6, 8) for _ in range(10)], lambda: {"order": order})
