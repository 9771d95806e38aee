"""`hocket ps`: real ranks, started by torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from cli.conftest import TINY


def ran(*words, **settings):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "hocket", "ps", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment | settings, check=False)


def test_it_trains_and_writes_a_checkpoint_of_the_plain_model(tmp_path):
    path = tmp_path / "checkpoint.pt"
    outcome = ran(
        *TINY, "-w", "2", "-s", "1", "--order", "reverse", "--steps", "4", "--format", "json", "-o", str(path)
    )
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert (found["workers"], found["servers"], found["steps"], found["steps_in_order"]) == (2, 1, 4, 4)
    assert found["planner"] == "transfers-reverse"
    states = torch.load(path, weights_only=True)
    assert set(found["order"]["server0"]) == set(states["model"][0])


def test_ranks_that_do_not_fit_are_a_usage_error():
    started = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    outcome = ran(*TINY, "-w", "2", "-s", "1", **started)
    assert outcome.returncode == 2
    assert "torchrun has started 2 ranks; 2 workers and 1 servers need 3" in outcome.stderr
