"""Loops whose step draws random numbers: by torch, by Python, by numpy, before its ops and between them."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import Loop, labelled, loop, mlp, update


@loop(planned=True)
def draws_made_plain(model, optimizer, batches) -> Loop:
    """A drawn number is converted at once, as type checkers ask for."""
    generator = np.random.default_rng(5)

    def step(batch):
        x, y = batch
        share = float(generator.beta(0.4, 0.4))
        width = round(random.uniform(0.1, 0.3), 3)
        shift = generator.normal(size=1).item()
        out = model(share * x + (1 - share) * x.flip(0) + width * shift)
        loss = share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y.flip(0))
        return update(optimizer, loss)

    return Loop(step, model, optimizer, batches, lambda: {"generator": generator})


@loop(planned=True)
def target_copied_before_a_memory_is_sampled() -> Loop:
    """As in tutorials on Q-learning: the target network is copied now and then, first of all."""
    model, target = mlp(), mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    memory = [(torch.randn(8), random.randrange(4), random.random(), torch.randn(8)) for _ in range(20)]
    count = [0]

    def step(_):
        if count[0] % 10 == 0:
            target.load_state_dict(model.state_dict())
        count[0] += 1
        states, actions, rewards, following = zip(*random.sample(memory, 6), strict=True)
        values = model(torch.stack(states)).gather(1, torch.tensor(actions).unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            wanted = torch.tensor(rewards) + 0.9 * target(torch.stack(following)).max(1).values
        return update(optimizer, F.smooth_l1_loss(values, wanted))

    return Loop(step, [model, target], optimizer, [None], lambda: {"count": count[0]})


@loop(planned=True)
def rows_of_arrays_in_a_drawn_order(model, optimizer, batches) -> Loop:
    """As in implementations of PPO by numpy: mini-batches of a rollout, whose order is drawn between updates."""

    def step(batch):
        x, y = batch
        for _ in range(2):
            order = np.random.permutation(len(x))  # noqa: NPY002  # as people write
            for begin in range(0, len(x), 3):
                rows = order[begin : begin + 3]
                loss = update(optimizer, F.cross_entropy(model(torch.as_tensor(x[rows])), torch.as_tensor(y[rows])))
        return loss

    return Loop(step, model, optimizer, [(x.numpy(), y.numpy()) for x, y in batches])


@loop(planned=True)
def mix_up_by_a_function_after_zero_grad(model, optimizer, batches) -> Loop:
    """As in mixup-cifar10: a function draws by Python, by torch and by a generator, and mixes. It reads no weight."""
    generator = torch.Generator().manual_seed(7)

    def mixed(x, y, alpha=0.4):
        share = random.betavariate(alpha, alpha) if alpha > 0 else 1
        order = torch.randperm(x.size(0))
        x = x + 0.1 * torch.randn(x.shape, generator=generator)
        return share * x + (1 - share) * x[order, :], y, y[order], share

    def step(batch):
        x, y = batch
        model.train()
        optimizer.zero_grad()
        x, one, other, share = mixed(x, y)
        out = model(x)
        loss = share * F.cross_entropy(out, one) + (1 - share) * F.cross_entropy(out, other)
        loss.backward()
        optimizer.step()
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"generator": generator})


@loop(planned=True)
def generators_of_torch_of_their_own(model, optimizer, batches) -> Loop:
    """One draws before the forward and one behind it, where another branch is undone and made again."""
    noise, weights = (torch.Generator().manual_seed(seed) for seed in (7, 8))

    def step(batch):
        x, y = batch
        out = model(x + 0.1 * torch.randn(x.shape, generator=noise))
        losses = F.cross_entropy(out, y, reduction="none") * torch.empty(len(y)).uniform_(0.5, 1.5, generator=weights)
        if losses.mean().item() > 2.0:
            return None
        return update(optimizer, losses.mean())

    return Loop(step, model, optimizer, batches, lambda: {"noise": noise, "weights": weights})


@loop()
def generator_of_torch_made_in_the_step(model, optimizer, batches) -> Loop:
    def step(batch):
        x, y = batch
        drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(len(x)))
        return update(optimizer, F.cross_entropy(model(x + 0.1 * drawn), y))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def generator_of_torch_in_a_forward() -> Loop:
    """It draws in every second step, and between steps others draw from it and seed it."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.generator, self.num_calls = nn.Linear(8, 4), torch.Generator().manual_seed(3), 0

        def forward(self, x):
            self.num_calls += 1
            if self.num_calls % 2:
                x = x[torch.randperm(len(x), generator=self.generator)]
            return self.inner(x)

    model = Noisy()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(batch):
        return update(optimizer, F.cross_entropy(model(batch[0]), batch[1]))

    def batches(number):
        if number % 10 == 9:
            model.generator.manual_seed(number)
        drawn = torch.randn(6, 8, generator=model.generator)
        return drawn, torch.arange(6) % 4

    return Loop(step, model, optimizer, batches, lambda: {"generator": model.generator})


@loop(planned=True)
def seed_set_inside(model, optimizer, batches) -> Loop:
    def step(batch):
        x, y = batch
        torch.manual_seed(11)
        return update(optimizer, F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y))

    return Loop(step, model, optimizer, batches)


@loop()
def stochastic_depth() -> Loop:
    """A branch on a number that torch draws."""
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(batch):
        x, y = batch
        for layer in model[:-1]:
            if torch.rand(()) < 0.7:
                x = x + F.relu(layer(x))
        return update(optimizer, F.cross_entropy(model[-1](x), y))

    return Loop(step, model, optimizer, labelled())


@loop(planned=True)
def noise_on_gradients() -> Loop:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad.add_(0.01 * torch.randn_like(p.grad))
        optimizer.step()
        return loss

    return Loop(step, model, optimizer, labelled())


@loop(planned=True)
def batch_sliced_at_drawn_places(model, optimizer, batches) -> Loop:
    """The step makes its own batch by ops whose numbers decide on slices."""
    inputs, labels = (torch.cat(each) for each in zip(*batches, strict=True))

    def fetched():
        places = torch.randint(len(inputs) - 3, (4,))
        return torch.cat([inputs[at : at + 3] for at in places]), torch.cat([labels[at : at + 3] for at in places])

    def step(_):
        x, y = fetched()
        return update(optimizer, F.cross_entropy(model(x), y))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def transitions_sampled_from_a_memory(model, optimizer, batches) -> Loop:
    """A deep Q network: a list of tuples of tensors and numbers, which are never the same."""
    target = mlp()
    target.load_state_dict(model.state_dict())
    draw = random.Random(0)
    memory = [(x, draw.randrange(4), draw.random(), draw.random() < 0.2) for batch in batches for x in batch[0]]
    state = {"step": 0}

    def step(_):
        states, actions, rewards, ends = zip(*draw.sample(memory, 8), strict=True)
        states = torch.stack(states)
        actions = torch.tensor(actions)
        rewards = torch.tensor(rewards)
        ends = torch.tensor(ends, dtype=torch.float32)
        values = model(states).gather(1, actions.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            wanted = rewards + 0.9 * target(states + 0.1).max(1)[0] * (1 - ends)
        update(optimizer, F.smooth_l1_loss(values, wanted))
        state["step"] += 1
        if state["step"] % 25 == 0:
            target.load_state_dict(model.state_dict())

    return Loop(step, [model, target], optimizer, batches, lambda: {**state, "draw": draw})


@loop(word="reads a tensor's value")
def value_read_from_what_a_hidden_model_computes(model, optimizer, batches) -> Loop:
    """The first statement calls the model by another name, so that it cannot stand before the graph."""
    calls = {"model": lambda x: model(x)}

    def step(batch):
        out = calls["model"](batch[0])
        best = int(out.argmax())
        return update(optimizer, F.cross_entropy(out, batch[1]) * (1 + best % 2))

    return Loop(step, model, optimizer, batches)
