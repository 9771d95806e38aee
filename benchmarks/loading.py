"""From a file to the first output: ``python -m benchmarks loading``.

**Over a link.** A reader hands out bytes at a rate, as a network card does, and the batch is such that the forward
takes as long as reading. Contenders alternate, each on a model whose weights are set to zero before:

    load_then_run   all is read straight into the parameters (hocket.load, hocket.loading.finish), then the forward
    safetensors     all is read, safetensors.torch.load, load_state_dict, then the forward: copies more than the above
    file_order      hocket.load of a stream that cannot seek: the order in which safetensors writes, by dtype and name
    registration    hocket.load as it is, in the order of registration
    first_use       in the order that hocket.loading.first_use finds
    searched        in the order that planner `transfers` finds for the forward's graph, by estimated durations
    reordered       a stream that cannot seek, of a file that hocket.loading.reorder has written

**From a warm disk.** ``safetensors.torch.load_file`` and ``load_state_dict`` against `hocket.load`, each until all
weights are there, and until the first output of a small batch.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import safetensors
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save_model

from benchmarks.bench import Save, ratios, unsaved
from benchmarks.contenders import language_job
from hocket import zoo
from hocket.cli.console import UsageError, table
from hocket.ir import Edge, Graph, Link, Machine, Op
from hocket.job import Job
from hocket.loading import finish, first_use, load, reorder
from hocket.loading.ordering import with_siblings
from hocket.loading.targets import named_tensors
from hocket.planning.transfers.orders import searched_order
from hocket.planning.transfers.receives import receives_of
from hocket.profiling.analytic import estimate
from hocket.tracing import capture


class PacedReader:
    """Bytes at a rate: what is asked for is there as soon as a link of that rate has carried it."""

    name = "link"

    def __init__(self, data: bytes, bytes_per_s: float) -> None:
        self.size = len(data)
        self._data = memoryview(data)
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def read_at(self, offset: int, length: int) -> memoryview:
        """At most `length` bytes from `offset` on."""
        found = self._data[offset : offset + length]
        self._free_s = max(self._free_s, time.perf_counter()) + len(found) / self._bytes_per_s
        time.sleep(max(0.0, self._free_s - time.perf_counter()))
        return found


class PacedStream(io.RawIOBase):
    """The same, of what cannot seek."""

    name = "stream"

    def __init__(self, data: bytes, bytes_per_s: float) -> None:
        super().__init__()
        self._reader = PacedReader(data, bytes_per_s)
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        found = self._reader.read_at(self._at, len(target))
        target[: len(found)] = found
        self._at += len(found)
        return len(found)


# Of one core, for the graph's durations: only proportions matter, for the link is scaled to them.
FLOPS_PER_S, BYTES_PER_S = 5e10, 1e10
TOKENS = 128


@dataclass(frozen=True)
class Network:
    """A model with a batch.

    Attributes:
        job: its training step, which is captured for the searched order.
        args, kwargs: of the forward.
    """

    job: Job
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def model(self) -> torch.nn.Module:
        """The model, in the mode in which it is used."""
        return self.job.models[0].eval()


def _classifier(entry: str, batch_size: int) -> Network:
    job = zoo.load(entry, batch_size=batch_size, num_batches=1)
    return Network(job, (job.batch(0)[0],), {})


def _bert(entry: str, width: int, depth: int, batch_size: int) -> Network:
    job = zoo.load(entry, batch_size=batch_size, num_batches=1, width=width, depth=depth, steps=TOKENS)
    return Network(job, (), {"input_ids": job.batch(0)["input_ids"]})


def _gpt2(batch_size: int) -> Network:
    """GPT-2 with random weights. As in generating text, only the last token's logits are computed."""
    import transformers

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    tokens = torch.randint(0, 50_000, (batch_size, TOKENS))
    job = language_job(model, torch.optim.SGD(model.parameters(), lr=1e-3), [tokens])
    return Network(job, (tokens,), {"logits_to_keep": 1, "use_cache": False})


# By name, of a batch size.
NETWORKS: Mapping[str, Callable[[int], Network]] = {
    "resnet50": partial(_classifier, "resnet50"),
    "vgg16": partial(_classifier, "vgg16"),
    "inception-v3": partial(_classifier, "inception-v3"),
    "bert-base": partial(_bert, "bert-medium", 768, 12),
    "bert-tiny": partial(_bert, "bert-tiny", 128, 2),
    "gpt2": _gpt2,
}


def searched_names(network: Network) -> list[str]:
    """Tensors in the order that planner `transfers` finds for the forward, on one computing resource.

    Every op of the forward may start when what it depends on is there, as if a user's forward ran its branches in any
    order; durations are estimated, and the link is scaled so that receiving takes as long as computing.
    """
    job = network.job
    with torch.enable_grad():
        graph = capture(job.step, job.model, job.optimizer, job.batch(0)).graph
    tensors = named_tensors(job.models[0])
    kept = {op.name: replace(op, reads=(), writes=()) for op in graph.ops if op.role == "forward"}
    edges = [edge for edge in graph.edges if edge.src in kept and edge.dst in kept]
    recvs: dict[str, Op] = {}
    for op in graph.ops:
        for name in op.reads if op.name in kept else ():
            if name in tensors:
                recv = recvs.setdefault(name, Op(f"recv:{name}", role="recv", size_bytes=float(tensors[name].nbytes)))
                edges.append(Edge(recv.name, op.name, float(tensors[name].nbytes)))
    forward = Graph((*recvs.values(), *kept.values()), tuple(dict.fromkeys(edges)))
    rated = Machine.of(cores=1).with_rates("cpu0", flops_per_s=FLOPS_PER_S, bytes_per_s=BYTES_PER_S)
    costs = estimate(forward, rated).restricted(list(kept))
    compute_us = sum(costs.duration_us(name) for name in kept)
    received = sum(recv.size_bytes for recv in recvs.values())
    machine = Machine(rated.devices, (Link("file", "cpu0", received / compute_us * 1e6),))
    receives = receives_of(forward, costs, machine)
    found = [receives.names[at].removeprefix("recv:") for at in searched_order(receives)]
    return with_siblings(found, tensors)


CONTENDERS = ("load_then_run", "safetensors", "file_order", "registration", "first_use", "searched", "reordered")

NAMES = ("resnet50", "vgg16", "bert-base", "gpt2")


def run(
    targets: Sequence[str] = NAMES,
    gbit: float = 1.0,
    rounds: int = 5,
    batch_size: int | None = None,
    save: Save = unsaved,
) -> dict[str, Any]:
    """Measure each model over a link of this many Gbit/s, and from a warm disk."""
    for name in targets:
        if name not in NETWORKS:
            raise UsageError(f"{name}: expected one of {', '.join(NETWORKS)}")
    if not gbit > 0:
        raise UsageError(f"--gbit: expected a number above 0, got {gbit:g}")
    bytes_per_s = gbit * 1e9 / 8
    models: dict[str, Any] = {}
    result = {"safetensors": safetensors.__version__, "bytes_per_s": bytes_per_s, "rounds": rounds, "models": models}
    for name in targets:
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode(False), torch.no_grad():
            models[name] = _measured(NETWORKS[name], Path(folder), bytes_per_s, rounds, batch_size)
        save(result)
    return result


def _measured(
    build: Callable[[int], Network], folder: Path, bytes_per_s: float, rounds: int, batch_size: int | None
) -> dict[str, Any]:
    small = build(2)
    model = small.model
    path = folder / "model.safetensors"
    save_model(model, str(path))
    data = path.read_bytes()
    read_s = len(data) / bytes_per_s
    batch = batch_size or _balanced(build, model, read_s)
    forward = _forward(model, build(batch))
    searched = searched_names(small)
    order = first_use(model, *small.args, **small.kwargs)
    ordered = folder / "ordered.safetensors"
    reorder(path, ordered, order)
    ordered_data = ordered.read_bytes()

    link, stream = (lambda: PacedReader(data, bytes_per_s)), (lambda: PacedStream(data, bytes_per_s))

    def then_run() -> torch.Tensor:
        finish(load(model, link()))
        return forward()

    def safetensors_then_run() -> torch.Tensor:
        model.load_state_dict(_with_ties(model, load_bytes(_whole(PacedReader(data, bytes_per_s)))))
        return forward()

    def streamed(file: Callable[[], Any], order: str | Sequence[str] = "auto") -> Callable[[], torch.Tensor]:
        def first_output() -> torch.Tensor:
            load(model, file(), order=order)
            return forward()

        return first_output

    contenders = {
        "load_then_run": then_run,
        "safetensors": safetensors_then_run,
        "file_order": streamed(stream),
        "registration": streamed(link),
        "first_use": streamed(link, order),
        "searched": streamed(link, searched),
        "reordered": streamed(lambda: PacedStream(ordered_data, bytes_per_s)),
    }
    expected = forward().clone()
    over_link = _alternately(model, contenders, rounds, expected)
    then_s = over_link["load_then_run"]["median_s"]
    forward_s = _seconds(forward, 3)
    return {
        "tensors": len(named_tensors(model)),
        "bytes": len(data),
        "batch_size": batch,
        "read_s": read_s,
        "forward_s": forward_s,
        # The longer of reading and the forward, over both one after another: no order can be below this.
        "bound_over_load_then_run": max(read_s, forward_s) / then_s,
        "over_link": over_link,
        "over_load_then_run": {name: found["median_s"] / then_s for name, found in over_link.items()},
        "first_use_over_file_order": over_link["first_use"]["median_s"] / over_link["file_order"]["median_s"],
        "registration_over_file_order": over_link["registration"]["median_s"] / over_link["file_order"]["median_s"],
        "warm_disk": _warm(model, small, path, rounds),
    }


def _warm(model: torch.nn.Module, small: Network, path: Path, rounds: int) -> dict[str, Any]:
    """From a file that is in memory already, until all weights are there and until the first output."""
    forward = _forward(model, small)
    expected = forward().clone()

    def whole() -> None:
        model.load_state_dict(_with_ties(model, load_file(str(path))))

    def streamed() -> None:
        finish(load(model, path))

    def whole_output() -> torch.Tensor:
        whole()
        return forward()

    def streamed_output() -> torch.Tensor:
        load(model, path)
        return forward()

    ready = _alternately(model, {"load_file": whole, "hocket": streamed}, 3 * rounds, None)
    output = _alternately(model, {"load_file": whole_output, "hocket": streamed_output}, 3 * rounds, expected)
    return {
        "ready": {**ready, "over_load_file": ready["hocket"]["median_s"] / ready["load_file"]["median_s"]},
        "output": {**output, "over_load_file": output["hocket"]["median_s"] / output["load_file"]["median_s"]},
    }


def _alternately(
    model: torch.nn.Module,
    contenders: Mapping[str, Callable[[], torch.Tensor | None]],
    rounds: int,
    expected: torch.Tensor | None,
) -> dict[str, Any]:
    """Each contender in turn, from weights that are zero. The first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    same = dict.fromkeys(contenders, True)
    for turn in range(rounds + 1):
        for name, contender in contenders.items():
            finish(model)
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.zero_()
            start = time.perf_counter()
            output = contender()
            if turn:
                seconds[name].append(time.perf_counter() - start)
            finish(model)
            same[name] &= expected is None or (output is not None and torch.equal(output, expected))
    return {
        name: {"median_s": median(found), "least_s": min(found), "most_s": max(found), "same_bits": same[name]}
        for name, found in seconds.items()
    }


def _balanced(build: Callable[[int], Network], model: torch.nn.Module, read_s: float) -> int:
    """The batch size at which a forward takes about as long as reading."""
    size = 2
    for _ in range(3):
        took_s = _seconds(_forward(model, build(size)), 2)
        size = max(1, round(size * read_s / took_s))
    return size


def _forward(model: torch.nn.Module, network: Network) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        found = model(*network.args, **network.kwargs)
        return found if isinstance(found, torch.Tensor) else found.logits

    return forward


def _whole(reader: PacedReader) -> bytes:
    return b"".join(_chunks(reader))


def _chunks(reader: PacedReader) -> Iterator[memoryview]:
    at = 0
    while part := reader.read_at(at, 4 << 20):
        yield part
        at += len(part)


def _with_ties(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state that has tied weights by every name, as ``load_state_dict`` wants it."""
    stored = {id(tensor): state[name] for name, tensor in named_tensors(model).items() if name in state}
    return {name: stored[id(tensor)] for name, tensor in named_tensors(model).items()}


def _seconds(work: Callable[[], object], runs: int) -> float:
    work()
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    rows, warm = [], []
    for name, found in result["models"].items():
        figures = [f"{found['bytes'] / 2**20:.0f}", *ratios(found, ("read_s", "forward_s"))]
        over = ratios(found["over_load_then_run"], CONTENDERS[1:])
        same = all(row["same_bits"] for row in found["over_link"].values())
        rows.append((name, *figures, *over, f"{found['first_use_over_file_order']:.2f}", "yes" if same else "NO"))
        disk = found["warm_disk"]
        warm.append((name, *(f"{disk[until]['over_load_file']:.2f}" for until in ("ready", "output"))))
    columns = ("model", "MiB", "read s", "forward s", *CONTENDERS[1:], "first use over file order", "same bits")
    title = f"first output over load-then-run, {result['bytes_per_s'] * 8e-9:g} Gbit/s, {result['threads']} threads"
    yield table(title, [column.replace("_", " ") for column in columns], rows)
    yield table("warm disk, over load_file and load_state_dict", ("model", "all there", "first output"), warm)
