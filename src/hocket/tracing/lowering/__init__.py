"""From a recorded trace to a `hocket.ir.Graph`, and the program that runs it: an ordered list of passes.

- `lower`: the passes in order. `calls`: their data. `passes`: passes that change calls.
- `roles`, `dependencies`, `graph`: the ops of the graph and their order.
"""
