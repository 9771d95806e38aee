"""Lanes and processes: the interpreter ends while lanes are parked, a fork gets lanes of its own, builds end early."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import forked
import hocket
from execution.probe import KINDS
from hocket.ir import Machine
from hocket.native import available
from quick import covering

SECONDS = 120  # far more than any of this takes: only a process that hangs gets there

TRAINED = """
    import os, signal, sys
    import torch
    from torch import nn
    import hocket
    from hocket.tracing import capture
    from hocket.execution import executor
    from hocket.ir import Lane, Plan

    torch.set_num_threads({threads})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear({width}, {width}), nn.Tanh(), nn.Linear({width}, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    batch = torch.randn({rows}, {width})

    def on_both_sides(run):
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a child that hangs ends by itself
        sys.stdout.write(("parent " if child else "child ") + str(run()) + "\\n")  # in one piece
        sys.stdout.flush()
        if child == 0:
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.exit(status)
"""
SMALL, LARGE = {"width": 4, "rows": 3}, {"width": 300, "rows": 300}

EXECUTED = """
    step(batch)
    captured = capture(step, model, optimizer, batch)
    order = captured.graph.order
    plan = Plan((Lane("even", order[::2]), Lane("odd", order[1::2])))
    planned = executor(captured, plan, kind=sys.argv[1])
"""
BEGIN = TRAINED.format(threads=1, **SMALL) + EXECUTED

# Ops that really run on two threads, and a schedule that runs its plan whatever it costs.
SCHEDULED = (
    TRAINED.format(threads=2, **LARGE)
    + """
    one = hocket.Machine.of(cores=1)
    # On some processors products of 300 rows have other bits on two threads.
    fast = hocket.schedule(
        step, model, optimizer, guard=False, numerics="rounding", executor=sys.argv[1], planner="serial", machine=one
    )

    def decide():
        for number in range(200):
            fast(batch)
            if fast.decided:
                return fast.verdict
"""
)


def run(kind: str, script: str, begin: str = BEGIN, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = forked.run(textwrap.dedent(begin) + textwrap.dedent(script), kind, finalize=True)
    assert done.returncode == status, done.stderr
    return done


def check_said_the_same(done: subprocess.CompletedProcess[str]) -> None:
    """Parent and child went on from the same state."""
    child, parent = sorted(line.partition(" ") for line in done.stdout.splitlines())
    assert (child[0], parent[0]) == ("child", "parent")
    assert child[2] == parent[2]


def test_an_interpreter_that_was_started_anew_ends_while_lanes_wait():
    """All others are forked from one that has loaded torch, which takes seconds."""
    kind = "native" if available() else "python"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(BEGIN) + "print(planned(batch).item())", kind],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(hocket.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0
    assert not done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_that_outlive_all_modules_end_in_silence(kind):
    """Modules that are held beyond the interpreter's end have their globals set to None, those of `__main__` last."""
    done = run(
        kind,
        """
        import ctypes
        planned(batch)
        for module in (sys.modules["__main__"], sys.modules[type(planned).__module__]):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
        """,
    )
    assert not done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_the_interpreter_ends_after_a_step_that_failed(kind):
    done = run(kind, "planned(torch.randn(3, 5))", status=1)
    assert "in op '0/addmm' of layer '0' of the planned step" in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_gets_lanes_of_its_own_and_the_parents_go_on(kind):
    done = run(kind, "planned(batch); on_both_sides(lambda: [planned(batch).item() for _ in range(3)])")
    check_said_the_same(done)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_may_close_or_forget_lanes_that_stayed_behind(kind):
    run(
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


@pytest.mark.parametrize(("widths", "kind"), covering([pytest.param((2,)), pytest.param((2, 1))], KINDS))
def test_wide_ops_go_on_after_a_fork_where_openmp_would_wait_for_ever(kind, widths):
    lanes = ", ".join(f"Lane('x{n}', order[{n}::{len(widths)}], width={width})" for n, width in enumerate(widths))
    done = run(
        kind,
        f"""
        torch.set_num_threads(2)
        large = torch.randn(500, 500)
        for _ in range(3):
            large @ large, large.exp()  # a team of two on this thread, which a child does not have
        planned = executor(captured, Plan(({lanes},)), kind=sys.argv[1])
        planned(batch)
        on_both_sides(lambda: [planned(batch).item() for _ in range(3)])
        """,
        begin=TRAINED.format(threads=1, **LARGE) + EXECUTED,
    )
    check_said_the_same(done)


def test_widths_are_tried_after_a_fork_where_openmp_would_wait_for_ever():
    done = run(
        "python",
        """
        from hocket.profiling.exact_widths import ExactWidths
        captured = capture(step, model, optimizer, batch)
        before = ExactWidths(1).of(captured, (1, 2))  # with a team of two on this thread
        on_both_sides(lambda: ExactWidths(1).of(captured, (1, 2)) == before)
        """,
        begin=TRAINED.format(threads=1, **LARGE),
    )
    assert sorted(done.stdout.splitlines()) == ["child True", "parent True"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduled_step_goes_on_in_parent_and_child(kind):
    done = run(
        kind,
        """
        assert decide() == "planned"
        for _ in range(12):
            fast(batch)
        eager = []  # runs of the step itself

        def note(frame, event, arg):
            if event == "call" and frame.f_code is step.__code__:
                eager.append(frame)

        sys.setprofile(note)
        step(batch)
        assert len(eager) == 1

        def go_on():
            losses = [fast(batch).item() for _ in range(12)]
            assert len(eager) <= 2, "the plan runs, not the step; one step of these may be audited"
            return losses

        on_both_sides(go_on)
        """,
        begin=SCHEDULED,
    )
    check_said_the_same(done)


@pytest.mark.parametrize(
    ("calls", "kind"), covering([1, 4, 200, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 6, 8))], KINDS)
)
def test_the_interpreter_ends_wherever_a_schedule_is_in_its_life(kind, calls):
    done = run(
        kind,
        f"""
        for number in range({calls}):
            loss = fast(batch)
            if fast.decided:
                break
        print(loss.item())
        """,
        begin=SCHEDULED,
    )
    assert float(done.stdout) > 0
    assert not done.stderr


@pytest.mark.skipif(Machine.here().cores < 2, reason="needs two cores")
@pytest.mark.parametrize("kind", KINDS)
def test_cores_that_were_taken_from_the_process_are_refused_and_it_can_go_on_with_the_others(kind):
    done = run(
        kind,
        """
        from hocket.errors import ExecutionError, InputError
        from hocket.ir import Machine

        before = Machine.here()
        pinned = Plan((Lane("near", order[::2], cores=(0,)), Lane("gone", order[1::2], cores=(1,))))
        executor(captured, pinned, before, kind=sys.argv[1])(batch)
        os.sched_setaffinity(0, set(before.devices[0].cpus[0]))
        try:
            executor(captured, pinned, before, kind=sys.argv[1])
        except ExecutionError as error:
            print(error)
        import hocket
        options = {"guard": False, "executor": sys.argv[1]}
        try:
            hocket.schedule(step, model, optimizer, machine=before, **options)
        except InputError as error:
            print(error)
        fast = hocket.schedule(step, model, optimizer, **options)
        while not fast.decided:
            fast(batch)
        fast(batch)
        print(fast.verdict, fast.machine.cores, os.sched_getaffinity(0) == set(before.devices[0].cpus[0]))
        """,
    )
    first, second, third = done.stdout.splitlines()
    assert "lane 'gone' is pinned to CPUs" in first
    assert "which this process may not use" in first
    assert second.startswith("schedule: machine: device 'cpu0' has CPUs")
    assert third == "planned 1 True"


@pytest.mark.skipif(not available(), reason="native lanes cannot be built here")
def test_a_build_that_was_killed_does_not_stop_the_next_one():
    from hocket.native import load

    left_behind = Path(load().__file__).with_name("lock")
    left_behind.touch()
    try:
        done = run("native", "print('ready')")
    finally:
        left_behind.unlink(missing_ok=True)
    assert done.stdout == "ready\n", done.stderr
