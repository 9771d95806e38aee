"""Recording of a step: its ops, and what they depend on.

- `record`: one step, from what there was before it to its `trace`.
- `op_recorder`: every ATen op, with the memory it reads and writes. `module_tracker`: the module that it belongs to.
- `function_recorder`: every torch function, with the user's Python arguments. `ties`: the live numbers among these.
- `data_reads`, `batch_reads`, `step_counts`: reads of a tensor's value, and those that can be known.
- `held`: numbers and containers at places, gradients without one. `outcomes`: branches on what the step computes.
"""
