"""A plan of another machine is refused before anything runs, with the reason."""

import pytest

from execution.probe import KINDS, captured_job, probing_job, spread
from hocket.errors import ExecutionError
from hocket.execution import executor
from hocket.ir import Device, Lane, Machine
from hocket.profiling import profile
from hocket.session import Schedule
from support.refusals import fails, refused

HERE = Machine.here()
MANY = HERE.cores + 1


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (Device("big", cores=MANY), f"'big' has {MANY} cores, and this process may use {HERE.cores}"),
        (Device("far", cores=1, cpus=((9999,),)), "'far' has CPUs 9999, which this process may not use"),
        (Device("smt", cores=1, smt=20, cpus=(tuple(range(9000, 9020)),)), r"CPUs 9000, .*, 9007, \.\.\., which"),
    ],
)
def test_what_this_process_lacks_is_named(device, words):
    job = probing_job(2)
    machine = Machine((device,))
    refused(f"schedule: machine: device .*{words}", Schedule, job.step, job.model, job.optimizer, machine=machine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_for_a_machine_with_more_cores_is_not_run(kind):
    captured = captured_job(probing_job(2))
    plan = spread(captured, Lane("first", cores=(0,)), Lane("last", cores=(MANY - 1,)))
    with pytest.raises(ExecutionError, match=f"lane 'first': device 'cpu0' has {MANY} cores.* can be simulated"):
        executor(captured, plan, Machine.of(cores=MANY), kind=kind)
    with pytest.raises(ExecutionError, match="lane 'first' runs on device 'cpu0'; the machine has only cpu7"):
        executor(captured, plan, Machine((Device("cpu7", cores=1),)), kind=kind)


def test_profiling_is_refused_at_widths_beyond_the_cores_and_for_another_machine():
    captured = captured_job(probing_job(2))
    refused(rf"widths between 1 and the machine's {HERE.cores} cores, got \[{MANY}\]", profile, captured, widths=[MANY])
    fails(ExecutionError, f"device 'cpu0' has {MANY} cores", profile, captured, machine=Machine.of(cores=MANY))
