"""Moldable ops, which may run at several widths, on the cores of one device: the parts of the CPU planners. No torch.

- `instance`: a graph and its costs as numbers, and a plan from placements.
- `widths`: widths of all ops to try. `clustering`: small ops merged into actions.
- `sgs`: the cores of each op, and the two schedule generation schemes, time by time and op by op (Kolisch: "Serial and
  parallel resource-constrained project scheduling methods revisited", EJOR 1996).
- `local_search`: shorter plans by search, by annealing for small graphs.
"""
