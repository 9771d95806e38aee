r"""The analytic model of a GPU: how long a kernel takes, and which part of the device it fills.

A roofline again (Williams, Waterman, Patterson, 2009), but of the part of the GPU that the kernel can fill. A kernel
consists of thread blocks, of which a GPU holds a limited number at once. They run in waves, the last of which is rarely
full::

    slots       |====|====|====|          2.5 waves on average fill 2.5 / 3 of the slots: share 0.83
                |====|====|====|          (NVIDIA: "Deep Learning Performance: Matrix Multiplication Background", on
                |====|====|              tile and wave quantization)
                  1    2    3   waves

    duration = fixed + max(flops / (share * flops_per_s * efficiency), bytes / (bytes_per_s * efficiency))

- A *product* (convolution, matrix product) makes one tile of 128 x 64 results a block, two blocks a multiprocessor: a
  quarter of its 2,048 threads, which is the occupancy that TurboDL reports for most kernels (section 2.1). If many
  terms are summed for few results, as in weight gradients, they are divided among several blocks (split-K).
- Anything else moves bytes: a thread for 4 results (16 bytes), 2,048 threads a multiprocessor. A tenth of these is
  enough to keep the memory busy (Little's law: 0.5 TB/s times well under a microsecond is less than 0.5 MB under way),
  yet a large kernel's blocks take all slots: its share is 1, and the arithmetic that it leaves cannot be used.

**The constants are from published figures and were fixed before any plan was simulated with them.** Those of products
are fits to the 74 convolutions of image networks that DeepBench lists for a P100 (Baidu Research: DeepBench,
results/train/DeepBench_NV_P100.xlsx, cuDNN 6, float, batches of 8 and 16): for each role the split, and an efficiency
``a * (flops per byte / 50) ** b``, with the least squares in logarithms. One standard deviation is then a factor of
1.31 for forward, 1.49 for activation gradients and 1.40 for weight gradients. From flops alone, without tiles, waves
and bytes, it is 1.72, 2.05 and 1.93. Winograd's algorithm saves arithmetic, so an efficiency may be above 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from hocket.errors import InputError
from hocket.ir import Costs, Device, Graph, Machine, Op, Share

PRODUCTS = ("convolution", "convolution_backward", "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv")
_FLOAT = 4


class Fit(NamedTuple):
    """Terms that one block adds up, and the efficiency ``at_50 * (flops per byte / 50) ** exponent``."""

    terms: int
    at_50: float
    exponent: float


_FORWARD, _ACTIVATION_GRAD, _WEIGHT_GRAD = Fit(2048, 0.74, 0.32), Fit(1024, 0.49, 0.50), Fit(256, 0.46, 0.45)


@dataclass(frozen=True)
class GpuModel:
    """The model's constants. The defaults are those above, and others show the sensitivity of a result."""

    # Fits to DeepBench's convolutions, by role. Other roles count as forward.
    forward: Fit = _FORWARD
    activation_grad: Fit = _ACTIVATION_GRAD
    weight_grad: Fit = _WEIGHT_GRAD
    tile: int = 128 * 64  # results that a product's block makes
    blocks_per_core: int = 2  # blocks of a product on a multiprocessor at a time
    # The highest efficiency of a convolution: 22.2 of 9.3 TFLOP/s, by Winograd's algorithm, is DeepBench's best.
    most: float = 2.4
    most_of_others: float = 0.98  # that of a matrix product: 9.1 of 9.3 TFLOP/s there
    # 510 of 732 GB/s on a P100 (Jia, Maggioni, Staiger, Scarpazza: "Dissecting the NVIDIA Volta GPU Architecture via
    # Microbenchmarking", 2018).
    bandwidth_efficiency: float = 0.70
    threads_per_core: int = 2048  # threads on a multiprocessor at a time, on all of these GPUs
    results_per_thread: int = 4  # of what moves bytes
    # From one kernel of a stream to the next 0.9 us (A. Gray: "Getting Started with CUDA Graphs", NVIDIA, 2019), and
    # 1.1 us for the smallest kernel itself (PyTorch issue 161104: two vectors of 1,024 added).
    kernel_us: float = 2.0

    def fit(self, role: str) -> Fit:
        return {"activation_grad": self.activation_grad, "weight_grad": self.weight_grad}.get(role, self.forward)


def estimate_gpu(graph: Graph, machine: Machine, *, device: str = "gpu0", model: GpuModel | None = None) -> Costs:
    """Durations and shares of all ops on a GPU, from flops and bytes of the graph and the device's rates.

    The graph should have buffers. Without them, the size of an op's result is that of its largest edge.

    Raises:
        InputError: there is no such GPU, or it has no rates.
    """
    found = machine.by_name.get(device)
    if found is None or found.kind != "cuda" or found.flops_per_s is None or found.bytes_per_s is None:
        raise InputError(f"machine: device {device!r} is no GPU with flops_per_s and bytes_per_s to estimate with")
    results = _result_bytes(graph)
    durations, shares = {}, {}
    for op in graph.ops:
        durations[op.name], shares[op.name] = _kernel(op, results[op.name] / _FLOAT, found, model or GpuModel())
    return Costs(
        {name: {device: us} for name, us in durations.items()},
        sources=dict.fromkeys(durations, "analytic"),
        note=f"estimated from rates of {device}: {machine.note}".rstrip(": "),
        shares={name: {device: share} for name, share in shares.items()},
    )


def _kernel(op: Op, results: float, device: Device, model: GpuModel) -> tuple[float, Share]:
    assert device.flops_per_s is not None
    assert device.bytes_per_s is not None
    results = max(results, 1.0)
    kernel = op.target.rpartition(".")[2]
    if kernel in PRODUCTS and op.flops > 2 * results:
        fit = model.fit(op.role)
        terms = op.flops / (2 * results)
        blocks = ceil(results / model.tile) * max(1, round(terms / fit.terms))
        waves = blocks / (device.cores * model.blocks_per_core)
        share = waves / ceil(waves)
        efficiency = fit.at_50 * (op.flops / op.size_bytes / 50) ** fit.exponent if op.size_bytes else 1.0
        efficiency = min(efficiency, model.most if kernel.startswith("convolution") else model.most_of_others)
        arithmetic_us = op.flops / (share * device.flops_per_s * efficiency) * 1e6
    else:
        moved = max(results, op.size_bytes / 3 / _FLOAT)  # a sum over all has one result, but many threads
        share = min(1.0, moved / model.results_per_thread / (device.cores * model.threads_per_core))
        arithmetic_us = 0.0
    bytes_per_us = device.bytes_per_s * model.bandwidth_efficiency / 1e6
    busy_us = max(arithmetic_us, op.size_bytes / bytes_per_us)
    duration_us = model.kernel_us + busy_us
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
