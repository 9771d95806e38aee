r"""The problem of ordering transfers: the recvs of a step, and the work that waits for each set of them.

Only the set of recvs that an op depends on matters here (TicTac, section 4.1, calls it ``op.dep``), so ops with the
same set form one *group*, and their times are added up. A step of 5,000 ops has about as many groups as parameters::

    recv1 --> op1 --.                     groups    {recv1}          op1
                     >--> op3 --> op4               {recv1, recv2}   op3, op4
    recv2 ----------'

The model has one computing resource and, for each link, a wire with its channels. An op may start once its group's last
recv has arrived, and the resource never idles while an op may start. Then the starts of the groups determine the end of
the step, whatever the order of ops: at each start, all the work that may not start earlier is still to be done::

    makespan = max over groups g of   start(g) + work of all groups that may not start before start(g)

(One machine, release dates, makespan: all rules that never idle are equally good, see Brucker: "Scheduling Algorithms",
2007, section 4.2.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace

import numpy as np
import numpy.typing as npt

from hocket.ir import Costs, Graph, Machine
from hocket.planning.base import cpu_devices, gpu_of
from hocket.planning.channels import first_use, links_of, roots_of, transfers_of, without_transfers
from hocket.simulation.durations import transfer_us


@dataclass(frozen=True)
class Receives:
    """The n recvs of a step that wait for no op, and the work that waits for them."""

    names: tuple[str, ...]  # of the recvs, in the order of the graph
    times_us: tuple[float, ...]  # the duration of each on its link
    links: tuple[int, ...]  # the number of each recv's link
    channels: tuple[int, ...]  # the number of channels of each link
    groups: tuple[int, ...]  # the sets of recvs, as bits, that ops depend on, perhaps the empty one among them
    works_us: tuple[float, ...]  # the total time of each group's ops
    first_use: tuple[int, ...]  # the place of each recv in the order of first use

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
        """True for each group (row) that depends on each recv (column)."""
        length = (len(self) + 7) // 8
        rows = b"".join(group.to_bytes(length, "little") for group in self.groups)
        bits = np.unpackbits(np.frombuffer(rows, np.uint8), bitorder="little")
        return bits.reshape(len(self.groups), length * 8)[:, : len(self)].astype(bool)

    def arrivals_us(self, order: Sequence[int]) -> list[float]:
        """The arrival of each recv, if each link carries its recvs in this order."""
        free = [[0.0] * count for count in self.channels]
        found = [0.0] * len(self)
        for recv in order:
            channels = free[self.links[recv]]
            found[recv] = channels[0] + self.times_us[recv]
            heapreplace(channels, found[recv])
        return found

    def makespan_us(self, order: Sequence[int]) -> float:
        """The end of the step, which is no earlier than the last arrival."""
        return self.critical(order)[0]

    def critical(self, order: Sequence[int]) -> tuple[float, float]:
        """The end of the step, and the time from which the computing resource is busy until then.

        Both are the last arrival if the step ends with it.
        """
        return self._critical(self.arrivals_us(order))

    def ends_us(self, arrived_us: Sequence[float]) -> float:
        """The end of the step for these arrivals."""
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
    """The recvs of `graph` that wait for no op, and the work that waits for them on the computing device.

    Ops run at the full width of the first CPU device, or on the first GPU for which all have costs.
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
    wired = set(transfers)
    for name in graph.order:
        mine = bits.get(name, 0)
        for before in graph.predecessors[name]:
            mine |= depends[before]
        depends[name] = mine
        if name not in wired:
            us = costs.duration_us(name, width=width, device=device.name)
            work_us[mine] = work_us.get(mine, 0.0) + us
    used = first_use(graph, roots)
    return Receives(
        names=roots,
        times_us=tuple(transfer_us(graph[name], links[name], costs) for name in roots),
        links=tuple(number[links[name]] for name in roots),
        channels=tuple(link.channels or len(roots) for link in carrying),
        groups=tuple(work_us),
        works_us=tuple(work_us.values()),
        first_use=tuple(int(used[name]) for name in roots),
    )
