"""Partitioning of a step's ops over several devices (Tavarageri et al., "Automatic Model Parallelism").

    Graph, Costs, Machine --problem_of--> PartitionProblem --partitioned--> Partition --plan_of--> Plan

Starts and the paper's refinement are in Python. A multilevel search over hypergraphs and a search over schedules are in
C++ (``core/``), built on first use.
"""

from hocket.planning.critical_path.memory import PartPeaks
from hocket.planning.partition.graph_problem import equal_devices, problem_of
from hocket.planning.partition.partitioned import OBJECTIVES, Partition, PartitionPlanner, partitioned, plan_of
from hocket.planning.partition.problem import PartitionProblem, Tensor
from hocket.planning.partition.within_memory import partitioned_within

__all__ = [
    "OBJECTIVES",
    "PartPeaks",
    "Partition",
    "PartitionPlanner",
    "PartitionProblem",
    "Tensor",
    "equal_devices",
    "partitioned",
    "partitioned_within",
    "plan_of",
    "problem_of",
]
