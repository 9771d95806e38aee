"""Adapt plans to measurements: pairs of ops that interfere, drift of step times, and ops that move. No torch."""

from hocket.adaptation.assistant_rules import AssistantRules, assistant_rules
from hocket.adaptation.assistants import DeviceShare, OpMove, decide, shares_of
from hocket.adaptation.drift import Drift, DriftDetector, DriftLimits
from hocket.adaptation.interference import CoRun, co_runs, interfering

__all__ = [
    "AssistantRules",
    "CoRun",
    "DeviceShare",
    "Drift",
    "DriftDetector",
    "DriftLimits",
    "OpMove",
    "assistant_rules",
    "co_runs",
    "decide",
    "interfering",
    "shares_of",
]
