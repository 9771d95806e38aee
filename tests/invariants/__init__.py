"""Independent, deliberately naive checkers: slow, short, and written without a look at what they check."""

from invariants.optima import longest_path_us, moldable_optimum_us, optimum_us, placement_faults
from invariants.plans import all_waits, direct_waits, held_bytes, illegality, lost_orders
from invariants.timelines import naive_gpu_simulation, naive_simulation, shared_core_simulation

__all__ = [
    "all_waits",
    "direct_waits",
    "held_bytes",
    "illegality",
    "longest_path_us",
    "lost_orders",
    "moldable_optimum_us",
    "naive_gpu_simulation",
    "naive_simulation",
    "optimum_us",
    "placement_faults",
    "shared_core_simulation",
]
