"""From what was measured to the next plan: which pairs of ops to keep apart, and when to look again. No torch."""

from hocket.adaptation.drift import Drift, DriftDetector, DriftLimits
from hocket.adaptation.interference import CoRun, co_runs, interfering

__all__ = ["CoRun", "Drift", "DriftDetector", "DriftLimits", "co_runs", "interfering"]
