"""Ops that may run at several widths, on the cores of one device: what the CPU planners are made of. No torch.

- `instance`: a graph and its costs as numbers, and a plan out of placements;
- `widths`: how wide each op should be; `clustering`: small ops as one action;
- `core_allocator`: which cores an op gets; `placement`: where these lie in the caches;
- `parallel_sgs`, `serial_sgs`: the two schedule generation schemes, time by time and op by op (Kolisch: "Serial and
  parallel resource-constrained project scheduling methods revisited", EJOR 1996);
- `local_search`, `annealing`: shorter plans by search, the latter for small graphs.
"""
