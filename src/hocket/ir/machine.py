"""`Machine`: the devices that a plan runs on, and the links between them.

A device has cores (and the hardware threads that share one), or streams and their priority levels. A link has a
bandwidth and a latency. Rates are measured (`hocket.profile`) or published. A machine read from a file without them
can be planned for, but not estimated on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hocket.errors import FormatError, InputError
from hocket.ir._fields import Reader, load_document, read_from, require_finite, save_document
from hocket.ir.limits import memory_limit_bytes, usable_cpus
from hocket.ir.links import Link, NetworkCard, check_wires, read_card, read_link, wires_document

FORMAT = "hocket-machine/1"

# Planners and the simulator hold arrays of this many places. The largest machines have a fifth.
_MOST = {"cores": 4096, "smt": 64, "priorities": 64, "cores_per_cache": 4096}

_KNOWN = Path(__file__).parent / "machines"
_ALWAYS = (
    *("name", "kind", "cores", "smt", "flops_per_s", "bytes_per_s", "memory_bytes", "cpus", "priorities"),
    "smt_speedup",
)
_LAUNCHING = ("launch_us", "graph_launch_us", "event_us")


@dataclass(frozen=True)
class Device:
    """A CPU or a GPU.

    Attributes:
        name: unique in its machine, without white space.
        kind: ``cpu`` or ``cuda``.
        cores: physical cores of a CPU, or multiprocessors of a GPU.
        smt: hardware threads per core.
        cores_per_cache: neighbouring cores that share a last level of cache, 1 if each has one or all share one.
        flops_per_s: floating-point operations a second of all cores together, None if unknown.
        bytes_per_s: memory traffic a second of all cores together, None if unknown.
        memory_bytes: None if unknown.
        cpus: for each core the numbers of its hardware threads, as the operating system counts them. Empty for a device
            of another machine.
        priorities: number of stream priority levels, for a GPU.
        launch_us: time of the host thread to launch one op on a stream of this GPU.
        graph_launch_us: launch time for each op of a step that was captured as one CUDA graph.
        event_us: delay before an op starts after an op of another stream that it waits for.
        smt_speedup: throughput of all hardware threads of a core over that of one alone. Liu et al. (IPDPS 2019, Table
            III) measured 1.03 for two convolutions on all cores of a Xeon Phi.
    """

    name: str
    kind: str = "cpu"
    cores: int = 1
    smt: int = 1
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    memory_bytes: float | None = None
    cpus: tuple[tuple[int, ...], ...] = ()
    priorities: int = 1
    smt_speedup: float = 1.03
    launch_us: float = 0.0
    graph_launch_us: float = 0.0
    event_us: float = 0.0
    cores_per_cache: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "cpus", tuple(tuple(core) for core in self.cpus))


@dataclass(frozen=True)
class Machine:
    """Devices, the links between them, and the network cards that links share.

    A link may also name ends that are no devices of this machine (a parameter server elsewhere). `note` says where the
    figures come from.

    Example:
        >>> Machine.of(cores=68, smt=4).devices[0].cores
        68
    """

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    note: str = ""
    cards: tuple[NetworkCard, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        object.__setattr__(self, "links", tuple(self.links))
        object.__setattr__(self, "cards", tuple(self.cards))
        _check(self, "machine")

    @cached_property
    def by_name(self) -> dict[str, Device]:
        return {device.name: device for device in self.devices}

    @property
    def cores(self) -> int:
        """Cores of all CPU devices together."""
        return sum(device.cores for device in self.devices if device.kind == "cpu")

    def link(self, src: str, dst: str) -> Link:
        """The link from `src` to `dst`, or an `InputError` that names both."""
        for link in self.links:
            if (link.src, link.dst) == (src, dst):
                return link
        raise InputError(f"machine: no link from {src!r} to {dst!r}")

    def carries(self, link: Link, role: str) -> bool:
        """Return True if an op of this role may go over `link`.

        A link that only leads out of this machine's devices receives nothing, and one that only leads into them sends
        nothing.
        """
        comes, goes = link.dst in self.by_name, link.src in self.by_name
        return not (role == "recv" and goes and not comes) and not (role == "send" and comes and not goes)

    @staticmethod
    def of(*, cores: int, smt: int = 1, **device: float | None) -> Machine:
        """A machine of one CPU device ``cpu0``, with further keywords as fields of `Device`.

        Raises:
            InputError: `cores` or `smt` below 1, or an unknown field.
        """
        try:
            return Machine((Device("cpu0", cores=cores, smt=smt, **device),))  # type: ignore[arg-type]
        except TypeError as error:
            raise InputError(f"Machine.of: {error}") from None

    @staticmethod
    def here() -> Machine:
        """The CPU that this process may run on: the cores of its affinity mask, their hardware threads and caches.

        A control group may have a limit on processor time, as a container has. The device then has as many cores as
        the limit has whole CPUs, which are any of the machine's.
        """
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        caches = _by_cache(_cores_of(allowed))
        cores = tuple(core for cache in caches for core in cache)
        smt = max(len(core) for core in cores)
        device = Device("cpu0", cores=len(cores), smt=smt, memory_bytes=_memory_bytes(), cpus=cores)
        limit = usable_cpus()
        if limit < len(cores):
            return Machine((replace(device, cores=limit, smt=1, cpus=()),))
        if limit < sum(map(len, cores)):  # processor time is counted by hardware threads
            device = replace(device, smt=1, cpus=tuple(core[:1] for core in cores))
        # An affinity mask may leave caches with different numbers of cores, which one number cannot describe.
        sizes = {len(cache) for cache in caches}
        return Machine((replace(device, cores_per_cache=sizes.pop() if len(sizes) == 1 < len(caches) else 1),))

    @staticmethod
    def preset(name: str) -> Machine:
        """A machine with one GPU ``gpu0``, from published figures that its note names: p100, v100, a100, h100 or h200.

        Raises:
            InputError: there is no such file among those that come with Hocket.

        Example:
            >>> Machine.preset("p100").devices[0].cores
            56
        """
        path = _KNOWN / f"{name}.json"
        if name not in {known.stem for known in _KNOWN.glob("*.json")}:
            names = ", ".join(sorted(known.stem for known in _KNOWN.glob("*.json")))
            raise InputError(f"machine: expected one of {names}, got {name!r}")
        return Machine.load(path)

    def with_rates(self, device: str, *, flops_per_s: float, bytes_per_s: float) -> Machine:
        """This machine with the rates of one device filled in."""
        devices = tuple(
            replace(d, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s) if d.name == device else d
            for d in self.devices
        )
        return replace(self, devices=devices)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Machine:
        """Read a ``hocket-machine/1`` file."""
        reader = load_document(path, FORMAT)
        reader.only("format", "note", "devices", "links", "cards")
        devices = tuple(_read_device(element) for element in reader["devices"].elements())
        links = tuple(read_link(element) for element in reader.get("links", []).elements())
        cards = tuple(read_card(element) for element in reader.get("cards", []).elements())
        note = reader.get("note", "").text()
        with read_from(reader.source):
            return Machine(devices, links, note, cards)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``hocket-machine/1`` file that reads back to an equal machine."""
        save_document(path, self.document())

    def document(self) -> dict[str, Any]:
        """The content of a ``hocket-machine/1`` file of this machine."""
        devices = [
            {
                **{field: getattr(device, field) for field in _ALWAYS},
                "cpus": [list(core) for core in device.cpus],
                **{field: getattr(device, field) for field in _LAUNCHING if getattr(device, field)},
                **({"cores_per_cache": device.cores_per_cache} if device.cores_per_cache > 1 else {}),
            }
            for device in self.devices
        ]
        note = {"note": self.note} if self.note else {}
        return {"format": FORMAT, **note, "devices": devices, **wires_document(self.links, self.cards)}


def _read_device(reader: Reader) -> Device:
    reader.only(*_ALWAYS, "cores_per_cache", *_LAUNCHING)
    return Device(
        name=reader["name"].text(),
        kind=reader.get("kind", "cpu").text(),
        cores=reader.get("cores", 1).integer(1),
        smt=reader.get("smt", 1).integer(1),
        flops_per_s=reader.get("flops_per_s", None).optional_number(),
        bytes_per_s=reader.get("bytes_per_s", None).optional_number(),
        memory_bytes=reader.get("memory_bytes", None).optional_number(),
        cpus=tuple(tuple(cpu.integer() for cpu in core.elements()) for core in reader.get("cpus", []).elements()),
        priorities=reader.get("priorities", 1).integer(1),
        smt_speedup=reader.get("smt_speedup", Device.smt_speedup).number(),
        cores_per_cache=reader.get("cores_per_cache", 1).integer(1),
        **{field: reader.get(field, 0.0).duration_us() for field in _LAUNCHING},
    )


def _check(machine: Machine, source: str) -> None:
    if not machine.devices:
        raise FormatError(source, "devices", "expected at least one device")
    names: set[str] = set()
    for position, device in enumerate(machine.devices):
        where = f"devices[{position}]"
        if not device.name or any(character.isspace() or character in ":=" for character in device.name):
            raise FormatError(
                source, f"{where}.name", f"expected a name without white space, ':' and '=', got {device.name!r}"
            )
        if device.name.isdecimal():
            raise FormatError(source, f"{where}.name", f"a device may not be named like a width, got {device.name!r}")
        if device.name in names:
            raise FormatError(source, f"{where}.name", f"duplicate device name {device.name!r}")
        names.add(device.name)
        if device.kind not in ("cpu", "cuda"):
            raise FormatError(source, f"{where}.kind", f"expected cpu or cuda, got {device.kind!r}")
        for field, most in _MOST.items():
            if not 1 <= getattr(device, field) <= most:
                found = getattr(device, field)
                raise FormatError(source, f"{where}.{field}", f"expected at least 1 and at most {most}, got {found}")
        for field in ("flops_per_s", "bytes_per_s", "memory_bytes"):
            value = getattr(device, field)
            if value is not None:
                require_finite(value, source, f"{where}.{field}", positive=True)
        require_finite(device.smt_speedup, source, f"{where}.smt_speedup", positive=True)
        for field in _LAUNCHING:
            require_finite(getattr(device, field), source, f"{where}.{field}")
        if device.cpus and len(device.cpus) != device.cores:
            expected = f"one entry for each of {device.cores} cores, or none"
            raise FormatError(source, f"{where}.cpus", f"expected {expected}, got {len(device.cpus)}")
    check_wires(machine.links, machine.cards, source)


def _cores_of(cpus: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Group hardware threads by the core that they share according to Linux. On other systems each is a core."""
    groups: dict[str, list[int]] = {}
    for cpu in cpus:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        key = siblings.read_text().strip() if siblings.exists() else str(cpu)
        groups.setdefault(key, []).append(cpu)
    return tuple(tuple(group) for group in groups.values())


def _by_cache(cores: Iterable[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Group cores by the last level of cache that they share according to Linux. On other systems all share one."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for core in cores:
        levels = sorted(Path(f"/sys/devices/system/cpu/cpu{core[0]}/cache").glob("index*/shared_cpu_list"))
        groups.setdefault(levels[-1].read_text().strip() if levels else "", []).append(core)
    return list(groups.values())


def _memory_bytes() -> float | None:
    limit = memory_limit_bytes()
    try:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None if limit is None else float(limit)
    return float(installed if limit is None else min(installed, limit))
