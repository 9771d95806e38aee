"""Caches for results that Inductor computes repeatedly. Used in the compiling process only.

Two of its functions took a fifth of the seconds in which it wrote the kernels of a DenseNet, and a third one compiles:

- by how much an index moves with one variable of a loop: it substitutes and simplifies, for every access and every
  variable. Nearly all indices are sums of variables with constant factors, where the answer is the factor.
- a table of the dtypes that ops make, which it fills each time it is asked for.
- what the compiler knows of the processor: on one with AVX-512 it builds three programs in each process, and starts an
  interpreter to load each. What the processor has is used (compilers that read C++20 know it), but for instructions on
  matrices: only newer compilers know all of those, and no kernel has any.

What is not there in another torch is left as it is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from hocket.tracing.scalars.followed_math import exchanged


def shortcuts() -> AbstractContextManager[None]:
    """Within this, Inductor takes the shortcuts."""
    from torch._inductor import cpu_vec_isa, dtype_propagation, utils
    from torch._inductor.codegen import cpp

    taken: list[tuple[Any, str, Any]] = []
    usual_stride = getattr(cpp, "stride_at_vec_range", None)
    if usual_stride is not None:

        def stride(index: Any, var: Any, *rest: Any, **named: Any) -> Any:
            found = linear_stride(index, var)
            return usual_stride(index, var, *rest, **named) if found is None else found

        taken.append((cpp, "stride_at_vec_range", stride))
    table = getattr(dtype_propagation, "DtypePropagationOpsHandler", None)
    rules = getattr(utils, "op_dtype_propagation_rules", None)
    if table is not None and rules is not None and "_instance" in vars(table):
        fill, num_filled = table.__init__, -1

        def fill_once(self: Any) -> None:
            nonlocal num_filled
            if num_filled != len(rules):
                num_filled = len(rules)
                fill(self)

        taken.append((table, "__init__", fill_once))
    instructions = getattr(cpu_vec_isa, "VecISA", None)
    if instructions is not None and "check_build" in vars(instructions):
        taken.append((instructions, "check_build", lambda self, _: "amx" not in str(self)))
    return exchanged(taken)


def linear_stride(index: Any, var: Any) -> Any:
    """Return the amount by which a sum of variables with constant factors grows when this variable grows by one.

    None for an expression in which the variable is elsewhere, too.
    """
    import sympy  # type: ignore[import-untyped]

    terms = index.as_coefficients_dict()
    if all(term.is_Symbol or term.is_Number or var not in term.free_symbols for term in terms):
        return terms.get(var, sympy.S.Zero)
    return None
