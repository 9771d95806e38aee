"""Loops whose step draws by Python or numpy where no statement of its own body could draw ahead of its ops."""

from __future__ import annotations

import collections
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import CHANGE, Loop, labelled, loop, mlp, task, update


@loop(planned=True)
def teacher_forcing() -> Loop:
    """As in the tutorial on translation: the decoder is forced in half of the steps, decided behind the encoder."""
    encoder, decoder, head = nn.GRU(8, 12), nn.GRUCell(4, 12), nn.Linear(12, 4)
    models = [encoder, decoder, head]
    optimizer = torch.optim.Adam([p for each in models for p in each.parameters()], lr=0.01)
    words = [torch.randn(3, 2, 8) for _ in range(10)]
    targets = torch.randn(10, 3, 2, 4)

    def step(source, target):
        optimizer.zero_grad()
        _, hidden = encoder(source)
        hidden, given, loss = hidden[0], torch.zeros(2, 4), 0
        is_forced = random.random() < 0.5
        for word in target:
            hidden = decoder(given, hidden)
            out = head(hidden)
            loss = loss + F.mse_loss(out, word)
            given = word if is_forced else out.detach()
        loss.backward()
        optimizer.step()
        return loss.item() / len(target)

    def one(batch):
        return step(*batch)

    return Loop(one, models, optimizer, list(zip(words, targets, strict=True)))


@loop(planned=True)
def penalty_between_real_and_false() -> Loop:
    """A helper draws one share for each sample, after the critic has run."""
    critic, optimizer, batches = task()

    def penalty(one, other):
        share = torch.from_numpy(np.random.random((len(one), 1))).float()  # noqa: NPY002  # as people write
        between = (share * one + (1 - share) * other).requires_grad_(True)
        score = critic(between)
        (slope,) = torch.autograd.grad(score.sum(), between, create_graph=True)
        return ((slope.norm(2, dim=1) - 1) ** 2).mean()

    def step(batch):
        real, false = batch[0], batch[0].flip(0)
        loss = critic(false).mean() - critic(real).mean() + 10 * penalty(real, false)
        return update(optimizer, loss)

    return Loop(step, critic, optimizer, batches)


class _Mixing(nn.Module):
    """Mixes the samples in front of one of its layers, with a share that follows `alpha`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)])
        self.alpha = 0.4

    def forward(self, x):
        place = random.randint(0, 2)
        share = np.random.beta(self.alpha, self.alpha)  # noqa: NPY002
        for number, layer in enumerate(self.layers):
            if number == place:
                x = share * x + (1 - share) * x.flip(0)
            x = torch.relu(layer(x))
        return x


@loop(planned=True)
def mix_up_whose_distribution_changes() -> Loop:
    model = _Mixing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(batch):
        return update(optimizer, F.cross_entropy(model(batch[0]), batch[1]))

    def after(n, _):
        if n == CHANGE:
            model.alpha = 0.8

    return Loop(step, model, optimizer, labelled(), after=after)


@loop(planned=True)
def noise_for_batches_of_two_sizes(model, optimizer, batches) -> Loop:
    batches[4] = tuple(each[:4] for each in batches[4])

    def noisy(x):
        noise = np.random.normal(0, 0.1, x.shape)  # noqa: NPY002
        return x + torch.as_tensor(noise, dtype=torch.float32)

    def step(batch):
        x, y = batch
        loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(noisy(x)), y)
        return update(optimizer, loss)

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def draws_around_what_raises(model, optimizer, batches) -> Loop:
    """One draw comes before a label that does not exist, and one after it. The first model has been trained by then."""
    other = mlp()
    optimizers = [optimizer, torch.optim.SGD(other.parameters(), lr=0.05)]
    bad = (batches[0][0], torch.full((6,), 9))

    def noise():
        return 1 + 0.1 * random.random()

    def step(batch):
        x, y = batch
        update(optimizers[0], (model(x) * noise()).square().mean())
        loss = F.cross_entropy(other(x) * noise(), y)
        return update(optimizers[1], loss * noise())

    return Loop(step, [model, other], optimizers, lambda n: bad if n in (20, 80, 81, 100) else batches[n % 10])


@loop(word="random")
def pool_of_earlier_images(model, optimizer, batches) -> Loop:
    """As in CycleGAN: how many numbers are drawn depends on those that were."""
    pool = [torch.randn(8) for _ in range(4)]

    def queried(rows):
        found = []
        for row in rows:
            if random.uniform(0, 1) > 0.5:
                place = random.randint(0, 3)
                row, pool[place] = pool[place].clone(), row
            found.append(row)
        return torch.stack(found)

    def step(batch):
        x, y = batch
        out = model(x)
        return update(optimizer, F.cross_entropy(out, y) + 0.1 * model(queried(x)).square().mean())

    return Loop(step, model, optimizer, batches, lambda: {"pool": pool})


@loop(planned=True)
def draw_beside_a_helper_that_draws(model, optimizer, batches) -> Loop:
    """Two draws of one statement: that of the helper comes first, and no hook of Python's sees numpy draw."""

    def noise(x):
        return torch.from_numpy(np.random.normal(0, 1, (len(x), 4))).float()  # noqa: NPY002

    def step(batch):
        x, y = batch
        out = model(x) + noise(x) * np.random.beta(0.4, 0.4)  # noqa: NPY002
        return update(optimizer, F.cross_entropy(out, y))

    return Loop(step, model, optimizer, batches)


@loop()
def draw_after_an_attribute_is_set(model, optimizer, batches) -> Loop:
    options = {"alpha": 0.4}

    def step(batch):
        x, y = batch
        options["alpha"] = 0.4 if len(x) > 3 and options["alpha"] > 0.5 else 0.8
        share = random.betavariate(options["alpha"], options["alpha"])
        return update(optimizer, share * F.cross_entropy(model(x), y))

    return Loop(step, model, optimizer, batches, lambda: dict(options))


class _Jittered(nn.Module):
    """Adds noise by generators of numpy's, one in an attribute and one in a closure."""

    def __init__(self, generator):
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 4)
        self.generator = np.random.default_rng(5)
        self.scale = lambda: generator.uniform(0.9, 1.1)

    def forward(self, x):
        noise = torch.as_tensor(self.generator.normal(0, 0.1, (len(x), 12)), dtype=torch.float32)
        return self.second(torch.relu(self.first(x)) + noise) * self.scale()


@loop(planned=True)
def noise_by_generators_of_numpy() -> Loop:
    generator = np.random.RandomState(3)
    model = _Jittered(generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(batch):
        return update(optimizer, F.cross_entropy(model(batch[0]), batch[1]))

    def state():
        return {"attribute": model.generator, "closure": repr(generator.get_state())}

    return Loop(step, model, optimizer, labelled(), state)


@loop()
def draws_of_other_kinds_in_turns(model, optimizer, batches) -> Loop:
    """Two draws that take the same bits, so that the state of the generator does not tell one from the other."""

    def drawn(n):
        return random.random() if n % 7 else random.uniform(1, 2)

    def step(n, batch):
        x, y = batch
        out = model(x)
        return update(optimizer, drawn(n) * F.cross_entropy(out, y))

    def one(pair):
        return step(*pair)

    return Loop(one, model, optimizer, lambda n: (n, batches[n % 10]))


@loop(planned=True)
def rows_chosen_by_an_array(model, optimizer, batches) -> Loop:
    """As in PPO by hand: the order is drawn once, and each part of it picks rows."""

    def step(batch):
        x, y = batch
        order = np.random.permutation(len(x))  # noqa: NPY002
        for begin in range(0, len(x), 2):
            rows = order[begin : begin + 2]
            loss = update(optimizer, F.cross_entropy(model(x[rows]), y[rows]))
        return loss

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def noise_cast_by_numpy(model, optimizer, batches) -> Loop:
    generator = np.random.default_rng(2)

    def step(batch):
        x, y = batch
        noise = generator.normal(0, 0.1, (len(x), 4)).astype(np.float32)
        return update(optimizer, F.cross_entropy(model(x) + torch.from_numpy(noise), y))

    return Loop(step, model, optimizer, batches, lambda: {"generator": generator})


@loop(word="numpy array")
def item_of_an_array_read_beside_its_rows(model, optimizer, batches) -> Loop:
    def step(batch):
        x, y = batch
        rows = np.random.permutation(len(x))  # noqa: NPY002
        return update(optimizer, F.cross_entropy(model(x[rows]), y[rows]) * (1 + rows[0]))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def draws_kept_and_returned(model, optimizer, batches) -> Loop:
    generator, kept = np.random.default_rng(4), []

    def step(batch):
        x, y = batch
        out = model(x)
        share, kind = random.random(), generator.integers(0, 2)
        kept.append(share)
        return update(optimizer, F.cross_entropy(out, y) * share * (1 + kind)), share, kind

    return Loop(step, model, optimizer, batches, lambda: {"generator": generator, "kept": list(kept)})


@loop()
def draws_in_one_branch_and_for_each_element(model, optimizer, batches) -> Loop:
    """Neither is made once in each step: a draw of an ``if`` expression, and those of a comprehension."""
    batches[4] = tuple(each[:4] for each in batches[4])

    def step(batch):
        x, y = batch
        losses = F.cross_entropy(model(x) * (2.0 if len(x) > 4 else random.random()), y, reduction="none")
        return update(optimizer, (losses * torch.tensor([random.random() for _ in range(len(x))])).mean())

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def function_of_the_module_exchanged_later(model, optimizer, batches) -> Loop:
    real = random.random

    def step(batch):
        out = model(batch[0])
        return update(optimizer, random.random() * F.cross_entropy(out, batch[1]))

    def after(n, _):
        if n in (CHANGE, CHANGE + 20):
            random.random = real if n > CHANGE else lambda: 0.25

    return Loop(step, model, optimizer, batches, after=after)


@loop(planned=True)
def starts_chosen_by_arrays_in_a_helper(model, optimizer, batches) -> Loop:
    """As in the demonstration of neural differential equations. The weights of the choice change once."""
    shares = np.full(6, 1 / 6)

    def starts():
        return torch.from_numpy(np.random.choice(np.arange(6, dtype=np.int64), 4, replace=False, p=shares))  # noqa: NPY002

    def step(batch):
        out = model(batch[0])
        rows = starts()
        return update(optimizer, F.cross_entropy(out[rows], batch[1][rows]))

    def after(n, _):
        if n == CHANGE // 2:
            shares[:3] *= 1.5
            shares[3:] *= 0.5

    return Loop(step, model, optimizer, batches, after=after)


@loop(planned=True)
def rows_in_a_class_made_by_each_step(model, optimizer, batches) -> Loop:
    """The function that makes the class looks at the globals of its caller."""

    def step(batch):
        rows = np.random.randint(0, 6, size=4)  # noqa: NPY002
        chosen = collections.namedtuple("Chosen", "x y")(batch[0][rows], batch[1][rows])
        return update(optimizer, F.cross_entropy(model(chosen.x), chosen.y))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def pool_of_states_at_drawn_rows() -> Loop:
    """As a cellular automaton is trained: rows that numpy draws behind an op are kept, and written back at the end."""
    rule = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    optimizer = torch.optim.Adam(rule.parameters(), lr=0.01)
    pool, target = torch.randn(12, 4, 5, 5), torch.rand(4, 5, 5)
    losses, visits = [], np.zeros(12, dtype=np.int64)

    def step(seed):
        with torch.no_grad():
            begin = seed.clamp(0, 1)
            rows = np.random.choice(len(pool), 4, replace=False)  # noqa: NPY002  # as people write
            state = pool[rows]
            state[:1] = begin
        for _ in range(2):
            state = state + rule(state) * (torch.rand(4, 1, 5, 5) < 0.5)
        optimizer.zero_grad()
        loss = F.mse_loss(state, target.expand_as(state))
        loss.backward()
        optimizer.step()
        pool[rows] = state.detach()
        visits[rows] += 1
        losses.append(loss.item())
        if len(losses) % 10 == 0:
            print(f"{sum(losses[-10:]) / 10:.4f}", rows)

    return Loop(step, rule, optimizer, lambda n: torch.ones(4, 5, 5) * (n % 3), lambda: {"p": pool, "v": visits})
