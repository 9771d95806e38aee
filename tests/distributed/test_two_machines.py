"""The commands of docs/distributed.md, "Two machines", in two network namespaces that reach nothing else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.namespaces import linked, unavailable_reason

REASON = unavailable_reason()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

PAGE = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
SECTION = PAGE.partition("## Two machines")[2].partition("\n## ")[0]
TORCHRUN = re.findall(r"^    (torchrun .*)", SECTION, re.MULTILINE)
PLAIN = re.findall(r"^    (MASTER_ADDR=.*)", SECTION, re.MULTILINE)


@pytest.mark.parametrize("commands", [TORCHRUN, PLAIN], ids=["torchrun", "plain"])
@pytest.mark.parametrize("secrets", [("one", "one"), ("one", "other")], ids=["one-secret", "two-secrets"])
def test_two_machines_train_by_the_commands_of_the_page(commands, secrets):
    assert len(commands) == 2
    with linked(1000) as ends:
        processes = [
            subprocess.Popen(
                end.command("sh", "-c", f"exec env {_here(command, ends[0].address)} --steps 3 --timeout 60"),
                env=os.environ | {"HOCKET_JOB_SECRET": secret, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for end, command, secret in zip(ends, commands, secrets, strict=True)
        ]
        try:
            said = [process.communicate(timeout=120)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if secrets[0] == secrets[1]:
        assert [process.returncode for process in processes] == [0, 0], said
        assert "1 worker, 1 server, 3 steps" in said[0]
    else:
        assert all(process.returncode for process in processes), said
        assert "is signed with another HOCKET_JOB_SECRET" in "".join(said)


def _here(command: str, address: str) -> str:
    """The command with the address of the first namespace, and the programs of this Python."""
    modules = {"torchrun ": f"{sys.executable} -m torch.distributed.run ", " hocket ": f" {sys.executable} -m hocket "}
    text = command.replace("10.0.0.1", address)
    for name, run in modules.items():
        text = text if name == " hocket " and "-m hocket" in text else text.replace(name, run)
    return text
