"""Lanes and processes: the interpreter ends while lanes are parked, a fork gets lanes of its own, builds end early."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import hocket
from execute.probe import KINDS
from hocket.execute.native import available

SECONDS = 120  # far more than any of this takes: only a process that hangs gets there

BEGIN = """
    import os, sys
    import torch
    from torch import nn
    from hocket.capture import capture
    from hocket.execute import executor
    from hocket.ir import Lane, Plan

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    batch = torch.randn(3, 4)
    step(batch)
    captured = capture(step, model, optimizer, batch)
    order = captured.graph.order
    plan = Plan((Lane("even", order[::2]), Lane("odd", order[1::2])))
    planned = executor(captured, plan, kind=sys.argv[1])
"""


def run(kind: str, script: str) -> subprocess.CompletedProcess:
    source = str(Path(hocket.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(BEGIN) + textwrap.dedent(script), kind],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "PYTHONPATH": source},
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_interpreter_ends_while_lanes_wait(kind):
    done = run(kind, "print(planned(batch).item())")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0
    assert not done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_the_interpreter_ends_after_a_step_that_failed(kind):
    done = run(kind, "planned(torch.randn(3, 5))")
    assert done.returncode == 1
    assert "in op '0/addmm' of layer '0' of the planned step" in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_gets_lanes_of_its_own_and_the_parents_go_on(kind):
    done = run(
        kind,
        """
        planned(batch)
        child = os.fork()
        losses = [planned(batch).item() for _ in range(3)]
        if child == 0:
            print("child", losses, flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print("parent", losses)
        sys.exit(status)
        """,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line.partition(" ") for line in done.stdout.splitlines())
    assert [line[0] for line in lines] == ["child", "parent"]
    assert lines[0][2] == lines[1][2], "both went on from the same state"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_may_close_or_forget_lanes_that_stayed_behind(kind):
    done = run(
        kind,
        """
        planned(batch)
        child = os.fork()
        if child == 0:
            planned.close()
            planned(batch)
            del planned
            os._exit(0)
        _, status = os.waitpid(child, 0)
        planned(batch)
        sys.exit(status)
        """,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not available(), reason="native lanes cannot be built here")
def test_a_build_that_was_killed_does_not_stop_the_next_one():
    from hocket.execute.native.build import load

    left_behind = Path(load().__file__).with_name("lock")
    left_behind.touch()
    try:
        done = run("native", "print('ready')")
    finally:
        left_behind.unlink(missing_ok=True)
    assert done.stdout == "ready\n", done.stderr
