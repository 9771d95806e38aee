"""Python's own state: what a step can reach, whether it writes any of it, and whether that is still as it was.

- `executed`: which code a step runs, and the names that it uses,
- `walk`, `kinds`, `layout`, `places`, `tokens`: the state that such code can reach, object by object,
- `watch`: ordinary steps are compared before and after,
- `appended`: lists that only grow,
- `parts`, `cuts`, `sinking`, `exchange`, `drawn`: a step is divided into Python around its ops, and the ops,
- `guards`, `guard_table`: before each planned step, all that the step reads is compared with what it was.
"""
