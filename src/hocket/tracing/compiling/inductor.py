"""The compiling process: a request in, a listing and a library of kernels out.

``python -m`` this, with its niceness, and folders.

It is a process of its own, so that Inductor's seconds of Python leave the training's interpreter alone, and nothing
that it does to torch stays. Each precision is compiled in a fork of it, side by side. In float64 kernels are compared
and never timed: they are written without vectors, which takes less time.

Products (small ones joined), convolutions and random numbers are left to torch. Buffers are neither used again nor
written in place, so that kernels wait for each other only where data flows.

Ops are decomposed by Inductor's own table, but for two constants that it has as they are written in a paper, where the
kernels have them as C++ floats: 1e-12 in the backward of a binary cross entropy, and a sixth in that of a hard sigmoid.
In float32 that is the same. In float64 a step is 4e-9 and 3e-8 off, more than a compiled form may be. The first shows
where a network is so sure that a probability of less than 1e-12 is left: in a GAN often.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hocket.errors import CaptureError
from hocket.ir.limits import usable_cpus
from hocket.tracing.compiling.building import compile_kernels, link
from hocket.tracing.compiling.events import arranged
from hocket.tracing.compiling.functional import functional_graph, plain_op
from hocket.tracing.compiling.listing import FORMAT, LIBRARY, LISTING
from hocket.tracing.compiling.products import join_products
from hocket.tracing.compiling.wrapper import kernels_of, recorded
from hocket.tracing.scalars.followed_math import exchanged

_aten = torch.ops.aten
_EPSILON = float(torch.tensor(1e-12, dtype=torch.float32))
_SIXTH = float(torch.tensor(1 / 6, dtype=torch.float32))
# A value of an op's argument `reduction`.
_MEAN = 1
_OPTIONS: dict[str, Any] = {
    "allow_buffer_reuse": False,
    "compile_threads": 1,
    "cpp_wrapper": False,
    "fallback_random": True,
    "fx_graph_cache": False,
    "graph_partition": False,
    "inplace_buffers": False,
    "layout_optimization": False,
    "max_autotune": False,
    "memory_planning": False,
    "reorder_for_peak_memory": False,
    "size_asserts": False,
    # Use the processor's instruction set without compiling a program that tests the compiler for it.
    "cpp.vec_isa_ok": True,
    # It writes a product and an addition as one op, and forgets a factor of it; products are captured as they are.
    "pattern_matcher": False,
}
# The step's own, and the wide one, in float64.
_PRECISIONS = ("own", "wide")


def compiled_to(folder: Path, document: dict[str, Any], *, wide: bool) -> None:
    """Compile a request in one precision. Write its part of the listing, and the objects of its kernels."""
    precision = _PRECISIONS[wide]
    with _configured(document["threads"], wide):
        source, given = _written(document, wide)
        kernels = {f"{precision}_{name}": kernel for name, kernel in kernels_of(source).items()}
        with FakeTensorMode():
            # The wrapper's tensors are of another mode than those of the graph.
            own = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in given]
            listed = arranged(recorded(source, own), f"{precision}_")
        compile_kernels(folder / f"{precision}.cpp", kernels, document["threads"], is_timed=not wide)
    (folder / f"{precision}.json").write_text(json.dumps(listed))


def joined(folder: Path) -> None:
    """Put what both precisions have left into one listing and one library."""
    link(folder / LIBRARY, [each for precision in _PRECISIONS for each in sorted(folder.glob(f"{precision}*.o"))])
    listings = {precision: json.loads((folder / f"{precision}.json").read_text()) for precision in _PRECISIONS}
    found = {"format": FORMAT, "torch": torch.__version__, **listings}
    for precision in _PRECISIONS:
        for each in folder.glob(f"{precision}*.*"):
            each.unlink()
    (folder / LISTING).write_text(json.dumps(found))


@contextmanager
def _configured(threads: int, wide: bool) -> Iterator[None]:
    from torch._inductor import config

    # No processor has vectors of one bit: none are used.
    options = {**_OPTIONS, "cpp.threads": threads, "cpp.simdlen": 1 if wide else None}
    with config.patch({name: value for name, value in options.items() if _has(config, name)}):
        yield


def _written(document: dict[str, Any], wide: bool) -> tuple[str, list[torch.Tensor]]:
    """The wrapper that Inductor writes, and fake tensors for its arguments. Nothing is compiled yet."""
    from torch._inductor import compile_fx
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering

    sources: list[str] = []
    module, given = functional_graph(document, decompositions(), wide=wide)
    join_products(module.graph, _is_random)
    _mark_outputs(module)
    unbuilt = (AsyncCompile, "cpp_pybinding", lambda *_, **__: None)
    kept = (GraphLowering, "save_output_code", staticmethod(sources.append))
    with exchanged([unbuilt, kept]), torch.no_grad():
        compile_fx.compile_fx_inner(module, given)
    if len(sources) != 1:
        raise CaptureError(f"Inductor wrote {len(sources)} wrappers")
    return sources[0], given


def _is_random(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(plain_op(target), "tags", ())


def _has(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True


def _mark_outputs(module: fx.GraphModule) -> None:
    """Have each output in the layout that it has in the graph."""
    from torch._inductor.compile_fx import record_original_output_strides

    output = module.graph.output_node()
    output.args = (tuple(output.args[0]),)  # type: ignore[arg-type]
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    record_original_output_strides(module)


def _beside(tasks: Sequence[Callable[[], int]], asked_by: int) -> int:
    """Run tasks in forks of this process, as many at once as there are cores. Return their highest status.

    This process and all that it has started end when the training that asked for it has ended.
    """
    waiting, running, worst = list(tasks), set[int](), 0
    while waiting or running:
        while waiting and len(running) < usable_cpus():
            task = waiting.pop(0)
            if child := os.fork():
                running.add(child)
                continue
            os._exit(task())
        child, status = os.waitpid(-1, os.WNOHANG)
        running.discard(child)
        worst = max(worst, os.waitstatus_to_exitcode(status) % 256)  # of a signal 256 less its number
        if os.getppid() != asked_by:
            os.killpg(0, signal.SIGKILL)
        if not child:
            time.sleep(0.05)
    return worst


def _status_of(task: Callable[[], None], folder: Path) -> int:
    """Run a task on a folder. A failure is one line in its file ``failure``, or the status if the disk is full."""
    try:
        task()
    except Exception as error:  # noqa: BLE001  # whatever it is, the step keeps its plain form
        first = (str(error).strip().splitlines() or [""])[0]
        try:
            (folder / "failure").write_text(f"{type(error).__name__}: {first}")
        except OSError:
            return os.EX_IOERR
        return 1
    return 0


def main(arguments: Sequence[str]) -> int:
    """Compile the ``request.json`` of each folder into it, with the niceness that stands before the folders.

    A failure is one line in the file ``failure`` of a folder.
    """
    asked_by = os.getppid()
    os.nice(int(arguments[0]))
    from torch._inductor import compile_fx  # noqa: F401  # once, for all forks

    # A fork lives for seconds: it looks for nothing to collect, which takes a seventh of Inductor's time.
    gc.freeze()
    gc.disable()

    folders = list(map(Path, arguments[1:]))
    tasks = [partial(_compile_one, folder, wide) for folder in folders for wide in (False, True)]
    statuses = [_beside(tasks, asked_by)]
    made = [each for each in folders if all((each / f"{precision}.json").exists() for precision in _PRECISIONS)]
    statuses += [_status_of(partial(joined, each), each) for each in made]
    return max(statuses)


def _compile_one(folder: Path, wide: bool) -> int:
    document = json.loads((folder / "request.json").read_text())
    return _status_of(partial(compiled_to, folder, document, wide=wide), folder)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table of decompositions, with the constants of torch's kernels."""
    from torch._inductor.decomposition import select_decomp_table

    return {
        **select_decomp_table(),
        _aten.binary_cross_entropy_backward.default: _binary_cross_entropy_backward,
        _aten.hardsigmoid_backward.default: _hardsigmoid_backward,
    }


def _binary_cross_entropy_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
) -> torch.Tensor:
    result = gradient * (x - target) / torch.clamp(x * (1 - x), min=_EPSILON)
    if weight is not None:
        result = result * weight
    return result / x.numel() if reduction == _MEAN else result


def _hardsigmoid_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.where((x > -3.0) & (x < 3.0), gradient * _SIXTH, 0.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
