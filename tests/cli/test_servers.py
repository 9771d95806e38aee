"""`hocket ps`: real ranks, started by torchrun; and `hocket agent` beside them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from cli.conftest import TINY
from distributed.ranks import listening
from hocket.cli import ranks


def ran(*words, **settings):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "hocket", "ps", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment | settings, check=False)


def test_it_trains_and_writes_a_checkpoint_of_the_plain_model(tmp_path):
    path = tmp_path / "checkpoint.pt"
    outcome = ran(
        *TINY, "-w", "1", "-s", "1", "--order", "reverse", "--steps", "4", "--format", "json", "-o", str(path)
    )
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert (found["workers"], found["servers"], found["steps"], found["steps_in_order"]) == (1, 1, 4, 4)
    assert found["planner"] == "transfers-reverse"
    states = torch.load(path, weights_only=True)
    assert set(found["order"]["server0"]) == set(states["model"][0])


def test_ranks_of_the_command_find_no_modules_in_the_folder():
    Path("statistics.py").write_text("raise SystemExit('the statistics of the user')")
    command = [str(Path(sys.executable).with_name("hocket")), "ps", *TINY, "-w", "1", "-s", "1", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_while_ranks_start_is_one_line():
    command = [sys.executable, "-m", "hocket", "ps", *TINY, "--steps", "1000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(started := children.read_text().split()) < 3:
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.3)  # they import, and would say where
    for rank in started:
        ignored = Path(f"/proc/{rank}/status").read_text().partition("SigIgn:")[2].split()[0]
        assert int(ignored, 16) & 1 << signal.SIGINT - 1
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "hocket: interrupted\n"
    assert process.returncode == 130


def test_ranks_that_do_not_fit_are_a_usage_error():
    started = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    outcome = ran(*TINY, "-w", "2", "-s", "1", **started)
    assert outcome.returncode == 2
    assert "torchrun has started 2 ranks; 2 workers and 1 servers need 3" in outcome.stderr


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("RANK", "x", "RANK: expected a whole number in the environment, got 'x'"),
        ("RANK", "3", "RANK: expected one below WORLD_SIZE=3, got 3"),
        ("MASTER_PORT", "", "MASTER_PORT: expected a whole number in the environment, got ''"),
    ],
)
@pytest.mark.parametrize("words", [("ps", *TINY), ("run", *TINY, "--ranks", "3")])
def test_variables_of_ranks_that_make_no_sense_are_a_usage_error(hocket, monkeypatch, words, name, value, error):
    for each, given in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(each, given)
    monkeypatch.setenv(name, value)
    found = hocket(*words)
    assert (found.status, found.error) == (2, f"hocket: error: {error}")


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_is_above_zero(hocket, value):
    found = hocket("ps", *TINY, f"--timeout={value}")
    found.refused(2, "--timeout: expected a number of seconds above 0")


def test_more_servers_than_parameters_are_refused_before_they_start(hocket):
    found = hocket("ps", *TINY, "-s", "7")
    assert (found.status, found.error) == (2, "hocket: error: --servers: mlp has 6 parameters for 7 servers")


def test_an_output_is_looked_at_before_ranks_start(hocket, monkeypatch, tmp_path):
    monkeypatch.setattr(ranks.subprocess, "Popen", None)
    found = hocket("ps", *TINY, "-o", tmp_path / "none" / "checkpoint.pt")
    found.refused(1, "there is no directory")


@pytest.mark.parametrize("may_fail", [(), (1,)])
def test_a_rank_that_fails_ends_the_others_unless_they_go_on_without_it(monkeypatch, may_fail):
    monkeypatch.setattr(ranks, "_GRACE_S", 0.0)
    processes = [subprocess.Popen(["sleep", "0.5"]), subprocess.Popen("false")]
    needed = [rank for rank in (0, 1) if rank not in may_fail]
    assert ranks._wait(processes, needed) == (None if may_fail else (1, 1))
    assert processes[1].poll() == 1
    assert (processes[0].poll() == 0) == bool(may_fail)
    processes[0].wait()


def test_a_rank_ends_with_the_process_that_started_it():
    reading, writing = os.pipe()
    if os.fork() == 0:
        subprocess.Popen(["sleep", "60"], pass_fds=(writing,), preexec_fn=ranks._end_with_parent)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as end:
        assert end.read() == b""  # once the last process that might write is gone
    os.wait()


@pytest.mark.slow
def test_an_agent_runs_on_what_a_job_publishes():
    words = [sys.executable, "-m", "hocket"]
    job = subprocess.Popen(
        [*words, "ps", *TINY, "-w", "1", "-s", "1", "--steps", "1000000", "--publish-every", "2", "--timeout", "5"],
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert job.stderr is not None
        said = next(line for line in job.stderr if "hocket agent" in line)
        command = [*words, "agent", *TINY, said.split()[-1], "--calls", "200", "--format", "json"]
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        for process in _below(job.pid):
            os.kill(process, signal.SIGKILL)
        job.kill()
        job.communicate()
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert found["calls"] == 200
    assert found["versions"] == sorted(found["versions"])
    assert len(set(found["versions"])) > 1
    assert all(version % 2 == 0 for version in found["versions"])


KILLED_IN_MIDDLE = """
import os, signal, time
from pathlib import Path
import torch
import hocket

killed, again = Path(__file__).with_name("killed"), Path(__file__).with_name("again")


class Batches:
    def __len__(self):
        return 1000

    def __getitem__(self, place):
        if place > 40:
            if os.environ["RANK"] == "0" and not again.exists():
                time.sleep(0.2)
            elif os.environ["RANK"] == "1" and killed.exists():
                again.touch()
            elif os.environ["RANK"] == "1":
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((4, 8), float(place)).div(1000)


def make():
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return hocket.Job(step, model, optimizer, Batches(), name="killed")
"""


@pytest.mark.slow
def test_with_a_torchrun_each_survivors_go_on_and_one_that_is_started_again_joins(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED_IN_MIDDLE)
    store = TCPStore("127.0.0.1", 0, None, is_master=True)  # a port that is free
    port = store.port
    del store
    words = ["-m", "hocket", "ps", f"{tmp_path / 'killed.py'}:make", "-w", "2", "-s", "1", "--survive"]
    words += ["--steps", "600", "--timeout", "60", "--format", "json"]

    def agent(node):
        started = ["--nnodes", "3", "--node-rank", str(node), "--nproc-per-node", "1"]
        started += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        command = [sys.executable, "-m", "torch.distributed.run", *started, *words]
        ends = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE if node == 2 else subprocess.DEVNULL}
        return subprocess.Popen(command, text=True, **ends)

    agents = [agent(node) for node in range(3)]
    late = threading.Timer(200, lambda: [each.kill() for each in agents])
    late.start()
    try:
        agents[1].communicate()
        assert agents[1].returncode == 1
        agents[1] = agent(1)
        found = json.loads(agents[0].communicate()[0])
        assert [each.wait() for each in agents] == [0, 0, 0]
        said = [line for line in agents[2].stderr if line.startswith("hocket: ")]
    finally:
        late.cancel()
        for each in agents:
            each.kill()
            with each:  # closes its pipes
                pass
    assert found["steps"] == 600
    assert said[0].startswith("hocket: server 0 (rank 2) lost worker 1 (rank 1)")
    assert said[1].startswith("hocket: worker 1 (rank 1) takes part again, after ")


@pytest.mark.slow
def test_processes_and_ports_are_gone_after_a_fault(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED_IN_MIDDLE)
    words = ["ps", f"{tmp_path / 'killed.py'}:make", "-w", "2", "-s", "1", "--steps", "600", "--timeout", "20"]
    job = subprocess.Popen([sys.executable, "-m", "hocket", *words], stderr=subprocess.PIPE, text=True)
    seen: set[int] = set()
    ports: set[str] = set()
    try:
        while not (tmp_path / "killed").exists():
            assert job.poll() is None
            there = _below(job.pid)
            ports.update(*(listening(process) for process in there))
            seen.update(there)
            time.sleep(0.02)
        said = job.communicate(timeout=120)[1]
    finally:
        for process in _below(job.pid) if job.poll() is None else ():
            os.kill(process, signal.SIGKILL)
        job.kill()
        with job:  # closes its pipes
            pass
    assert job.returncode == 1
    assert "rank 1 was ended by SIGKILL" in said
    assert len(seen) >= 3
    assert len(ports) >= 3
    assert not [process for process in seen if Path(f"/proc/{process}").exists()]
    assert not ports & listening(None)


def _below(process: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    try:
        children = [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:  # it has ended meanwhile
        return []
    return [each for child in children for each in (*_below(child), child)]
