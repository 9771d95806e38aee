"""Rows of the papers that need a GPU: ``python -m benchmarks gpu-papers``.

- *Co-run of two ops* (Liu et al., IPDPS 2019, Table VII): two ops one after another, on two streams, and on streams
  that have halves of the multiprocessors (green contexts, where torch and the driver have them).
- *Blocks and threads of a kernel* (there, Fig. 5): the time of one kernel by its block and its warps, and the choice of
  Triton's autotuner.
- *Occupancy over a step* (TurboDL, Fig. 12): the part of the multiprocessors that is busy, by tenths of a step, of one
  stream and of the plan. The part that each op fills is estimated from its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.bench import Budget, Save, unsaved
from benchmarks.critical_path.measured import profiled_job
from hocket.backends import CudaBackend, StreamBackend
from hocket.execution.streams import CudaDevice
from hocket.ir import Costs, Timeline
from hocket.planning import plan

try:
    import triton
    import triton.language as tl
except ImportError:  # it comes with torch for CUDA
    triton = None

NOT_MEASURED = "not measured: no GPU"
REPEATS = 20
OCCUPANCY_OF = (("lenet", 64), ("transformer", 8), ("googlenet", 2))
BLOCKS = (256, 512, 1024, 2048, 4096)
WARPS = (1, 2, 4, 8, 16)


def run(*, budget_s: float | None = None, save: Save = unsaved) -> dict[str, Any]:
    """Measure all rows on the current CUDA device. One that was not measured is a line that says why."""
    has_gpu, budget = torch.cuda.is_available(), Budget(budget_s)
    rows: dict[str, Any] = {}
    result = {"gpu": torch.cuda.get_device_name() if has_gpu else None, "rows": rows}
    makers: dict[str, Callable[[], Any]] = {f"co-run: {pair}": partial(_co_run, *ops) for pair, ops in _PAIRS.items()}
    makers["blocks and threads"] = _blocks
    for name, size in OCCUPANCY_OF:
        makers[f"occupancy: {name}/{size}"] = partial(occupancy_of, name, size)
    for label, make in makers.items():
        try:
            with budget.item(label, kind=label.partition(":")[0]) as begun:
                rows[label] = NOT_MEASURED if not has_gpu else make() if begun else budget.left_out[label]
        except Exception as error:  # noqa: BLE001  # such as a package that is not there: it costs this row alone
            rows[label] = f"not measured: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        save(result)
    return result


def _convolution(side: int, channels: int, batch: int) -> Callable[[], object]:
    x = torch.randn(batch, channels, side, side, device="cuda")
    weight = torch.randn(channels, channels, 3, 3, device="cuda")
    return lambda: torch.conv2d(x, weight, padding=1)


def _product(rows: int, inner: int) -> Callable[[], object]:
    first, second = torch.randn(rows, inner, device="cuda"), torch.randn(inner, rows, device="cuda")
    out = torch.empty(rows, rows, device="cuda")
    return lambda: torch.mm(first, second, out=out)


_PAIRS: dict[str, tuple[Callable[[], Callable[[], object]], ...]] = {
    "two small products": (partial(_product, 256, 1024), partial(_product, 256, 1024)),
    "two large products": (partial(_product, 4096, 4096), partial(_product, 4096, 4096)),
    "a product and a convolution": (partial(_product, 512, 1024), partial(_convolution, 14, 256, 8)),
    "two small convolutions": (partial(_convolution, 7, 512, 8), partial(_convolution, 14, 256, 8)),
}


def _co_run(*makers: Callable[[], Callable[[], object]]) -> dict[str, Any]:
    """Microseconds of two ops by way of running them."""
    ops = [make() for make in makers]
    plain = [torch.cuda.Stream(), torch.cuda.Stream()]
    found: dict[str, Any] = {"one after another": _took_us(ops, (plain[0], plain[0])), "streams": _took_us(ops, plain)}
    try:
        found["halves"] = _took_us(ops, _halves())
    except Exception as error:  # noqa: BLE001  # an older driver or torch
        found["halves"] = f"not measured: {type(error).__name__}: {error}"
    found["speedup"] = found["one after another"] / found["streams"]
    return found


def _halves() -> list[torch.cuda.Stream]:
    """Two streams, each with half of the multiprocessors."""
    from torch.cuda.green_contexts import GreenContext

    half = torch.cuda.get_device_properties().multi_processor_count // 2
    streams = []
    for _ in range(2):
        context: Any = GreenContext.create(num_sms=half // 8 * 8, device_id=torch.cuda.current_device())
        context.set_context()
        try:
            streams.append(torch.cuda.Stream())
        finally:
            context.pop_context()
    return streams


def _took_us(ops: Sequence[Callable[[], object]], streams: Sequence[torch.cuda.Stream]) -> float:
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for op, stream in zip(ops, streams, strict=True):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                op()
            torch.cuda.current_stream().wait_stream(stream)
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return median(times[REPEATS // 2 :])  # the first ones choose kernels


if triton is not None:

    @triton.jit
    def momentum_kernel(parameter, gradient, buffer, rate, momentum, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        """``buffer = momentum * buffer + gradient`` and ``parameter -= rate * buffer``, `BLOCK` elements a program."""
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        moved = momentum * tl.load(buffer + at, mask=inside) + tl.load(gradient + at, mask=inside)
        tl.store(buffer + at, moved, mask=inside)
        tl.store(parameter + at, tl.load(parameter + at, mask=inside) - rate * moved, mask=inside)


def _blocks() -> dict[str, Any]:
    """The time of an update with momentum by elements a block and warps, and what the autotuner takes."""
    if triton is None:
        raise ImportError("Triton is not installed")
    size = 1 << 22
    tensors = [torch.randn(size, device="cuda") for _ in range(3)]
    times: dict[str, float] = {}
    for block in BLOCKS:
        for warps in WARPS:
            grid = (triton.cdiv(size, block),)

            def launch(grid: Any = grid, block: int = block, warps: int = warps) -> None:
                momentum_kernel[grid](*tensors, 0.1, 0.9, size, BLOCK=block, num_warps=warps)

            times[f"{block}/{warps}"] = 1e3 * triton.testing.do_bench(launch)
    configs = [triton.Config({"BLOCK": block}, num_warps=warps) for block in BLOCKS for warps in WARPS]
    tuned = triton.autotune(configs, key=["size"])(momentum_kernel)
    tuned[lambda meta: (triton.cdiv(size, meta["BLOCK"]),)](*tensors, 0.1, 0.9, size)
    fastest, slowest = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
    best = tuned.best_config
    return {
        "took_us": times,
        "fastest": fastest,
        "gain": times[slowest] / times[fastest],
        "autotuner": f"{best.kwargs['BLOCK']}/{best.num_warps}",
    }


def occupancy_of(name: str, size: int, backend: StreamBackend | None = None, device: str = "cuda") -> dict[str, Any]:
    """The busy part of the multiprocessors by tenths of a step, of one stream and of the plan, in two steps each."""
    backend = backend or CudaBackend(CudaDevice())
    job, captured, costs = profiled_job(name, size, backend, device)
    found: dict[str, Any] = {}
    for label, options in (("one stream", {"methods": ()}), ("planned", {})):
        made = plan(captured.graph, costs, backend.machine, planner="critical-path", **options)
        executor = backend.executor(captured, made)
        for number in range(3):
            executor(job.batch(number))
        lines = [executor.timeline() for _ in range(2)]
        found[label] = [busy_by_tenths(line, costs, backend.gpu.name) for line in lines]
        found[f"{label}, us"] = [line.makespan_us for line in lines]
        executor.close()
    return found


def busy_by_tenths(timeline: Timeline, costs: Costs, device: str) -> list[float]:
    """Return the mean part of the multiprocessors that ops fill in each tenth of a step, at most 1.

    Example:
        >>> from hocket.ir import Share, Span
        >>> line = Timeline((Span("a", "s", 0.0, 5.0), Span("b", "s", 5.0, 10.0)), ("s",), "measured")
        >>> costs = Costs({"a": {"gpu0": 5.0}, "b": {"gpu0": 5.0}}, shares={"a": {"gpu0": Share(0.5)}})
        >>> busy_by_tenths(line, costs, "gpu0")[4:6]
        [0.5, 0.0]
    """
    start = min((span.start_us for span in timeline.spans), default=0.0)
    tenth = (max((span.end_us for span in timeline.spans), default=0.0) - start) / 10
    busy = [0.0] * 10
    for span in timeline.spans:
        share = costs.shares.get(span.op, {}).get(device)
        if share is None or not tenth:
            continue
        for number in range(10):
            first = start + number * tenth
            overlap = min(span.end_us, first + tenth) - max(span.start_us, first)
            busy[number] += max(0.0, overlap) / tenth * share.multiprocessors
    return [min(1.0, part) for part in busy]


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    for label, row in result["rows"].items():
        shown = row if isinstance(row, str) else ", ".join(f"{key} {_short(value)}" for key, value in row.items())
        yield f"{label}: {shown}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"({len(value)} values)" if isinstance(value, (list, dict)) else str(value)
