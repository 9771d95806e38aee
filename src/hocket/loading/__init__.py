"""Weights from a file, in the order of their use: `hocket.load` and what belongs to it."""

from hocket.loading.loader import finish, load
from hocket.loading.ordering import first_use, recorded_first_use, reorder
from hocket.loading.sources import OffsetReader
from hocket.loading.weights import Weights, open_weights

__all__ = ["OffsetReader", "Weights", "finish", "first_use", "load", "open_weights", "recorded_first_use", "reorder"]
