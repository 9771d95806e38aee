"""Shortcuts in Inductor give what it works out itself, and do not outlive their context."""

import pytest
import sympy
import torch
from torch._inductor import (
    compile_fx,  # noqa: F401  # before what depends on it
    config,
    cpp_builder,
    cpu_vec_isa,
)
from torch._inductor.codegen import cpp
from torch._inductor.cpu_vec_isa import VecAMX, VecAVX2, VecAVX512, VecAVX512VNNI
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.sizevars import stride_at_vec_range
from torch.utils._sympy.functions import FloorDiv

from hocket.tracing.compiling.shortcuts import linear_stride, shortcuts

X, Y = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "xy")


@pytest.mark.parametrize(
    "index", [X, 84 * X + Y + 7, Y + 3, sympy.Integer(5), 2 * X + 3 * (X + Y), 6 * X + FloorDiv(Y, 2)]
)
def test_a_linear_index_moves_as_inductor_says(index: sympy.Expr) -> None:
    found = linear_stride(index, X)
    assert found == stride_at_vec_range(index, X, 8)
    assert found.is_number


@pytest.mark.parametrize("index", [X * Y, X**2, FloorDiv(X, 2) + Y, X + FloorDiv(X + Y, 2), 4 * sympy.Max(X, Y)])
def test_any_other_index_is_left_to_inductor(index: sympy.Expr) -> None:
    assert linear_stride(index, X) is None
    with shortcuts():
        assert cpp.stride_at_vec_range(index, X, 8) == stride_at_vec_range(index, X, 8)


def test_nothing_is_built_to_know_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(*_: object, **__: object) -> None:
        raise AssertionError("a program was built")

    monkeypatch.setattr(cpp_builder.CppBuilder, "build", built)
    monkeypatch.setattr(cpu_vec_isa.VecISA, "_probe_load", built)  # what earlier tests have built is only loaded
    known = VecAMX.__bool__  # on a processor that has AMX, earlier tests have an answer
    known.cache_clear()  # type: ignore[attr-defined]
    with shortcuts(), config.patch({"cpp.vec_isa_ok": True}):
        assert VecAVX2()
        assert VecAVX512()
        assert bool(VecAVX512VNNI()) is torch.cpu._is_vnni_supported()
        assert not VecAMX()
    known.cache_clear()  # type: ignore[attr-defined]


def test_the_table_of_dtypes_is_filled_once_and_complete() -> None:
    usual = DtypePropagationOpsHandler()
    ops = dict(vars(usual))
    own = DtypePropagationOpsHandler.__init__
    with shortcuts():
        first = vars(DtypePropagationOpsHandler())["add"]
        assert vars(DtypePropagationOpsHandler())["add"] is first
        assert vars(DtypePropagationOpsHandler()).keys() == ops.keys()
    assert DtypePropagationOpsHandler.__init__ is own
    assert cpp.stride_at_vec_range is stride_at_vec_range
