"""The planner `critical-path`: streams by layer path, priorities, memory limits (TurboDL). No torch."""

from hocket.planning.critical_path.backbone import dependency_distance
from hocket.planning.critical_path.memory import held_back, peak_bytes, serial_peak_bytes
from hocket.planning.critical_path.planner import METHODS, CriticalPath

__all__ = ["METHODS", "CriticalPath", "dependency_distance", "held_back", "peak_bytes", "serial_peak_bytes"]
