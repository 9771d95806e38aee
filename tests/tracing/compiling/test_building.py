"""Kernels that are compiled, linked and called: any number of arguments, and what is not written as expected."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hocket import native
from hocket.errors import CaptureError
from hocket.tracing.compiling import building
from hocket.tracing.compiling.building import compile_kernels, link
from hocket.tracing.compiling.wrapper import WrittenKernel

pytestmark = pytest.mark.skipif(not native.available(), reason=native.available().why)


def sums(count: int) -> WrittenKernel:
    """A kernel that adds up the first elements of this many tensors."""
    given = ", ".join(f"const float* in{n}" for n in range(count))
    total = " + ".join(f"*in{n}" for n in range(count))
    source = f'extern "C"  void kernel({given}, double* out)\n{{ *out = {total}; }}\n'
    return WrittenKernel(("const float*",) * count + ("double*",), source)


def loaded(folder: Path, count: int, symbol: str = "own_sums") -> Any:
    """The kernel of this name in the library of a folder, which adds up this number of tensors."""
    native.load()
    layout, out = ([1], [1], torch.float32), ([1], [1], torch.float64)
    order = [*range(count), -1]
    return torch.classes.hocket.Kernel(
        str(folder / "kernels.so"), symbol, order, [0] * len(order), [layout] * count, [out], []
    )


def test_a_kernel_may_have_hundreds_of_arguments(tmp_path: Path) -> None:
    link(tmp_path / "kernels.so", compile_kernels(tmp_path / "own.cpp", {"own_sums": sums(300)}, 2, is_timed=False))
    (found,) = torch.ops.hocket.kernel(loaded(tmp_path, 300), [torch.full((1,), float(n)) for n in range(300)])
    assert found.item() == sum(range(300))


def test_many_kernels_are_compiled_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_MIN_PART_CHARS", 100)
    monkeypatch.setattr(building, "usable_cpus", lambda: 2)
    kernels = {f"own_sums{n}": sums(n) for n in (1, 2, 3)}
    assert len(compile_kernels(tmp_path / "wide.cpp", kernels, 2, is_timed=False)) == 1
    objects = compile_kernels(tmp_path / "own.cpp", kernels, 2, is_timed=True)
    assert len(objects) == 2
    link(tmp_path / "kernels.so", objects)
    for n in (1, 2, 3):
        (found,) = torch.ops.hocket.kernel(loaded(tmp_path, n, f"own_sums{n}"), [torch.ones(1)] * n)
        assert found.item() == n


def test_a_library_stays_loaded_as_long_as_its_kernels(tmp_path: Path) -> None:
    link(tmp_path / "kernels.so", compile_kernels(tmp_path / "own.cpp", {"own_sums": sums(2)}, 2, is_timed=False))
    kernel = loaded(tmp_path, 2)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("the system does not tell which libraries are loaded")
    assert str(tmp_path) in maps.read_text()
    del kernel
    assert str(tmp_path) not in maps.read_text()


@pytest.mark.parametrize("source", ["void other()", "#pragma omp parallel\n"])
def test_what_is_not_written_as_expected_is_refused(tmp_path: Path, source: str) -> None:
    text = sums(1).source.replace("void kernel(", "void other(") if "other" in source else sums(1).source + source
    with pytest.raises(CaptureError, match="kernel own_sums is not written as expected"):
        compile_kernels(tmp_path / "own.cpp", {"own_sums": WrittenKernel((), text)}, 2, is_timed=False)


def test_what_does_not_compile_is_one_line(tmp_path: Path) -> None:
    wrong = WrittenKernel((), 'extern "C"  void kernel() { unheard_of(); }')
    with pytest.raises(CaptureError, match=r"^the kernels do not compile: .*unheard_of.*$"):
        compile_kernels(tmp_path / "own.cpp", {"own_wrong": wrong}, 2, is_timed=False)
