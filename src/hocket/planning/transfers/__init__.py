"""`transfers`: the order in which a step receives its parameters (TicTac)."""

from hocket.planning.transfers.planner import ORDERS, Transfers

__all__ = ["ORDERS", "Transfers"]
