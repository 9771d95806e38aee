"""Limits of the control group of this process, such as those of a container, a Slurm job or a systemd unit.

A group may use at most what each group around it may use. Version 2 has one hierarchy, version 1 one for each
controller (https://docs.kernel.org/admin-guide/cgroup-v2.html, .../cgroup-v1). On other systems nothing is limited.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def usable_cpus(root: Path = _ROOT) -> int:
    """The number of hardware threads that this process can keep busy: of its affinity mask, within its limit."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cpu_limit(root)
    return cpus if limit is None else max(1, min(cpus, int(limit)))


def cpu_limit(root: Path = _ROOT) -> float | None:
    """Processor time per time that the group may use, such as 1.5 for one and a half CPUs, or None if unlimited."""
    found = []
    for folder in _groups("cpu", root):
        words = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def memory_limit_bytes(root: Path = _ROOT) -> int | None:
    """The memory that the group may use, or None if unlimited."""
    return min((limit for _, limit in _memory_limits(root)), default=None)


def free_bytes(root: Path = _ROOT) -> int | None:
    """The memory that the group may still use, or None if unlimited. Cached pages of files count as free."""
    found = []
    for folder, limit in _memory_limits(root):
        used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
        words = _words(folder / "memory.stat")
        fields = dict(zip(words[::2], words[1::2], strict=False))
        cached = fields.get("total_inactive_file", fields.get("inactive_file", "0"))
        found.append(max(0, limit - int(used[0] if used else 0) + int(cached)))
    return min(found, default=None)


def _memory_limits(root: Path) -> Iterator[tuple[Path, int]]:
    for folder in _groups("memory", root):
        words = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        # Version 1 writes a number next to 2^63 where there is no limit.
        if words and words[0].isdecimal() and int(words[0]) < 2**62:
            yield folder, int(words[0])


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folder of the group for this controller, and those of the groups around it."""
    mounted = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        number, _, rest = line.partition(":")
        names, _, group = rest.partition(":")
        if number == "0" and not names:
            places = [mounted, mounted / "unified"]
        elif controller in names.split(","):
            places = [mounted / controller, mounted / names]
        else:
            continue
        for place in places:
            # A container may see the root of its own groups alone, and get the path of the host.
            inner = place / group.lstrip("/")
            inner = inner if inner.is_dir() and ".." not in inner.parts else place
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(place))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except (OSError, UnicodeDecodeError):
        return []


def processor_name() -> str:
    """Return the model of the processor, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
