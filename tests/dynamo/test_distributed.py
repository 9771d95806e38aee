"""Models that several ranks train: each ends, bit by bit, as with ``backend="eager"``."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore:::torch")
NUM_RANKS = 2


def _trained(kind: str, backend: str, folder: Path) -> list[dict[str, Any]]:
    file = folder / f"{kind}-{backend}"
    ranks = ["--standalone", f"--nproc-per-node={NUM_RANKS}", "-m", "dynamo.distributed", kind, backend, str(file)]
    paths = [str(Path(__file__).parents[1]), *sys.path]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *ranks],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(f"{file}.{rank}") for rank in range(NUM_RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_end_as_with_eager(kind: str, tmp_path: Path) -> None:
    expected, found = (_trained(kind, backend, tmp_path) for backend in ("eager", "hocket"))
    for rank in range(NUM_RANKS):
        assert found[rank]["losses"] == expected[rank]["losses"]
        assert all(map(torch.equal, found[rank]["state"], expected[rank]["state"]))
        assert "planned" in found[rank]["verdicts"]
        assert "plain" not in found[rank]["verdicts"]
        assert not expected[rank]["verdicts"]
