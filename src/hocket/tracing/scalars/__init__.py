"""Numbers that change between steps, such as learning rates: their arithmetic is written down while a step is traced.

- `live`: numbers that remember how they were computed. `followed_math`: the functions of `math` follow them.
- `tape`: that arithmetic as a program, which is run before each planned step.
"""
