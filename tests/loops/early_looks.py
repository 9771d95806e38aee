"""Loops that look at their outputs before the backward, as most do, and loops that make tensors of drawn arrays."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import CHANGE, Loop, classifier, loop, mlp, task, update


class Mean:
    """A running mean, as in torch's own examples."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.sum += value * n
        self.count += n


def accuracy(output: torch.Tensor, target: torch.Tensor, ranks: tuple[int, ...] = (1, 2)) -> list[Any]:
    with torch.no_grad():
        _, found = output.topk(max(ranks), 1)
        correct = found.t().eq(target.view(1, -1).expand_as(found.t()))
        return [correct[:rank].reshape(-1).float().sum(0).mul(100.0 / target.size(0)).numpy() for rank in ranks]


@loop(planned=True)
def meters_and_a_confusion_matrix_before_the_backward(model, optimizer, batches) -> Loop:
    losses, first, matrix, pairs = Mean(), Mean(), np.zeros((4, 4), dtype=np.int64), Counter()

    def step(batch):
        x, y = batch
        out = model(x)
        loss = F.cross_entropy(out, y)
        best, _ = accuracy(out, y)
        losses.update(loss.item(), x.size(0))
        first.update(float(best), x.size(0))
        for target, guess in zip(y.tolist(), out.argmax(1).tolist(), strict=True):
            matrix[target, guess] += 1
        pairs.update(zip(y.tolist(), out.argmax(1).tolist(), strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{losses.sum / losses.count:.3f} {first.sum:.2f}")

    return Loop(
        step, model, optimizer, batches, lambda: {"matrix": matrix.tolist(), "pairs": dict(pairs), "sum": losses.sum}
    )


class Trainer:
    """A trainer that keeps predictions before it trains, and averages weights after it."""

    def __init__(self) -> None:
        self.model, self.average = mlp(), mlp()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.predictions: list[Any] = []

    def step(self, batch):
        x, y = batch
        out = self.model(x)
        loss = F.cross_entropy(out, y)
        self.predictions.extend(out.argmax(dim=1).tolist())
        loss = loss / 2
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.follow()
        return loss.detach().cpu().numpy()

    @torch.no_grad()
    def follow(self):
        for mine, theirs in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mine.mul_(0.9).add_(theirs, alpha=0.1)


@loop(planned=True)
def predictions_kept_by_a_trainer_that_averages_weights() -> Loop:
    trainer = Trainer()
    batches = task()[2]
    return Loop(
        trainer.step,
        [trainer.model, trainer.average],
        trainer.optimizer,
        batches,
        lambda: {"predictions": list(trainer.predictions)},
    )


@loop(planned=True)
def tensors_of_arrays_drawn_in_a_helper_and_in_the_forward() -> Loop:
    """By the constructors of old, as the penalty of a WGAN and the code of an adversarial autoencoder are drawn."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x):
            return self.inner(x + 0.1 * torch.FloatTensor(np.random.normal(0, 1, x.shape)))  # noqa: NPY002

    model = Noisy()
    _, _, batches = task()
    optimizer = torch.optim.Adam(model.parameters())

    def penalty(real):
        alpha = torch.Tensor(np.random.random((real.size(0), 1)))  # noqa: NPY002
        between = (alpha * real + (1 - alpha) * real.flip(0)).requires_grad_(True)
        (gradient,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        return ((gradient.norm(2, dim=1) - 1) ** 2).mean()

    def step(batch):
        x, y = batch
        return update(optimizer, F.cross_entropy(model(x), y) + penalty(x))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def codes_drawn_behind_ops_and_hits_before_the_backward() -> Loop:
    """As an ACGAN is trained: what it draws stands behind its first ops, and it looks before its last backward."""
    critic, optimizer, batches = task()
    maker = mlp(3, 8, 8)
    makers = torch.optim.Adam(maker.parameters(), lr=0.01)

    def step(batch):
        x, y = batch
        real = torch.ones(x.size(0)).fill_(1.0)
        makers.zero_grad()
        code = torch.FloatTensor(np.random.normal(0, 1, (x.shape[0], 3)))  # noqa: NPY002
        labels = torch.LongTensor(np.random.randint(0, 4, x.shape[0]))  # noqa: NPY002
        made = maker(code)
        loss = F.cross_entropy(critic(made), labels) * real.mean()
        loss.backward()
        makers.step()
        optimizer.zero_grad()
        out = critic(x)
        loss = F.cross_entropy(out, y) + F.cross_entropy(critic(made.detach()), labels)
        found = np.concatenate([out.data.cpu().numpy(), made.data.cpu().numpy()[:, :4]], axis=0)
        hits = np.mean(np.argmax(found, axis=1)[: len(y)] == y.numpy())
        loss.backward()
        optimizer.step()
        return loss.item(), hits

    return Loop(step, [maker, critic], [makers, optimizer], batches)


@loop()
def weights_read_before_the_update(model, optimizer, batches) -> Loop:
    """It may not read them after it."""
    norms: list[Any] = []

    def step(batch):
        x, y = batch
        weight = model[0].weight.detach()
        loss = F.cross_entropy(model(x), y)
        norms.append(float(np.square(weight.numpy()).sum()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Loop(step, model, optimizer, batches, lambda: {"norms": list(norms)})


class Memory:
    """Transitions with priorities, as in prioritized replay."""

    def __init__(self) -> None:
        self.priorities = np.ones(10, dtype=np.float32)

    def write(self, indices: Any, errors: Any) -> None:
        for index, error in zip(indices, errors, strict=True):
            self.priorities[index] = error


@loop(planned=True)
def priorities_written_between_backward_and_update(model, optimizer, batches) -> Loop:
    memory, spread, start = Memory(), [], [0]

    def step(batch):
        x, y = batch
        errors = F.cross_entropy(model(x), y, reduction="none")
        spread.append(errors.detach().numpy().std())
        loss = errors.mean()
        optimizer.zero_grad()
        loss.backward()
        memory.write([(start[0] + n) % 10 for n in range(6)], errors.data.cpu().numpy())
        optimizer.step()
        start[0] += 1
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"spread": list(spread), "priorities": memory.priorities})


@loop(planned=True)
def norm_of_gradients_by_hand(model, optimizer, batches) -> Loop:
    """As in the forums of torch."""
    norms: list[Any] = []

    def step(batch):
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        total = 0
        for parameter in model.parameters():
            total += parameter.grad.detach().data.norm(2).item() ** 2
        norms.append((total**0.5, math.sqrt(abs(loss.item())), -(loss.item() ** 3)))
        optimizer.step()

    return Loop(step, model, optimizer, batches, lambda: {"norms": list(norms)})


@loop()
def a_hook_that_keeps_what_the_step_keeps(model, optimizer, batches) -> Loop:
    """It runs in the backward, so what stands before that may not come after it."""
    kept: list[Any] = []
    model[0].weight.register_hook(lambda gradient: kept.append("hook"))

    def step(batch):
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        kept.append(loss.detach().numpy().item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def after(number, _):
        if number == CHANGE:
            model[2].weight.register_hook(lambda gradient: None)

    return Loop(step, model, optimizer, batches, lambda: {"kept": list(kept)}, after)


def trained_on_its_input(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    """Train, and return the input with its gradient."""
    x = batch[0].clone().requires_grad_(True)
    optimizer.zero_grad()
    F.cross_entropy(model(x), batch[1]).backward()
    optimizer.step()
    return x


@loop()
def gradient_of_an_input_read_after_the_update(model, optimizer, batches) -> Loop:
    """A graph returns tensors, and none of them with a gradient of its own."""
    seen: list[Any] = []

    def step(batch):
        x = trained_on_its_input(model, optimizer, batch)
        seen.append(float(x.grad.abs().max().numpy()))
        print(len(seen))

    return Loop(step, model, optimizer, batches, lambda: {"seen": list(seen)})


@loop()
def input_returned_with_its_gradient(model, optimizer, batches) -> Loop:
    seen: list[Any] = []

    def step(batch):
        return trained_on_its_input(model, optimizer, batch)

    def after(number, x):
        seen.append(float(x.grad.abs().max()))

    return Loop(step, model, optimizer, batches, lambda: {"seen": list(seen)}, after)


@loop(planned=True)
def hits_of_an_epoch(model, optimizer, batches) -> Loop:
    """A step is an epoch: between its updates it counts, in whole numbers and in floats."""
    history = []

    def step(_):
        total, hits, seen = 0.0, 0, 0
        for x, y in batches[:3]:
            out = model(x)
            loss = F.cross_entropy(out, y)
            update(optimizer, loss)
            total += loss.item() * len(x)
            hits += (out.argmax(1) == y).sum().item()
            seen += y.size(0)
        history.append(total / seen)
        return f"{history[-1]:.4f}" if seen < 0 else history[-1], 100.0 * hits / seen, hits

    return Loop(step, model, optimizer, [None], lambda: {"history": list(history)})


@loop(planned=True)
def loss_of_each_token(model, optimizer, batches) -> Loop:
    """The loss is divided by a whole number that is read from the targets' mask, and never by none."""
    state = {"tokens": 0}

    def step(batch):
        x, y = batch
        loss = F.cross_entropy(model(x), y, reduction="none")
        mask = loss.detach() > 1.0
        num_tokens = mask.sum().item()
        state["tokens"] += num_tokens
        return update(optimizer, (loss * mask).sum() / max(num_tokens, 1)).item(), num_tokens

    return Loop(step, model, optimizer, batches, lambda: dict(state))


@loop(word="goes on in Python with it")
def row_found_by_a_count(model, optimizer, batches) -> Loop:
    """A list is read at a place that the outputs give, which C code does without a word."""
    names = [f"bin {number}" for number in range(50)]

    def step(batch):
        for x, y in [batch, batch]:
            out = model(x)
            update(optimizer, F.cross_entropy(out, y))
            found = names[(out.argmax(1) == y).sum().item()]
            update(optimizer, F.cross_entropy(model(x), y))
        return found

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def gradients_clipped_by_floats(model, optimizer, batches) -> Loop:
    """The norm of all gradients and what they are scaled by are floats of Python's."""
    norms = []

    def clip(parameters, max_norm):
        norm = sum(p.grad.data.norm(2).item() ** 2 for p in parameters) ** 0.5
        scale = min(1.0, max_norm / (norm + 1e-6))
        for p in parameters:
            p.grad.data.mul_(scale)
        return norm

    def step(batch):
        loss = classifier(model, batch)
        optimizer.zero_grad()
        loss.backward()
        norms.append(clip(list(model.parameters()), 0.5))
        optimizer.step()
        return loss.item()

    return Loop(step, model, optimizer, batches, lambda: {"norms": norms})


@loop(planned=True)
def losses_shown_by_logarithms(model, optimizer, batches) -> Loop:
    """Some losses have no logarithm: their steps are eager's."""
    shown, state = [], {"low": 0}

    def show(loss):
        shown.append((math.exp(loss), -10 * math.log10(loss * loss), math.sqrt(loss)))
        try:
            shown.append(math.log2(loss - 0.1))
        except ValueError:
            state["low"] += 1

    def step(batch):
        loss = classifier(model, batch)
        show(loss.item())
        return update(optimizer, loss)

    return Loop(step, model, optimizer, batches, lambda: {"shown": shown, **state})
