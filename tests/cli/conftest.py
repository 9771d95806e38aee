"""Commands are run in this process, in a folder of their own, on a step that takes a millisecond."""

import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from hocket import cli
from hocket.cli import main

TINY = ("mlp", "--set", "width=16", "--set", "depth=2", "--batch-size", "4")


@dataclass
class Outcome:
    status: int
    out: str
    err: str

    def fine(self) -> "Outcome":
        assert self.status == 0, self.err
        return self

    def refused(self, status: int, words: str) -> None:
        assert (self.status, self.out) == (status, "")
        assert words in self.error

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The last line of stderr, which is all of it unless argparse or a note said more."""
        assert "Traceback" not in self.err
        return self.err.splitlines()[-1]


def outcome_of(command, capsys, *words: object) -> Outcome:
    capsys.readouterr()
    status = command([str(word) for word in words])
    captured = capsys.readouterr()
    return Outcome(status, captured.out, captured.err)


@pytest.fixture
def hocket(capsys):
    return partial(outcome_of, main, capsys)


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    """An empty folder to work in, 80 columns, and everything that a command sets for its process put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PYTHONPATH", str(Path(cli.__file__).parents[2]))  # for the commands that run by themselves
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else None
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    if threads is not None:
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """Graph, costs, machine and plan of the tiny step, made by the commands themselves."""
    folder = tmp_path_factory.mktemp("made")
    before = os.environ.get("COLUMNS")
    paths = {name: folder / name for name in ("graph.json", "costs.json", "machine.json", "plan.txt")}
    graph, costs, machine, plan = (str(path) for path in paths.values())
    assert main(["profile", *TINY, "-o", costs, "--graph", graph, "--runs", "1", "--widths", "1"]) == 0
    assert main(["machine", "-o", machine]) == 0
    assert main(["plan", graph, costs, "--machine", machine, "-o", plan]) == 0
    assert os.environ.get("COLUMNS") == before
    return paths


@pytest.fixture
def made(made_once, tmp_path):
    """The same files, copied into the folder that the test works in; keys are the names without their endings."""
    for name, path in made_once.items():
        (tmp_path / name).write_bytes(path.read_bytes())
    return {Path(name).stem: Path(name) for name in made_once}


@pytest.fixture
def steps(tmp_path):
    """A file of jobs, as a user would write it."""
    (tmp_path / "sizes.py").write_text("WIDTH = 4\n")
    path = tmp_path / "train.py"
    path.write_text(STEPS)
    return path


def line_of(text: str) -> int:
    """Where `text` stands in the file of jobs."""
    return STEPS[: STEPS.index(text)].count("\n") + 1


STEPS = '''\
"""A user's file."""

import random

import torch

import hocket
from sizes import WIDTH

print("importing")


def linear():
    model = torch.nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        inputs, targets = batch
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    return hocket.Job(step, model, optimizer, [(torch.randn(8, WIDTH), torch.randn(8, 1))])


def uneven():
    job = linear()
    batches = [(torch.randn(size, WIDTH), torch.randn(size, 1)) for size in (8, 8, 3)]
    return hocket.Job(job.step, job.model, job.optimizer, batches)


def instead(step):
    job = linear()
    return hocket.Job(lambda batch: step(job, batch), job.model, job.optimizer, job.batches)


def printing():
    def step(job, batch):
        job.step(batch)
        _ = print("stepping")  # whose result is used
        return job.step(batch)

    return instead(step)


def drawing():
    def step(job, batch):
        weight = random.random()
        print("stepping")
        return job.step((batch[0] * weight, batch[1]))

    return instead(step)


def branching():
    def step(job, batch):
        loss = job.step(batch)
        return job.step(batch) if int(loss.item()) < 1e9 else loss

    return instead(step)


def counting():
    state = {"step": 0}

    def step(job, batch):
        state["step"] += 1
        loss = job.step(batch)
        return loss if state["step"] % 3 else 2 * loss.detach()

    return instead(step)


def failing():
    def step(job, batch):
        raise ValueError("a batch\\n   gone bad")

    return instead(step)


def interrupted():
    def step(job, batch):
        raise KeyboardInterrupt

    return instead(step)


def raising():
    return 1 / 0


def leaving():
    raise SystemExit(3)


def refused():
    job = linear()
    return hocket.Job(job.step, job.model, job.optimizer, [])


def nothing():
    pass


def needing(width, *rest, depth=1):
    pass


async def later():
    pass


NUMBER = 3
'''
