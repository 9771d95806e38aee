"""From a recorded trace to a `hocket.ir.Graph`, and the program that runs it: an ordered list of passes.

- `lower`: the passes in order. `calls`: their data. `passes`: passes that change calls.
- `conv_backward`, `shape_only`: ops that are split, or that need only the shapes of their arguments.
- `roles`, `flops`, `dependencies`, `graph`: the ops of the graph and their order.
"""
