"""From a recorded trace to a `hocket.ir.Graph`, and the program that runs it: an ordered list of passes.

- `lower`: the passes in order; `calls`: what they pass on; `passes`: those that change calls;
- `conv_backward`, `shape_only`: ops that are taken apart, or need less than they ask for;
- `roles`, `flops`, `dependencies`, `graph`: what the ops of the graph are, and what comes before what.
"""
