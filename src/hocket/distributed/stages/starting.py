"""`hocket.distribute.stages`: what is asked for is checked, and the job that torchrun has started is joined."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hocket.distributed.membership import DEFAULT_TIMEOUT_S, job_store
from hocket.distributed.stages.memory_limits import limits_of
from hocket.distributed.stages.partitioned import PartitionedStep
from hocket.distributed.stages.peers import Peers
from hocket.distributed.stages.planner import StagePlanner
from hocket.errors import InputError
from hocket.execution import EXECUTORS
from hocket.ir import Plan
from hocket.planning.partition import OBJECTIVES

__all__ = ["stages"]


def stages(
    step: Callable[..., Any],
    model: Any,
    optimizer: Any,
    *,
    partition: Plan | Mapping[str, int] | None = None,
    objective: str = "load",
    epsilon: float | None = None,
    budget_s: float = 5.0,
    seed: int = 0,
    executor: str = "auto",
    rebalance: int = 0,
    memory_bytes: float | Sequence[float] | None = None,
    weights: str | os.PathLike[str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> PartitionedStep:
    """Train one model over all ranks of a torchrun job: each runs its part of the captured step.

    Every rank calls this, and then the result with the same batches. Ops go to ranks by the partitioner (Tavarageri et
    al., "Automatic Model Parallelism for Deep Neural Networks with Compiler and Hardware Support"). Each parameter,
    running statistic and optimizer state has one home, where it is updated; other ranks that read it get a copy in
    each step. The step computes what it computes in one process, to the bit where ranks use as many threads.

    Args:
        step: the user's own, unchanged; it zeroes gradients, computes them, and updates.
        model: the module it trains, or a list of them. The parameters and buffers of rank 0 count; on other ranks the
            model may be on the meta device, and gets memory for what its part uses.
        optimizer: the optimizer it steps, or a list. State and rates are those of rank 0.
        partition: a rank for each op, or a plan of `hocket partition` with a lane for each rank; on rank 0. None: ops
            are profiled and partitioned.
        objective: of the partitioner: ``load``, ``time`` or ``cut`` (``docs/partition.md``).
        epsilon: how far the work of a rank may be from its share.
        budget_s: how long a partition is searched for.
        seed: of that search.
        executor: ``native`` lanes, ``python`` threads, or ``auto``.
        rebalance: after every so many steps ranks tell each other how busy they are, and ops may move from one that
            is overloaded to one that is not, with their parameters and state (``docs/partition.md``); 0: never.
        memory_bytes: what a rank may hold in a step at the most, or a number for each rank: parameters, gradients,
            optimizer state, activations and copies of what ranks exchange. A promise, of what is predicted; on rank 0.
            None: where such a partition is found, 1.3 times an equal share of what one process holds.
        weights: a safetensors file, the index of several, or a folder with either, that has the values of all
            parameters and buffers. Each rank reads what its part uses, and the model may be on the meta device at every
            rank. Optimizers begin without a state, and costs are estimated, since no rank has all values. None: the
            values of rank 0 count.
        timeout_s: how long another rank is waited for at the beginning; later on, one that is silent for so long is
            lost, and one that lives is waited for.

    Returns:
        A `PartitionedStep`. Its first call captures the step, and on rank 0 divides it.

    Raises:
        InputError: an unknown objective or executor, a negative `rebalance`, a wrong limit of memory, or one that
            moves would not keep, moves with `weights`, or torchrun has not started this process.
        PeerError: the job's store does not answer.

    Example:
        >>> fast = hocket.distribute.stages(step, model, optimizer)  # doctest: +SKIP
        >>> with fast:  # doctest: +SKIP
        ...     for batch in my_batches:  # the same on every rank
        ...         loss = fast(batch)
        ...     fast.gather()
    """
    if objective not in OBJECTIVES[:3]:
        raise InputError(f"distribute: unknown objective {objective!r}; one of {', '.join(OBJECTIVES[:3])}")
    if executor not in EXECUTORS:
        raise InputError(f"distribute: unknown executor {executor!r}; available: {', '.join(EXECUTORS)}")
    if rebalance < 0:
        raise InputError(f"distribute: expected rebalance to be a number of steps, or 0 for never, got {rebalance}")
    if rebalance and memory_bytes is not None:
        raise InputError("distribute: memory_bytes is of the division at the beginning; rebalance=0 keeps that")
    if rebalance and weights is not None:
        raise InputError("distribute: who moves ops has to measure them, and with weights= nobody has all values")
    store, rank, world = job_store(timeout_s)
    limits = limits_of(memory_bytes, world)
    peers = Peers(rank, world, 0, store, timeout_s)
    search = {"objective": objective, "epsilon": epsilon, "budget_s": budget_s, "seed": seed}
    planner = StagePlanner(partition, search, profiles=rebalance > 0, limits=limits, estimates=weights is not None)
    return PartitionedStep(step, model, optimizer, peers, planner, executor, rebalance, weights)
