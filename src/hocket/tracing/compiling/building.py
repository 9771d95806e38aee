"""Kernels as they are written by Inductor, built to one library; in the compiling process only.

Many stand in one C++ file, since what a file includes takes longer to read than a kernel to compile. A kernel
uses at most as many threads as it was written for (its buffers for partial sums have that size), and no more than its
lane has.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hocket.errors import CaptureError
from hocket.tracing.compiling.wrapper import WrittenKernel

__all__ = ["build"]

# Of Inductor's flags those that say nothing about what is computed.
_USELESS = ("Wall", "pedantic", "g1", "shared")
_INCLUDE = re.compile(r"^\s*#include .*$", re.MULTILINE)
_ENTRY = re.compile(r'extern "C"\s+(?:__declspec\(dllexport\)\s+)?void\s+kernel\(')
_PARALLEL = re.compile(r"#pragma omp parallel(?! num_threads\(\d+\))")


def build(folder: Path, kernels: Sequence[Mapping[str, WrittenKernel]], threads: int) -> str:
    """Build a library in `folder` with one function for each kernel, of its name; return the library's file name.

    Args:
        folder: where it is built.
        kernels: those that stand in one file, by name; files are compiled side by side.
        threads: for which the kernels were written.

    Raises:
        CaptureError: a kernel is not written as expected, or does not compile; names it.
    """
    files: list[Path] = []
    for number, group in enumerate(kernels):
        texts = [_text(name, kernel, threads) for name, kernel in group.items()]
        includes = dict.fromkeys(line for _, found in texts for line in found)
        files.append(folder / f"kernels{number}.cpp")
        files[-1].write_text("\n".join([*includes, *(text for text, _ in texts)]))
    compiler, flags = _compiler()
    objects = [path.with_suffix(".o") for path in files]
    running = [
        subprocess.Popen(
            [*compiler, *flags, "-c", str(path), "-o", str(made)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        for path, made in zip(files, objects, strict=True)
    ]
    messages = [process.communicate()[1].decode(errors="replace") for process in running]
    for process, message in zip(running, messages, strict=True):
        if process.returncode:
            first = next((line for line in message.splitlines() if "error" in line), message[:200])
            raise CaptureError(f"the kernels do not compile: {first}")
    library = folder / "kernels.so"
    # OpenMP is not linked: it is torch's own, found in the library that it has loaded.
    linked = ["-L" + str(Path(torch.__file__).parent / "lib"), "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(
        [*compiler, "-shared", "-o", str(library), *map(str, objects), *linked], check=True, capture_output=True
    )
    for path in (*files, *objects):
        path.unlink()
    return library.name


def _text(name: str, kernel: WrittenKernel, threads: int) -> tuple[str, list[str]]:
    """A kernel in a namespace of its own, under its own name, and what it includes."""
    source = kernel.source
    if len(_ENTRY.findall(source)) != 1 or _PARALLEL.search(source):
        raise CaptureError(f"kernel {name} is not written as expected")
    includes = [line.strip() for line in _INCLUDE.findall(source)]
    source = _INCLUDE.sub("", source)
    source = _ENTRY.sub(f'extern "C" __attribute__((visibility("default"))) void {name}(', source)
    wide = f"num_threads({threads})"
    narrow = f"num_threads(omp_get_max_threads() < {threads} ? omp_get_max_threads() : {threads})"
    return source.replace(f"#pragma omp parallel {wide}", f"#pragma omp parallel {narrow}"), includes


def _compiler() -> tuple[list[str], list[str]]:
    """The compiler that Inductor takes, and its flags for kernels."""
    from torch._inductor.cpp_builder import CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = CppTorchOptions(vec_isa=pick_vec_isa())
    flags = [f"-{flag}" for flag in options.get_cflags() if flag not in _USELESS]
    flags += [f"-D{each.strip()}" for each in options.get_definitions()]
    flags += [f"-I{each}" for each in options.get_include_dirs()]
    passed = [flag for each in options.get_passthrough_args() for flag in shlex.split(each)]
    return shlex.split(options.get_compiler()), flags + [flag for flag in passed if flag.startswith(("-D", "-m"))]
