"""Loops whose batches hold text: names of files and of records, most of which no step looks at."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from loops.loop import Loop, loop, task, train, update

_NUM_BATCHES = 40


def _name(n: int) -> str:
    return f"image_{n % _NUM_BATCHES}_{'flip' if n % 13 == 12 else 'plain'}.png"


@loop(planned=True)
def files_of_a_batch(model, optimizer, batches) -> Loop:
    def step(batch):
        return update(optimizer, F.cross_entropy(model(batch["x"]), batch["y"]))

    def batch(n):
        x, y = batches[n % 10]
        return {"x": x, "y": y, "files": [f"{n}_{row}.png" for row in range(len(x))], "set": "train"}

    return Loop(step, model, optimizer, batch)


@loop(planned=True)
def input_set_before_it_is_trained_on(model, optimizer, batches) -> Loop:
    class Trainer:
        paths: Any = None

        def set_input(self, batch):
            self.x, self.y, self.paths = batch["x"], batch["y"], batch["paths"]

        def optimize(self):
            self.loss = train(model, optimizer, (self.x, self.y))

    trainer = Trainer()

    def step(batch):
        trainer.set_input(batch)
        trainer.optimize()

    def batch(n):
        x, y = batches[n % 10]
        return {"x": x, "y": y, "paths": [_name(n), _name(n + 1)]}

    return Loop(step, model, optimizer, batch, lambda: {"paths": trainer.paths})


@loop(planned=True)
def names_that_are_kept_returned_and_shown(model, optimizer, batches) -> Loop:
    names, last = [], {}

    def step(batch):
        x, y, name = batch
        loss = train(model, optimizer, (x, y))
        names.append(name)
        last["name"] = name
        print(f"{name}: {len(names)}")
        return name, loss

    return Loop(step, model, optimizer, lambda n: (*batches[n % 10], _name(n)), lambda: {"names": names, "last": last})


def _reads(look: Callable[[str], float]) -> Callable[..., Loop]:
    def made() -> Loop:
        model, optimizer, batches = task()

        def step(batch):
            x, y, name = batch
            return update(optimizer, look(name) * F.cross_entropy(model(x), y))

        return Loop(step, model, optimizer, lambda n: (*batches[n % 10], _name(n)))

    return made


_KNOWN = {_name(n): 1.0 + n / 10 for n in range(_NUM_BATCHES)}
_SOME = ",".join(_name(n) for n in range(0, _NUM_BATCHES, 3))
# Uses of a name on the way to a step's loss, by its methods and without.
LOOKS: dict[str, Callable[[str], float]] = {
    "end": lambda name: 2.0 if name.endswith("flip.png") else 1.0,
    "key": lambda name: _KNOWN[name],
    "member": lambda name: 1.0 + (name in _KNOWN),
    "within a text": lambda name: 1.0 + (name in _SOME),
    "holds a text": lambda name: 1.0 + ("flip" in name),
    "equal": lambda name: 1.0 + (name == "image_12_flip.png"),
    "smaller": lambda name: 1.0 + (name < "image_2"),
    "length": lambda name: len(name) / 10,
    "joined": lambda name: len(",".join([name, "x"])) / 10,
    "formatted": lambda name: len(f"{name:>3}") / 10,
    "by percent": lambda name: len("%s" % name) / 10,  # noqa: UP031
    "added": lambda name: len("a" + name) / 10,
    "of a character": lambda name: ord(name[6]) / 50,
    "encoded": lambda name: zlib.crc32(name.encode()) / 2**32,
    "as bytes": lambda name: len(bytes(name, "utf8")) / 10,
    "searched": lambda name: 1.0 + bool(re.search("flip", name)),
    "split as a path": lambda name: len(os.path.splitext(name)[0]) / 10,
    "digits": lambda name: int(re.sub(r"\D", "", name)) / 40,
    "start of another": lambda name: 1.0 + "image_12_flip.png.bak".startswith(name),
    "index": lambda name: name.index("_p" if "plain" in name else "_f") / 10,
    "sorted": lambda name: 1.0 + (sorted([name, "image_2"])[0] == name),
}
for _look in LOOKS:
    _made = _reads(LOOKS[_look])
    _made.__name__ = f"a name read by {_look}".replace(" ", "_")
    loop()(_made)
