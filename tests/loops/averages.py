"""Loops that carry tensors from step to step: averages of weights, hidden states, queues."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from loops.loop import CHANGE, Loop, labelled, loop, train, update


@loop(planned=True)
def average_rebound_in_a_dictionary(model, optimizer, batches) -> Loop:
    average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def step(batch):
        loss = train(model, optimizer, batch)
        for name, p in model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * p.detach()
        return loss

    return Loop(step, model, optimizer, batches, lambda: average)


@loop()
def average_by_torch(model, optimizer, batches) -> Loop:
    average = AveragedModel(model)

    def step(batch):
        loss = train(model, optimizer, batch)
        average.update_parameters(model)
        return loss

    return Loop(step, [model, average], optimizer, batches)


@loop(planned=True)
def exponential_average_by_torch_that_is_given(model, optimizer, batches) -> Loop:
    """It asks whether the count in its buffer is zero, once before it counts and once after."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        update(optimizer, loss)
        average.update_parameters(model)
        return loss

    return Loop(step, [model, average], optimizer, batches)


def words():
    return [(torch.randn(4, 3, 8), torch.randn(4, 3, 6)) for _ in range(10)]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNN(8, 6)
        self.hidden = torch.zeros(1, 3, 6)

    def forward(self, x):
        out, state = self.cell(x, self.hidden)
        self.hidden = state.detach()
        return out


@loop(planned=True)
def hidden_state_in_the_module() -> Loop:
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(batch):
        return update(optimizer, F.mse_loss(model(batch[0]), batch[1]))

    return Loop(step, model, optimizer, words(), lambda: {"hidden": model.hidden})


@loop(planned=True)
def hidden_states_with_their_graph() -> Loop:
    """As in torch's word language model: kept as they come, in a tuple, and detached when the next step begins."""
    model = nn.LSTM(8, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    kept: dict[str, Any] = {"states": (torch.zeros(1, 3, 6), torch.zeros(1, 3, 6)), "error": ""}

    def step(batch):
        states = tuple(state.detach() for state in kept["states"])
        optimizer.zero_grad()
        out, kept["states"] = model(batch[0], states)
        loss = F.mse_loss(out, batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss

    def after(n, _):
        if n == CHANGE:
            kept["states"] = (torch.zeros(1, 3, 6), torch.zeros(1, 3, 6))
        elif n == CHANGE + 5:
            try:
                kept["states"][0].sum().backward()
            except RuntimeError as error:
                kept["error"] = str(error)[:40]

    def state():
        return {
            "needs": [each.requires_grad for each in kept["states"]],
            "states": [s.detach() for s in kept["states"]],
        }

    return Loop(step, model, optimizer, words(), lambda: {**state(), "error": kept["error"]}, after)


@loop(planned=True)
def hidden_states_detached_behind_the_ops() -> Loop:
    """A print keeps the step from being planned as a whole, and what comes before it begins with detached states."""
    model = nn.LSTM(8, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    kept: dict[str, Any] = {"states": (torch.zeros(1, 3, 6), torch.zeros(1, 3, 6))}

    def step(batch):
        optimizer.zero_grad()
        out, kept["states"] = model(batch[0], kept["states"])
        loss = F.mse_loss(out, batch[1])
        loss.backward()
        optimizer.step()
        kept["states"] = tuple(state.detach() for state in kept["states"])
        print(f"{loss.item():.3f}")

    return Loop(step, model, optimizer, words(), lambda: dict(kept))


@loop()
def copy_of_the_model_made_inside(model, optimizer, batches) -> Loop:
    def step(batch):
        frozen = copy.deepcopy(model)
        loss = train(model, optimizer, batch)
        with torch.no_grad():
            return loss, (frozen(batch[0]) - model(batch[0])).square().mean()

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def average_given_as_memory(model, optimizer, batches) -> Loop:
    """As in MoCo and BYOL: ``old.data = old.data * m + new.data * (1 - m)``, and the teacher runs after that.

    The loop holds the memory of each step before, which nothing may write any more.
    """
    teacher = copy.deepcopy(model).requires_grad_(False)
    held = {}

    def step(batch):
        x, y = batch
        out = model(x)
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                old.data = old.data * 0.9 + new.data * 0.1
            target = teacher(x)
        return update(optimizer, F.cross_entropy(out, y) + F.mse_loss(out, target))

    def after(n, _):
        held[n % 4] = [p.data for p in teacher.parameters()]

    return Loop(step, [model, teacher], optimizer, batches, lambda: dict(held), after)


@loop(planned=True)
def weights_given_as_memory_twice(model, optimizer, batches) -> Loop:
    """The weights that are trained get other memory, in a step before the forward and once more behind the update."""

    def step(batch):
        x, y = batch
        for p in model.parameters():
            p.data = p.data * 0.99
        loss = update(optimizer, F.cross_entropy(model(x), y))
        for p in model.parameters():
            p.data = p.data.clamp(-0.5, 0.5)
        return loss

    return Loop(step, model, optimizer, batches)


@loop(word="other memory")
def memory_exchanged_between_two_models(model, optimizer, batches) -> Loop:
    other = copy.deepcopy(model)

    def step(batch):
        x, y = batch
        loss = update(optimizer, F.cross_entropy(model(x) + other(x).detach(), y))
        one, two = model[0].bias, other[0].bias
        one.data, two.data = two.data, one.data
        return loss

    return Loop(step, [model, other], optimizer, batches)


class _Contrasted(nn.Module):
    """As in MoCo: a slow encoder, and a queue of its keys with a pointer that is read as a number."""

    def __init__(self):
        super().__init__()
        self.fast, self.slow = nn.Linear(8, 6), nn.Linear(8, 6).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(6, 24), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, one, other):
        query = F.normalize(self.fast(one), dim=1)
        with torch.no_grad():
            for new, old in zip(self.fast.parameters(), self.slow.parameters(), strict=True):
                old.data = old.data * 0.9 + new.data * 0.1
            keys = F.normalize(self.slow(other), dim=1)
        positive = torch.einsum("nc,nc->n", [query, keys]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [query, self.queue.clone().detach()])
        pointer = int(self.queue_ptr)
        assert self.queue.shape[1] % len(keys) == 0
        self.queue[:, pointer : pointer + len(keys)] = keys.T
        self.queue_ptr[0] = (pointer + len(keys)) % self.queue.shape[1]
        return torch.cat([positive, negative], dim=1) / 0.2, torch.zeros(len(keys), dtype=torch.long)


@loop(planned=True)
def keys_in_a_queue_by_a_pointer() -> Loop:
    model = _Contrasted()
    optimizer = torch.optim.SGD(model.fast.parameters(), lr=0.05, momentum=0.9)

    def step(batch):
        return update(optimizer, F.cross_entropy(*model(batch[0], batch[0] + 0.1 * torch.randn_like(batch[0]))))

    def after(n, _):
        if n == CHANGE:
            model.queue_ptr.fill_(6)

    return Loop(step, model, optimizer, labelled(), after=after)


@loop(planned=True)
def weights_written_through_their_memory(model, batches) -> Loop:
    """As in tutorials: ``p.data -= rate * p.grad.data``."""

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        model.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad.data *= 0.5
            p.data -= 0.05 * p.grad.data
        return loss.item()

    return Loop(step, model, [], batches)


@loop(planned=True)
def perturbation_given_as_memory(model, optimizer, batches) -> Loop:
    """As in adversarial training: a tensor that the step has made gets other memory, and is trained further."""

    def step(batch):
        x, y = batch
        delta = torch.zeros_like(x).uniform_(-0.1, 0.1)
        delta.requires_grad = True
        for _ in range(2):
            F.cross_entropy(model(x + delta), y).backward()
            delta.data = (delta + 0.03 * delta.grad.detach().sign()).clamp(-0.1, 0.1)
            delta.grad.zero_()
        return update(optimizer, F.cross_entropy(model(x + delta.detach()), y))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def detached_weights_kept_and_given_as_gradients(model, optimizer, batches) -> Loop:
    """A detached weight is no parameter, nor is a view of it: the loop and another optimizer may write into either."""
    other = copy.deepcopy(model)
    following = torch.optim.SGD(other.parameters(), lr=0.01)
    kept = {"whole": torch.zeros(4), "row": torch.zeros(8)}

    def step(batch):
        loss = train(model, optimizer, batch)
        following.zero_grad(set_to_none=False)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.grad = p.detach()
        following.step()
        kept["whole"], kept["row"] = model[2].bias.detach(), model[0].weight.data[0]
        return loss

    def after(n, _):
        if n % 5 == 0:
            kept["whole"].mul_(0.9)
            kept["row"].mul_(0.9)

    def state():
        return {**kept, "need": [p.requires_grad for p in (*model.parameters(), *kept.values())]}

    return Loop(step, [model, other], [optimizer, following], batches, state, after)


@loop(word="make it once, outside the step, and write into it")
def weights_exchanged_for_their_average(model, optimizer, batches) -> Loop:
    """As codes of a vector quantization often are. The new parameter has no graph that could be detached."""
    codes = nn.Embedding(4, 8)

    def step(batch):
        codes.weight = nn.Parameter(0.9 * codes.weight + 0.1 * model[2].weight.mean() * batch[0].mean())
        return train(model, optimizer, (batch[0] + codes.weight.mean(), batch[1]))

    return Loop(step, model, optimizer, batches, lambda: {"codes": codes.weight})


@loop(planned=True)
def parameters_made_in_the_step(model, optimizer, batches) -> Loop:
    """One of a slice that is written later, and one that is trained by hand."""

    def step(batch):
        x, y = batch
        whole = x * 2
        part = nn.Parameter(whole[1:4].t(), requires_grad=False)
        whole.mul_(0.5)
        code = nn.Parameter(model(x).detach())
        F.cross_entropy(code, y).backward()
        code.data.sub_(0.1 * code.grad)
        return update(optimizer, F.mse_loss(model(whole), code.detach()) + part.mean() * model(x).mean())

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def curvature_by_functions_of_torch() -> Loop:
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x):
        curvature = torch.func.vmap(torch.func.hessian(lambda row: model(row).sum()))(x)
        return update(optimizer, curvature.diagonal(dim1=1, dim2=2).sum(1).square().mean())

    return Loop(step, model, optimizer, [torch.randn(4, 3) for _ in range(5)])
