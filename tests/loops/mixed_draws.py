"""Loops whose step draws in ways that change the order of its draws, or what they draw from, as the step goes on."""

from __future__ import annotations

import copy
import functools
import random
import threading

import numpy as np
import torch.nn.functional as F

from loops.loop import CHANGE, Loop, loop, task, update


def _loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@loop(word="random")
def shuffle_in_front_of_a_draw(model, optimizer, batches) -> Loop:
    def order(count):
        found = list(range(count))
        random.shuffle(found)
        return found

    def step(batch):
        loss = _loss(model, batch)
        first = order(6)[0]
        return update(optimizer, loss * random.random() + 0.1 * first * model(batch[0]).mean())

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def choice_from_a_list_turned_meanwhile(model, optimizer, batches) -> Loop:
    weights = [1.0, 2.0, 3.0]

    def step(batch):
        loss = _loss(model, batch)
        weights.reverse()
        chosen = random.choice(weights)
        weights.reverse()
        return update(optimizer, loss * chosen)

    return Loop(step, model, optimizer, batches, lambda: {"weights": weights})


@loop(word="numpy.random")
def seeded_in_some_steps(model, optimizer, batches) -> Loop:
    counted = {"steps": 0}

    def step(batch):
        loss = _loss(model, batch)
        counted["steps"] += 1
        if counted["steps"] % 10 == 9:
            np.random.seed(counted["steps"])  # noqa: NPY002  # as people write
        return update(optimizer, loss * np.random.random())  # noqa: NPY002

    return Loop(step, model, optimizer, batches, lambda: dict(counted))


@loop(word="a Generator")
def choice_from_a_list_that_turns(model, optimizer, batches) -> Loop:
    generator, weights = np.random.default_rng(2), [1.0, 2.0, 3.0]

    def step(batch):
        loss = _loss(model, batch)
        weights.append(weights.pop(0))
        return update(optimizer, loss * generator.choice(weights))

    return Loop(step, model, optimizer, batches, lambda: {"generator": generator, "weights": weights})


@loop(planned=True)
def methods_bound_before(model, optimizer, batches) -> Loop:
    uniform, draws = random.uniform, [random.gauss, random.random]

    def step(batch):
        loss = _loss(model, batch)
        return update(optimizer, loss * (uniform(0, 1) + 0.1 * draws[0](0, 1) - draws[1]() + 2 * random.random()))

    return Loop(step, model, optimizer, batches)


@loop(word="random")
def state_put_back_inside(model, optimizer, batches) -> Loop:
    def step(batch):
        loss = _loss(model, batch)
        state = random.getstate()
        first = random.random()
        random.setstate(state)
        return update(optimizer, loss * (first + random.random()))

    return Loop(step, model, optimizer, batches)


class _Noise:
    __slots__ = ("generator",)

    def __init__(self, generator):
        self.generator = generator

    @property
    def level(self):
        return self.generator.normal()


@loop(planned=True)
def generator_held_at_three_places(model, optimizer, batches) -> Loop:
    generator = np.random.default_rng(3)
    noise, held = _Noise(generator), [generator, np.random.RandomState(4)]

    def step(batch):
        loss = _loss(model, batch)
        return update(optimizer, loss * (noise.level + 2 * generator.random() + held[0].random() + held[1].rand()))

    return Loop(step, model, optimizer, batches, lambda: {"generator": generator, "other": held[1].get_state()[2]})


@loop(word="random")
def default_and_partial(model, optimizer, batches) -> Loop:
    """No place in which another function could stand."""
    uniform = functools.partial(random.uniform, 0, 1)

    def noise(draw=random.random):
        return draw() - uniform()

    def step(batch):
        loss = _loss(model, batch)
        return update(optimizer, loss * (noise() + 2 * random.random()))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def list_grown_by_another_name(model, optimizer, batches) -> Loop:
    weights = [0.5, 1.0, 2.0]

    def step(batch):
        again = weights
        again += [3.0]
        chosen = random.choice(weights)
        again.pop()
        return update(optimizer, chosen * _loss(model, batch))

    return Loop(step, model, optimizer, batches, lambda: {"weights": weights})


class _Rows:
    """A data set that draws, and counts."""

    def __init__(self, batches):
        self.batches, self.count = batches, 0

    def __getitem__(self, place):
        self.count += 1
        x, y = self.batches[place]
        return x * random.random(), y


@loop(planned=True)
def data_set_that_draws(model, optimizer, batches) -> Loop:
    rows = _Rows(batches)

    def step(place):
        x, y = rows[place]
        share = random.random()
        return update(optimizer, share * _loss(model, (x, y)))

    return Loop(step, model, optimizer, lambda n: n % 10, lambda: {"count": rows.count})


@loop(planned=True)
def property_and_operator_that_draw(model, optimizer, batches) -> Loop:
    class Drawn:
        def __get__(self, owner, kind=None):
            return random.random()

    class Level:
        drawn = Drawn()

        @property
        def scale(self):
            return random.random()

        def __mul__(self, other):
            return other * random.random()

        def __iter__(self):
            yield random.random()
            yield random.random()

    level = Level()

    def step(batch):
        scale = level.scale + 5 * level.drawn
        moved = level * 2.0
        first, second = level
        share = random.random()
        return update(optimizer, (share + 3 * scale - moved + first / 2 - second / 3) * _loss(model, batch))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def assertion_before_a_draw(model, optimizer, batches) -> Loop:
    bad = (batches[0][0][:2], batches[0][1])

    def step(batch):
        x, y = batch
        assert len(x) == len(y), "a label for each row"
        share = random.random()
        return update(optimizer, share * _loss(model, (x, y)))

    return Loop(step, model, optimizer, lambda n: bad if n in (8, 30, 90) else batches[n % 10])


@loop(planned=True)
def error_of_a_table_before_a_draw(model, optimizer, batches) -> Loop:
    table = {0: 1.0, 1: 2.0}

    def step(pair):
        place, batch = pair
        weight = table[place] * 1.5
        share = random.random()
        return update(optimizer, share * weight * _loss(model, batch))

    return Loop(step, model, optimizer, lambda n: (7 if n in (20, 90) else n % 2, batches[n % 10]))


@loop(planned=True)
def generator_exchanged_later(model, optimizer, batches) -> Loop:
    held = {"own": random.Random(3), "numpy": np.random.default_rng(5)}

    def noise():
        return held["own"].random() + held["numpy"].random()

    def step(batch):
        loss = _loss(model, batch)
        return update(optimizer, loss * noise())

    def after(n, _):
        if n == CHANGE:
            held.update(own=random.Random(9), numpy=np.random.default_rng(8))

    return Loop(step, model, optimizer, batches, lambda: dict(held), after=after)


@loop(planned=True)
def step_of_a_trainer_exchanged_later(model, optimizer, batches) -> Loop:
    class Trainer:
        def __init__(self):
            self.step = self.first

        def first(self, batch):
            share = random.random()
            return update(optimizer, share * _loss(model, batch))

        def second(self, batch):
            share = random.random()
            return update(optimizer, -0.5 * share * _loss(model, batch))

    trainer = Trainer()

    def after(n, _):
        if n == CHANGE:
            trainer.step = trainer.second

    return Loop(lambda batch: trainer.step(batch), model, optimizer, batches, after=after)


@loop(word="random")
def lists_told_apart_by_identity(model, optimizer, batches) -> Loop:
    buckets, hits = [[1.0], [2.0], [1.0]], [0, 0, 0]

    def step(batch):
        loss = _loss(model, batch)
        chosen = random.choice(buckets)
        hits[[each is chosen for each in buckets].index(True)] += 1
        return update(optimizer, loss * chosen[0])

    return Loop(step, model, optimizer, batches, lambda: {"hits": hits})


@loop(word="random")
def thread_that_draws_and_is_awaited(model, optimizer, batches) -> Loop:
    def step(batch):
        loss, found = _loss(model, batch), []
        thread = threading.Thread(target=lambda: found.append(random.random()))
        thread.start()
        thread.join()
        return update(optimizer, loss * (found[0] + 2 * random.random()))

    return Loop(step, model, optimizer, batches)


def _numbers_of_own(draw):
    """A step whose draws leave the generator in one state, and a loop that draws between its steps later."""
    model, optimizer, batches = task()
    seen = []

    def step(batch):
        loss = _loss(model, batch)
        return update(optimizer, loss * draw())

    def after(n, _):
        if n >= CHANGE:
            seen.append(random.random() + np.random.random())  # noqa: NPY002

    return Loop(step, model, optimizer, batches, lambda: {"seen": list(seen)}, after=after)


@loop(word="random")
def seed_that_each_step_repeats() -> Loop:
    def draw():
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002
        return random.random() - np.random.random()  # noqa: NPY002

    return _numbers_of_own(draw)


@loop(planned=True)
def seed_and_then_the_state_put_back() -> Loop:
    def draw():
        states = random.getstate(), np.random.get_state()  # noqa: NPY002
        random.seed(3)
        np.random.seed(4)  # noqa: NPY002
        drawn = random.random() - np.random.random()  # noqa: NPY002
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        return drawn

    return _numbers_of_own(draw)


@loop()
def generator_kept_and_copied_in_some_steps(model, optimizer, batches) -> Loop:
    """No stand-in of a generator is kept or copied."""
    held = {"steps": 0, "generator": np.random.default_rng(4), "again": None, "copy": None, "draw": None}

    def step(batch):
        loss = _loss(model, batch)
        held["steps"] += 1
        share = held["generator"].random()
        if held["steps"] == 20:
            held["again"], held["draw"] = held["generator"], random.random
        if held["steps"] == 60:
            held["copy"] = copy.deepcopy(held["generator"])
        return update(optimizer, loss * share * held["generator"].random() * random.random())

    def state():
        same = held["again"] in (None, held["generator"]), held["draw"] in (None, random.random)
        return {"steps": held["steps"], "generator": held["generator"], "copy": held["copy"], "same": same}

    return Loop(step, model, optimizer, batches, state)


@loop(word="a Generator")
def type_of_a_generator_asked(model, optimizer, batches) -> Loop:
    generator = np.random.default_rng(4)

    def step(batch):
        loss = _loss(model, batch)
        return update(optimizer, loss * (generator.random() if type(generator) is np.random.Generator else 5.0))

    return Loop(step, model, optimizer, batches, lambda: {"generator": generator})
