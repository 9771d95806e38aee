"""Limits of control groups of both versions, read below a root of the test's own, and of this process for once."""

import subprocess
import sys
from pathlib import Path

import pytest

from hocket.ir import limits, machine
from hocket.ir.limits import cpu_limit, free_bytes, memory_limit_bytes, usable_cpus
from hocket.ir.machine import Machine

MIB = 2**20
UNLIMITED = "9223372036854771712"


def tree(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{key}": files[key] for key in files}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


VERSION_2 = "0::/a/b"
VERSION_1 = "4:memory:/a/b\n2:cpu,cpuacct:/a/b\n1:name=systemd:/a/b\n0::/"
SLURM = "slurm/uid_1/job_2"


def files_2(group: str, cpu: str = "150000 100000", memory: str = str(512 * MIB)) -> dict[str, str]:
    return {f"{group}cpu.max": cpu, f"{group}memory.max": memory}


def files_1(group: str, quota: str = "150000", memory: str = str(512 * MIB), cpu: str = "cpu") -> dict[str, str]:
    return {
        f"{cpu}/{group}cpu.cfs_quota_us": quota,
        f"{cpu}/{group}cpu.cfs_period_us": "100000",
        f"memory/{group}memory.limit_in_bytes": memory,
    }


CASES = {
    "of the group": (VERSION_2, files_2("a/b/")),
    "of the group around it": (VERSION_2, {**files_2("a/b/", "max 100000", "max"), **files_2("a/")}),
    "the smaller ones": (VERSION_2, {**files_2("a/b/", "400000 100000"), **files_2("a/", "75000 50000", "999999999")}),
    "a container's own root": ("0::/", files_2("")),
    "the host's path in a container": ("0::/docker/1f", files_2("")),
    "a path above the root": ("0::/../x", files_2("")),
    "version 1": (VERSION_1, files_1("a/b/", cpu="cpu,cpuacct")),
    "Slurm's of version 1": (
        f"4:memory:/{SLURM}/step_0\n2:cpu:/{SLURM}/step_0",
        {**files_1(f"{SLURM}/"), **files_1(f"{SLURM}/step_0/", "-1", UNLIMITED)},
    ),
    "both versions mounted": (
        "4:memory:/x\n0::/a",
        {"unified/a/cpu.max": "150000 100000", "memory/x/memory.limit_in_bytes": str(512 * MIB)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_smallest_limit_on_the_way_up_counts(tmp_path, case):
    root = tree(tmp_path, *CASES[case])
    assert cpu_limit(root) == 1.5
    assert memory_limit_bytes(root) == 512 * MIB
    assert free_bytes(root) == 512 * MIB
    assert usable_cpus(root) == 1


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        (VERSION_2, files_2("a/b/", "max 100000", "max")),
        (VERSION_1, files_1("a/b/", "-1", UNLIMITED)),
        ("nonsense", files_2("")),
        (VERSION_2, {**files_2("a/b/", "rubbish", ""), **files_2("", "100 0", "-5")}),
    ],
)
def test_without_a_limit_there_is_none(tmp_path, groups, files):
    root = tree(tmp_path, groups, files)
    assert (cpu_limit(root), memory_limit_bytes(root), free_bytes(root)) == (None, None, None)


def test_where_there_are_no_groups_nothing_is_limited(tmp_path):
    assert (cpu_limit(tmp_path), memory_limit_bytes(tmp_path), free_bytes(tmp_path)) == (None, None, None)
    assert usable_cpus(tmp_path) == usable_cpus() or cpu_limit() is not None


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/a", {"a/memory.max": "1000", "a/memory.current": "900", "a/memory.stat": "anon 1\ninactive_file 300"}),
        (
            "4:memory:/a",
            {
                "memory/a/memory.limit_in_bytes": "1000",
                "memory/a/memory.usage_in_bytes": "900",
                "memory/a/memory.stat": "inactive_file 1\ntotal_inactive_file 300",
            },
        ),
    ],
)
def test_cached_pages_of_files_count_as_free(tmp_path, groups, files):
    assert free_bytes(tree(tmp_path, groups, files)) == 400


@pytest.mark.parametrize(("cpus", "cores", "smt"), [(1, 1, 1), (3, 3, 1), (4, 4, 1), (6, 4, 1), (8, 4, 2)])
def test_this_machine_has_as_many_cores_as_its_group_may_use(monkeypatch, cpus, cores, smt):
    monkeypatch.setattr(machine, "_cores_of", lambda allowed: tuple((n, n + 4) for n in range(4)))
    monkeypatch.setattr(machine, "_by_cache", lambda cores: [list(cores)])
    monkeypatch.setattr(machine, "usable_cpus", lambda: cpus)
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 512 * MIB)
    (device,) = Machine.here().devices
    assert (device.cores, device.smt, device.memory_bytes) == (cores, smt, 512 * MIB)
    # With fewer cores than the machine has, it may use any: another group's process would take the same ones.
    assert len(device.cpus) == (4 if cores == 4 and cpus > 4 else 0 if cores < 4 else 4)


def _limited(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_a_process_in_a_group_sees_its_limits(request):
    """A real group, where this process may make one."""
    base = Path("/sys/fs/cgroup")
    made = []
    request.addfinalizer(lambda: [folder.rmdir() for folder in made])
    name = f"hocket-test-{id(made)}"
    try:
        if (base / "cgroup.controllers").exists():
            made.append(_limited(base / name, {"cpu.max": "100000 100000", "memory.max": str(512 * MIB)}))
        else:
            made.append(_limited(base / "cpu" / name, {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"}))
            made.append(_limited(base / "memory" / name, {"memory.limit_in_bytes": str(512 * MIB)}))
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    code = f"""
import os
for folder in {[str(folder) for folder in made]}:
    open(folder + "/cgroup.procs", "w").write(str(os.getpid()))
from hocket.ir import Machine
from hocket.ir.limits import free_bytes
(device,) = Machine.here().devices
print(device.cores, device.cpus, device.memory_bytes, free_bytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    cores, cpus, memory, free = done.stdout.split()
    assert (cores, memory) == ("1", f"{512 * MIB}.0")
    assert cpus == "()" or limits.usable_cpus() == 1
    assert 0 < int(free) <= 512 * MIB
