"""Kernels as they are written by Inductor, compiled to an object, and objects linked to a library.

In the compiling process only. The kernels of a precision stand in few C++ files, since what a file includes takes
longer to read than a kernel to compile: in one, or where there are many kernels that run in training, in one for each
core. A kernel uses at most as many threads as it was written for (its buffers for partial sums have that size), and no
more than its lane has.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hocket.errors import CaptureError
from hocket.ir.limits import usable_cpus
from hocket.tracing.compiling.wrapper import WrittenKernel

# Flags of Inductor that do not change results.
_USELESS = ("Wall", "pedantic", "g1", "shared")
_INCLUDE = re.compile(r"^\s*#include .*$", re.MULTILINE)
_ENTRY = re.compile(r'extern "C"\s+(?:__declspec\(dllexport\)\s+)?void\s+kernel\(')
# A file is divided if each part has at least this much to compile: some four seconds, against two for its includes.
_MIN_PART_CHARS = 200_000
_PARALLEL = re.compile(r"#pragma omp parallel(?! num_threads\(\d+\))")


def compile_kernels(file: Path, kernels: Mapping[str, WrittenKernel], threads: int, *, is_timed: bool) -> list[Path]:
    """Compile kernels, by name, to objects with one function for each, of its name, that takes an array of pointers.

    `file` is the C++ file to be written, whose parts have a number behind its name. Kernels that are not `is_timed` run
    only in a few compared steps, and are compiled in less time.
    """
    texts = [_text(name, kernel, threads) for name, kernel in kernels.items()]
    includes = dict.fromkeys(line for _, found in texts for line in found)
    compiler, flags = _compiler(with_vectors=is_timed)
    if not is_timed:
        flags.append("-Og")  # the last one counts; less is not inlined, and a step takes longer than is saved
    # Each library has its own definitions from headers: a library that shares them is never unloaded.
    flags.append("-fvisibility=hidden")
    commands, made = [], []
    for number, part in enumerate(_parts([text for text, _ in texts], usable_cpus() if is_timed else 1)):
        source = file.with_name(f"{file.stem}{number}.cpp")
        source.write_text("\n".join([*includes, *part]))
        made.append(source.with_suffix(".o"))
        commands.append([*compiler, *flags, "-c", str(source), "-o", str(made[-1])])
    _run(commands)
    return made


def _parts(texts: Sequence[str], most: int) -> list[list[str]]:
    """Split the texts into a limited number of parts of about the same size. Short ones stay in one part."""
    total = sum(map(len, texts))
    parts: list[list[str]] = [[] for _ in range(max(1, min(most, total // _MIN_PART_CHARS)))]
    for text in sorted(texts, key=len, reverse=True):
        min(parts, key=lambda part: sum(map(len, part))).append(text)
    return parts


def link(library: Path, objects: Sequence[Path]) -> None:
    """Link objects to a library, or raise a `CaptureError`."""
    compiler, _ = _compiler(with_vectors=False)
    # OpenMP is not linked: it is torch's own, found in the library that it has loaded.
    linked = ["-L" + str(Path(torch.__file__).parent / "lib"), "-ltorch", "-ltorch_cpu", "-lc10"]
    _run([[*compiler, "-shared", "-o", str(library), *map(str, objects), *linked]])


def _run(commands: Sequence[Sequence[str]]) -> None:
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
        for command in commands
    ]
    said = [process.communicate()[1] for process in running]
    for process, message in zip(running, said, strict=True):
        if process.returncode:
            first = next((line for line in message.splitlines() if "error" in line), message[:200])
            raise CaptureError(f"the kernels do not compile: {first}")


def _text(name: str, kernel: WrittenKernel, threads: int) -> tuple[str, list[str]]:
    """A kernel behind a function of its name that is given all arguments as one array, and what it includes."""
    source = kernel.source
    if len(_ENTRY.findall(source)) != 1 or _PARALLEL.search(source):
        raise CaptureError(f"kernel {name} is not written as expected")
    includes = [line.strip() for line in _INCLUDE.findall(source)]
    source = _INCLUDE.sub("", source)
    source = _ENTRY.sub(f"static void {name}_kernel(", source)
    wide = f"num_threads({threads})"
    narrow = f"num_threads(omp_get_max_threads() < {threads} ? omp_get_max_threads() : {threads})"
    source = source.replace(f"#pragma omp parallel {wide}", f"#pragma omp parallel {narrow}")
    given = ", ".join(f"static_cast<{kind}>(given[{n}])" for n, kind in enumerate(kernel.types))
    entry = f'extern "C" __attribute__((visibility("default"))) void {name}(void** given) {{ {name}_kernel({given}); }}'
    return f"{source}\n{entry}\n", includes


def _compiler(*, with_vectors: bool) -> tuple[list[str], list[str]]:
    """The compiler that Inductor takes, and its flags for kernels."""
    from torch._inductor.cpp_builder import CppTorchOptions
    from torch._inductor.cpu_vec_isa import invalid_vec_isa, pick_vec_isa

    options = CppTorchOptions(vec_isa=pick_vec_isa() if with_vectors else invalid_vec_isa)
    flags = [f"-{flag}" for flag in options.get_cflags() if flag not in _USELESS]
    flags += [f"-D{each.strip()}" for each in options.get_definitions()]
    flags += [f"-I{each}" for each in options.get_include_dirs()]
    passed = [flag for each in options.get_passthrough_args() for flag in shlex.split(each)]
    return shlex.split(options.get_compiler()), flags + [flag for flag in passed if flag.startswith(("-D", "-m"))]
