"""What is noted while a step is traced, beside the ops themselves.

- `recorder`: every ATen op, with the memory it reads and writes; `module_tracker`: whose module it belongs to;
- `function_recorder`: every torch function, with the Python arguments of the user; `ties`: which are live numbers;
- `data_reads`, `batch_reads`, `step_counts`: where the value of a tensor is asked for, and can be known.
"""
