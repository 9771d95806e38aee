r"""The problem that ordering transfers solves: which recvs there are, and what work waits for which of them.

Only the set of recvs that an op depends on matters here (TicTac, section 4.1, calls it ``op.dep``), so ops with the
same set are one *group*: their times are added up. A step of 5,000 ops has about as many groups as parameters, and is
ordered by these::

    recv1 --> op1 --.                     groups    {recv1}          op1
                     >--> op3 --> op4               {recv1, recv2}   op3, op4
    recv2 ----------'

What runs is taken to be one computing resource and, for each link, a wire of so many channels. An op may start as soon
as its group's last recv has arrived, and the resource never waits while one may. Then *when* each group may start says
when the step ends, whatever the order of ops inside: from each such moment on, all the work that may not start before
it is still to be done::

    makespan = max over groups g of   start(g) + work of all groups that may not start before start(g)

(One machine, release dates, makespan: no rule that never idles is better than another; Brucker: "Scheduling
Algorithms", 2007, section 4.2.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace

import numpy as np
import numpy.typing as npt

from hocket.ir import Costs, Graph, Machine
from hocket.planning.arrivals import roots_of
from hocket.planning.base import cpu_devices, gpu_of
from hocket.planning.channels import links_of, transfer_us, transfers_of, without_transfers


@dataclass(frozen=True)
class Receives:
    """The n recvs of a step that wait for nothing, and the work that waits for them.

    Attributes:
        names: of the recvs, in the order of the graph.
        times_us: how long each takes on its link.
        links: for each the number of its link.
        channels: for each link how many transfers it carries side by side.
        groups: sets of recvs, as bits, that some op depends on, and no more; the empty one may be among them.
        works_us: for each group what its ops take together.
        first_use: for each recv its place in the order in which they are first used.
    """

    names: tuple[str, ...]
    times_us: tuple[float, ...]
    links: tuple[int, ...]
    channels: tuple[int, ...]
    groups: tuple[int, ...]
    works_us: tuple[float, ...]
    first_use: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def by_name(self) -> tuple[int, ...]:
        """The recvs in the order of their names."""
        return tuple(sorted(range(len(self)), key=self.names.__getitem__))

    @cached_property
    def by_first_use(self) -> tuple[int, ...]:
        """The recvs in the order in which their results are first used."""
        return tuple(sorted(range(len(self)), key=self.first_use.__getitem__))

    @cached_property
    def members(self) -> npt.NDArray[np.bool_]:
        """For each group (row) whether it depends on each recv (column)."""
        length = (len(self) + 7) // 8
        rows = b"".join(group.to_bytes(length, "little") for group in self.groups)
        bits = np.unpackbits(np.frombuffer(rows, np.uint8), bitorder="little")
        return bits.reshape(len(self.groups), length * 8)[:, : len(self)].astype(bool)

    def arrivals_us(self, order: Sequence[int]) -> list[float]:
        """When each recv has arrived, if each link carries its own in this order."""
        free = [[0.0] * count for count in self.channels]
        found = [0.0] * len(self)
        for recv in order:
            channels = free[self.links[recv]]
            found[recv] = channels[0] + self.times_us[recv]
            heapreplace(channels, found[recv])
        return found

    def makespan_us(self, order: Sequence[int]) -> float:
        """When the step ends, see above; and no sooner than the last recv has arrived."""
        return self.critical(order)[0]

    def critical(self, order: Sequence[int]) -> tuple[float, float]:
        """When the step ends in this order, and from when on the computing resource is never idle until then.

        The second is when the last recv has arrived, where the step ends with that.
        """
        return self._critical(self.arrivals_us(order))

    def ends_us(self, arrived_us: Sequence[float]) -> float:
        """When the step ends, if each recv has arrived when this says."""
        return self._critical(arrived_us)[0]

    def _critical(self, arrived_us: Sequence[float]) -> tuple[float, float]:
        arrived = np.array(arrived_us)
        last_us = float(arrived.max(initial=0.0))
        starts = np.where(self.members, arrived, 0.0).max(axis=1, initial=0.0)
        by_start = np.argsort(starts, kind="stable")
        starts = starts[by_start]
        left = np.cumsum(np.array(self.works_us)[by_start][::-1])[::-1]
        if not len(starts):
            return last_us, last_us
        ends = starts + left
        at = int(ends.argmax())
        return (float(ends[at]), float(starts[at])) if ends[at] >= last_us else (last_us, last_us)


def receives_of(graph: Graph, costs: Costs, machine: Machine) -> Receives:
    """The recvs of `graph` that wait for nothing, and what waits for them, on the device that the step computes on.

    Ops run at the full width of the first CPU device, or on the first GPU that all their costs know.

    Raises:
        InputError: an op without a cost, or no link leads to a recv.

    Example:
        >>> from hocket.ir import Edge, Link, Op
        >>> ops = (Op("r1", role="recv", size_bytes=5.0), Op("r2", role="recv", size_bytes=3.0), Op("a"), Op("b"))
        >>> graph = Graph(ops, (Edge("r1", "a"), Edge("a", "b"), Edge("r2", "b")))
        >>> machine = Machine(Machine.of(cores=1).devices, (Link("server", "cpu0", 1e6),))
        >>> found = receives_of(graph, Costs({"a": {"1": 7.0}, "b": {"1": 2.0}}), machine)
        >>> found.times_us, found.groups, found.works_us, found.makespan_us((0, 1)), found.makespan_us((1, 0))
        ((5.0, 3.0), (1, 3), (7.0, 2.0), 14.0, 17.0)
    """
    transfers = transfers_of(graph, costs, machine)
    roots = roots_of(graph, transfers)
    links = links_of(graph, transfers, costs, machine)
    carrying = list(dict.fromkeys(links[name] for name in roots))
    number = {link: at for at, link in enumerate(carrying)}
    compute = without_transfers(graph, transfers)
    device = gpu_of(compute, costs, machine) or cpu_devices(machine)[0]
    width = device.cores if device.kind == "cpu" else 1
    bits = {name: 1 << at for at, name in enumerate(roots)}
    depends: dict[str, int] = {}
    work_us: dict[int, float] = {}
    first_use: dict[str, int] = {}
    wired = set(transfers)
    for place, name in enumerate(graph.order):
        mine = bits.get(name, 0)
        for before in graph.predecessors[name]:
            mine |= depends[before]
            if before in bits:
                first_use.setdefault(before, place)
        depends[name] = mine
        if name not in wired:
            us = costs.duration_us(name, width=width, device=device.name)
            work_us[mine] = work_us.get(mine, 0.0) + us
    never = len(graph)
    used = sorted(range(len(roots)), key=lambda at: (first_use.get(roots[at], never), at))
    place_of = {recv: at for at, recv in enumerate(used)}
    return Receives(
        names=roots,
        times_us=tuple(transfer_us(name, links[name], graph, costs) for name in roots),
        links=tuple(number[links[name]] for name in roots),
        channels=tuple(link.channels or len(roots) for link in carrying),
        groups=tuple(work_us),
        works_us=tuple(work_us.values()),
        first_use=tuple(place_of[at] for at in range(len(roots))),
    )
