r"""The analytic model of a GPU: how long a kernel takes, and which part of the device it fills.

A roofline again (Williams, Waterman, Patterson, 2009), but of the part of the GPU that the kernel can fill. A kernel is
so many thread blocks; a GPU holds so many at once; they run in waves, the last of which is rarely full::

    slots       |====|====|====|          2.5 waves on average fill 2.5 / 3 of the slots: share 0.83
                |====|====|====|          (NVIDIA: "Deep Learning Performance: Matrix Multiplication Background", on
                |====|====|              tile and wave quantization)
                  1    2    3   waves

    duration = fixed + max(flops / (share * flops_per_s * efficiency), bytes / (bytes_per_s * efficiency))

- A *product* (convolution, matrix product) makes one tile of 128 x 64 results a block, two blocks a multiprocessor: a
  quarter of its 2,048 threads, which is the occupancy that TurboDL reports for most kernels (section 2.1). Where many
  terms are added up for few results, as in weight gradients, so many of them are a block of their own (split-K).
- Anything else moves bytes: a thread for 4 results (16 bytes), 2,048 threads a multiprocessor. A tenth of these is
  enough to keep the memory busy (Little's law: 0.5 TB/s times well under a microsecond is less than 0.5 MB under way),
  yet a large kernel's blocks take all slots: its share is 1, and what it leaves is arithmetic that nobody can use.

**The constants are from published figures and were fixed before any plan was simulated with them.** Those of products
are fits to the 74 convolutions of image networks that DeepBench lists for a P100 (Baidu Research: DeepBench,
results/train/DeepBench_NV_P100.xlsx; cuDNN 6, float, batches of 8 and 16): for each role the split, and an efficiency
``a * (flops per byte / 50) ** b``, with the least squares in logarithms. One standard deviation is then a factor of
1.31 for forward, 1.49 for activation gradients and 1.40 for weight gradients; from flops alone, without tiles, waves
and bytes, it is 1.72, 2.05 and 1.93. Winograd's algorithm saves arithmetic, so an efficiency may be above 1.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from hocket.errors import InputError
from hocket.ir import Costs, Device, Graph, Machine, Op, Share

__all__ = ["estimate_gpu"]

PRODUCTS = ("convolution", "convolution_backward", "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv")
TILE = 128 * 64
BLOCKS_PER_CORE = 2


class _Fit(NamedTuple):
    """Terms that one block adds up, and the efficiency ``at_50 * (flops per byte / 50) ** exponent``."""

    terms: int
    at_50: float
    exponent: float


FITS = {
    "forward": _Fit(2048, 0.74, 0.32),
    "activation_grad": _Fit(1024, 0.49, 0.50),
    "weight_grad": _Fit(256, 0.46, 0.45),
}
# The best that DeepBench lists on this card: 22.2 TFLOP/s for a convolution by Winograd's algorithm, 9.1 for a matrix
# product, of 9.3.
MOST = {"convolution": 2.4, "convolution_backward": 2.4}
MOST_OF_OTHERS = 0.98
# Jia, Maggioni, Staiger, Scarpazza: "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", 2018: 510 of
# 732 GB/s on a P100.
BANDWIDTH_EFFICIENCY = 0.70
THREADS_PER_CORE = 2048
RESULTS_PER_THREAD = 4
# From one kernel of a stream to the next 0.9 us (A. Gray: "Getting Started with CUDA Graphs", NVIDIA, 2019), and 1.1 us
# for the smallest kernel itself (PyTorch issue 161104: two vectors of 1,024 added).
KERNEL_US = 2.0
_FLOAT = 4


def estimate_gpu(graph: Graph, machine: Machine, *, device: str = "gpu0") -> Costs:
    """Durations and shares of all ops on a GPU, from flops and bytes of the graph and the device's rates.

    The graph should know its buffers; without them an op's result is taken to be the largest of what its edges carry.

    Raises:
        InputError: there is no such GPU, or it has no rates.

    Example:
        >>> from hocket.ir import Graph, Machine, Op
        >>> graph = Graph((Op("copy", "aten.add_", size_bytes=2e8),))
        >>> round(estimate_gpu(graph, Machine.known("p100")).duration_us("copy", device="gpu0"))
        392
    """
    found = machine.by_name.get(device)
    if found is None or found.kind != "cuda" or found.flops_per_s is None or found.bytes_per_s is None:
        raise InputError(f"machine: device {device!r} is no GPU with flops_per_s and bytes_per_s to estimate with")
    results = _result_bytes(graph)
    durations, shares = {}, {}
    for op in graph.ops:
        durations[op.name], shares[op.name] = _kernel(op, results[op.name] / _FLOAT, found)
    return Costs(
        {name: {device: us} for name, us in durations.items()},
        sources=dict.fromkeys(durations, "analytic"),
        note=f"estimated from rates of {device}: {machine.note}".rstrip(": "),
        shares={name: {device: share} for name, share in shares.items()},
    )


def _kernel(op: Op, results: float, device: Device) -> tuple[float, Share]:
    assert device.flops_per_s is not None
    assert device.bytes_per_s is not None
    results = max(results, 1.0)
    kernel = op.target.rpartition(".")[2]
    if kernel in PRODUCTS and op.flops > 2 * results:
        fit = FITS.get(op.role, FITS["forward"])
        terms = op.flops / (2 * results)
        waves = ceil(results / TILE) * max(1, round(terms / fit.terms)) / (device.cores * BLOCKS_PER_CORE)
        share = waves / ceil(waves)
        efficiency = fit.at_50 * (op.flops / op.size_bytes / 50) ** fit.exponent if op.size_bytes else 1.0
        efficiency = min(efficiency, MOST.get(kernel, MOST_OF_OTHERS))
        arithmetic_us = op.flops / (share * device.flops_per_s * efficiency) * 1e6
    else:
        moved = max(results, op.size_bytes / 3 / _FLOAT)  # a sum over all has one result, but many threads
        share = min(1.0, moved / RESULTS_PER_THREAD / (device.cores * THREADS_PER_CORE))
        arithmetic_us = 0.0
    bytes_per_us = device.bytes_per_s * BANDWIDTH_EFFICIENCY / 1e6
    busy_us = max(arithmetic_us, op.size_bytes / bytes_per_us)
    duration_us = KERNEL_US + busy_us
    return duration_us, Share(
        max(share * busy_us / duration_us, 1e-6), min(1.0, op.size_bytes / bytes_per_us / duration_us)
    )


def _result_bytes(graph: Graph) -> dict[str, float]:
    """For each op the bytes it makes or changes."""
    size = {buffer.name: buffer.size_bytes for buffer in graph.buffers}
    carried: dict[str, float] = {}
    for edge in graph.edges:
        carried[edge.src] = max(carried.get(edge.src, 0.0), edge.size_bytes)
    return {
        op.name: sum(size[b] for b in op.writes) if op.writes and size else carried.get(op.name, op.size_bytes / 2)
        for op in graph.ops
    }
