"""Mutated decisions: each is ignored with one line, or met again. The step stays eager's, bit by bit, either way."""

import functools
import logging
import os
import random
import tempfile
from pathlib import Path

import pytest
import torch

import hocket
from support.mutations import mutated
from support.schedules import decide, twin

pytestmark = pytest.mark.usefixtures("one_core")

OPTIONS = {"planner": "serial", "guard": False}


@functools.cache
def decision(guard: bool) -> tuple[str, bytes]:
    """The name and the content of the file of a decision."""
    job, _ = twin()
    with tempfile.TemporaryDirectory() as folder:
        decide(hocket.schedule(job.step, job.model, job.optimizer, cache=folder, **{**OPTIONS, "guard": guard}), job)
        (file,) = Path(folder).glob("*.json")
        return file.name, file.read_bytes()


def made_in(folder, guard=False):
    name, content = decision(guard)
    (folder / name).write_bytes(content)
    return folder / name


def trained(folder, steps: int = 6, **options):
    """A schedule after some steps, each with eager's loss."""
    job, eager = twin()
    fast = hocket.schedule(job.step, job.model, job.optimizer, cache=folder, **{**OPTIONS, **options})
    for number in range(steps):
        assert torch.equal(fast(job.batch(number)), eager.step(eager.batch(number)))
    return fast


@pytest.mark.parametrize(
    ("number", "guard"),
    [(15, False), pytest.param(2000, False, marks=pytest.mark.slow), pytest.param(300, True, marks=pytest.mark.slow)],
)
def test_mutated_decisions_leave_the_step_as_it_is(tmp_path, caplog, number, guard):
    file = made_in(tmp_path, guard)
    sound = file.read_bytes()
    for case in range(number):
        file.write_bytes(mutated(sound, random.Random(case)))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            fast = trained(tmp_path, 40 if guard else 6, guard=guard)
        lines = [record.message for record in caplog.records if "hocket" in record.message]
        assert len(lines) <= 1, (case, lines)
        assert fast.decision.is_recalled or lines or guard, case
        for other in tmp_path.iterdir():
            if other != file:
                other.unlink()


def _pipe(file):
    file.unlink()
    os.mkfifo(file)


def _device(file):
    file.unlink()
    file.symlink_to("/dev/zero")


def _folder(file):
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        _pipe,
        _device,
        _folder,
        lambda file: file.write_text("[" * 100_000),
        lambda file: file.write_text('{"format": ' + "9" * 5000),
        lambda file: file.write_bytes(bytes(file.stat().st_size)),
        lambda file: file.write_text(file.read_text().replace('"eager_ms": [', '"eager_ms": [1.0, ')),
    ],
)
def test_a_damaged_decision_is_ignored_and_the_step_searched(tmp_path, caplog, damage):
    file = made_in(tmp_path)
    damage(file)
    job, _ = twin()
    fast = hocket.schedule(job.step, job.model, job.optimizer, cache=tmp_path, **OPTIONS)
    assert decide(fast, job) > 5
    assert fast.verdict == "planned"
    assert "a remembered decision is ignored" in caplog.text
