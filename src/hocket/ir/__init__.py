"""The five nouns: graph, costs, machine, plan, timeline. Imports no torch and no other package of Hocket."""

from hocket.ir._topological import DisjointSets, list_order
from hocket.ir.costs import Costs, Duration, Share
from hocket.ir.graph import BUFFER_LIVES, ROLES, Buffer, Carried, Edge, Graph, Op
from hocket.ir.links import Link, NetworkCard
from hocket.ir.machine import Device, Machine
from hocket.ir.plan import Lane, Plan, one_by_one
from hocket.ir.semantics import check_ops, execution_order, hardware_threads, names_threads, waits_of
from hocket.ir.timeline import Span, Timeline
from hocket.ir.waits import Synchronisation, launch_order, synchronisation

__all__ = [
    "BUFFER_LIVES",
    "ROLES",
    "Buffer",
    "Carried",
    "Costs",
    "Device",
    "DisjointSets",
    "Duration",
    "Edge",
    "Graph",
    "Lane",
    "Link",
    "Machine",
    "NetworkCard",
    "Op",
    "Plan",
    "Share",
    "Span",
    "Synchronisation",
    "Timeline",
    "check_ops",
    "execution_order",
    "hardware_threads",
    "launch_order",
    "list_order",
    "names_threads",
    "one_by_one",
    "synchronisation",
    "waits_of",
]
