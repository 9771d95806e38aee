"""Loops that no graph can be, as their authors write them: values are looked at, and numbers drawn, between ops."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import Loop

TABLE: dict[str, Callable[[], Loop]] = {}


def regional(build: Callable[[], Loop]) -> Callable[[], Loop]:
    """Register a builder by its name."""
    TABLE[build.__name__] = build
    return build


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _images(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(5, (4,), generator=generator)


def _rows(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, 6, generator=generator), torch.randint(4, (16,), generator=generator)


class _Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.norm, self.attention = nn.LayerNorm(8), nn.Linear(8, 24)
        self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), nn.Linear(8, 11)

    def forward(self, x, y):
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        q, k, v = self.attention(self.norm(h)).chunk(3, dim=-1)
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(h + self.body(h))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


@regional
def text_fetched_for_each_part_of_a_batch() -> Loop:
    text = np.random.default_rng(0).integers(0, 11, 400).astype(np.uint16)
    model = _Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    seen = {"tokens": 0}

    def fetch():
        starts = torch.randint(len(text) - 5, (3,))
        x = torch.stack([torch.from_numpy(text[i : i + 4].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(text[i + 1 : i + 5].astype(np.int64)) for i in starts])
        return x, y

    def step(batch):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + seen["tokens"] % 7)
        for _ in range(2):
            x, y = fetch()
            _, loss = model(x, y)
            (loss / 2).backward()
            seen["tokens"] += x.numel()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return Loop(step, model, optimizer, [None], state=lambda: dict(seen))


@regional
def actor_and_critics_with_a_flipped_coin() -> Loop:
    actor, first, second = _mlp(6, 16, 4), _mlp(8, 16, 1), _mlp(8, 16, 1)
    targets = [copy.deepcopy(first), copy.deepcopy(second)]
    by_critic = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.01)
    by_actor = torch.optim.Adam(actor.parameters(), lr=0.003)
    memory = {"states": torch.randn(50, 6), "actions": torch.randn(50, 2)}

    def act(states):
        mean, scale = actor(states).chunk(2, dim=-1)
        drawn = mean + scale.clamp(-3, 1).exp() * torch.randn_like(mean)
        return torch.tanh(drawn), -((drawn - mean) ** 2).sum(-1, keepdim=True)

    def step(batch):
        rows = np.random.randint(0, 50, 12)  # noqa: NPY002
        states, actions = memory["states"][rows], memory["actions"][rows]
        with torch.no_grad():
            later = memory["states"][np.random.randint(0, 50, 12)]  # noqa: NPY002
            following, likely = act(later)
            both = torch.cat([following, later], dim=-1)
            wanted = states[:, :1] + 0.9 * (torch.min(*(each(both) for each in targets)) - 0.1 * likely)
        both = torch.cat([actions, states], dim=-1)
        critic_loss = F.mse_loss(first(both), wanted) + F.mse_loss(second(both), wanted)
        by_critic.zero_grad()
        critic_loss.backward()
        by_critic.step()
        following, likely = act(states)
        both = torch.cat([following, states], dim=-1)
        actor_loss = (0.1 * likely - torch.min(first(both), second(both))).mean()
        by_actor.zero_grad()
        actor_loss.backward()
        by_actor.step()
        with torch.no_grad():
            for target, critic in zip(targets, (first, second), strict=True):
                for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)
        return critic_loss.item() + (0.0 if torch.rand(()) < 0.5 else actor_loss.item())

    return Loop(step, [actor, first, second, *targets], [by_critic, by_actor], [None])


class _Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1))
        self.queries = nn.Parameter(torch.randn(6, 12))
        self.kinds, self.boxes = nn.Linear(12, 6), nn.Linear(12, 4)

    def forward(self, x):
        seen = self.body(x).flatten(2).transpose(1, 2)
        found = F.scaled_dot_product_attention(self.queries.expand(len(x), -1, -1), seen, seen)
        return self.kinds(found), self.boxes(found).sigmoid()


@regional
def objects_matched_outside_of_torch() -> Loop:
    model = _Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(batch):
        x, y = batch
        kinds, boxes = model(x)
        loss = torch.zeros(())
        for place, label in enumerate(y):
            with torch.no_grad():
                cost = -kinds[place].softmax(-1)[:, label] + boxes[place].sum(-1)
            chosen = int(np.argmin(cost.numpy()))
            wanted = torch.full((6,), 5)
            wanted[chosen] = label
            loss = loss + F.cross_entropy(kinds[place], wanted) + F.l1_loss(boxes[place, chosen], x[place, 0, 0, :4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Loop(step, model, optimizer, _images)


@regional
def a_queue_of_keys_and_a_slow_encoder() -> Loop:
    encoder = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 8))
    slow = copy.deepcopy(encoder).requires_grad_(False)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    queue = deque((F.normalize(torch.randn(4, 8)) for _ in range(3)), maxlen=3)

    def step(batch):
        x, _ = batch
        query = F.normalize(encoder(x + 0.1 * torch.randn_like(x)))
        with torch.no_grad():
            for old, new in zip(slow.parameters(), encoder.parameters(), strict=True):
                old.mul_(0.99).add_(new, alpha=0.01)
            order = torch.from_numpy(np.random.permutation(len(x)))  # noqa: NPY002
            keys = F.normalize(slow(x[order]))[order.argsort()]
        scores = torch.cat([(query * keys).sum(1, keepdim=True), query @ torch.cat(list(queue)).t()], dim=1)
        loss = F.cross_entropy(scores / 0.2, torch.zeros(len(x), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue.append(keys)
        return loss.item()

    return Loop(step, [encoder, slow], optimizer, _images, state=lambda: {"queue": list(queue)})


class _Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = _mlp(6, 12, 4), _mlp(6, 12, 1)

    def forward(self, x):
        return self.actor(x), self.critic(x)


@regional
def epochs_of_shuffled_parts() -> Loop:
    model = _Policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003, eps=1e-5)
    early: list[int] = []

    def step(batch):
        x, y = batch
        rows = np.arange(len(x))
        for epoch in range(2):
            np.random.shuffle(rows)  # noqa: NPY002
            for start in range(0, len(x), 8):
                part = rows[start : start + 8]
                scores, value = model(x[part])
                policy = torch.distributions.Categorical(logits=scores)
                ratio = (policy.log_prob(y[part]) + 1.4).exp()
                loss = -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean() + 0.5 * value.pow(2).mean()
                loss = loss - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            if (ratio - 1).abs().mean().item() > 0.5:
                early.append(epoch)
                break
        return loss.item()

    return Loop(step, model, optimizer, _rows, state=lambda: {"early": list(early)})


@regional
def a_step_that_ends_epochs_by_raising() -> Loop:
    model = nn.GRU(6, 8, batch_first=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen = {"steps": 0, "hidden": torch.zeros(1, 4, 8)}

    def step(batch):
        x, _ = batch
        seen["steps"] += 1
        output, hidden = model(x.view(4, 4, 6), seen["hidden"])
        seen["hidden"] = hidden.detach()
        loss = output.pow(2).mean() + float(np.float64(output.detach().numpy().max()))
        if seen["steps"] % 13 == 0:
            raise StopIteration(f"epoch {seen['steps'] // 13}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Loop(step, model, optimizer, _rows, state=lambda: dict(seen))
