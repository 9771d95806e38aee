"""Paced pipelines: ``python -m benchmarks partition --paced``.

Two cores cannot compute for four ranks, so each rank sleeps what its stages' nodes took when they were recorded, one by
one, on this machine; schedule (torch's 1F1B) and transport (gloo between processes, as many bytes as cross) are real.
Compared are the cuts of `hocket.split_policy` with cuts at equal numbers of layers, in turns in the same processes, and
either with what was predicted of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from benchmarks.bench import Save, check_names, table_of, unsaved
from benchmarks.ranks import join_job, results
from benchmarks.turns import one_thread
from hocket.distributed.pipelines.run import measured_link
from hocket.distributed.pipelines.split import torch_order
from hocket.distributed.pipelines.traced import chain_of, inline_grad_modes, join_aliases, node_times
from hocket.planning.partition.pipeline_cut import Chain, PipelineCut, cut_at, cut_for_schedule


class UNet(nn.Module):
    """Two skips over everything between them."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, width, 3, padding=1)
        self.down2 = nn.Conv2d(width, 2 * width, 3, padding=1, stride=2)
        self.down3 = nn.Conv2d(2 * width, 4 * width, 3, padding=1, stride=2)
        self.up3 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.conv3 = nn.Conv2d(4 * width, 2 * width, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.conv2 = nn.Conv2d(2 * width, width, 3, padding=1)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        first = F.relu(self.down1(image))
        second = F.relu(self.down2(first))
        low = F.relu(self.down3(second))
        up = F.relu(self.conv3(torch.cat([self.up3(low), second], 1)))
        found: torch.Tensor = self.out(F.relu(self.conv2(torch.cat([self.up2(up), first], 1))))
        return found


class Logits(nn.Module):
    """A language model that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens, use_cache=False).logits
        return logits


class LayeredModel(NamedTuple):
    """A model, one micro-batch, and the names of its layers in order. Other modules belong to the nearest layer."""

    model: nn.Module
    micro_batch: torch.Tensor
    layers: tuple[str, ...]


def _gpt2() -> LayeredModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes: dict[str, Any] = {"vocab_size": 8192, "n_positions": 64, "n_embd": 128, "n_layer": 8, "n_head": 4}
    config = GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0)
    return _language_model(GPT2LMHeadModel(config), "transformer.h")


def _llama() -> LayeredModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 8}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=8192, max_position_embeddings=64, **sizes, **heads)
    return _language_model(LlamaForCausalLM(config), "model.layers")


def _language_model(model: nn.Module, layers: str) -> LayeredModel:
    names = tuple(f"model.{layers}.{number}" for number in range(8))
    return LayeredModel(Logits(model), torch.randint(0, 8192, (4, 64)), names)


def _resnet18() -> LayeredModel:
    from hocket.zoo import load

    names = tuple(f"features.stage{stage}.unit{unit}" for stage in range(1, 5) for unit in (1, 2))
    model = load("resnet18", image_size=96).model
    assert isinstance(model, nn.Module)
    return LayeredModel(model.train(), torch.randn(4, 3, 96, 96), names)


def _unet() -> LayeredModel:
    names = ("down1", "down2", "down3", "up3", "conv3", "up2", "conv2", "out")
    return LayeredModel(UNet(48), torch.randn(4, 3, 32, 32), names)


MODELS: dict[str, Callable[[], LayeredModel]]
MODELS = {"gpt2": _gpt2, "llama": _llama, "resnet18": _resnet18, "unet": _unet}
MICRO_BATCHES = 8
WARM_UP_STEPS = 1
TIMEOUT_S = 60.0


class PacedTimes(NamedTuple):
    """The durations that a stage sleeps, and the numbers (4 bytes each) that it receives and sends."""

    forward_us: float
    backward_us: float
    received: int
    sent: int


def run(
    targets: Sequence[str] = tuple(MODELS), parts: Sequence[int] = (2, 3, 4), steps: int = 6, save: Save = unsaved
) -> dict[str, Any]:
    """Each model on each number of ranks, one for each stage.

    Raises:
        InputError: an unknown model, or a rank failed.
    """
    check_names("partition", targets, MODELS)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "paced": "computing is slept as recorded on this machine, node by node; schedule and transport are real",
        "schedule": "1f1b",
        "micro_batches": MICRO_BATCHES,
        "rows": rows,
    }
    links = {k: _ranks(k, _link_rank, ())[0] for k in parts}
    result["links"] = {str(k): rates for k, rates in links.items()}
    for name in targets:
        torch.manual_seed(0)
        layered = MODELS[name]()
        ops, chain = recorded(layered)
        for k in parts:
            order = torch_order("1f1b", stages=k, ranks=k, microbatches=MICRO_BATCHES)
            rates = links[k]
            equal = cut_at(chain, begins_of_layers(ops, chain, layered.layers, k), order, **rates)
            ours = cut_for_schedule(chain, order, **rates)
            cuts = {"equal_layers": equal, "hocket": ours}
            measured = _measured(list(cuts.values()), steps)
            row: dict[str, Any] = {"model": name, "ranks": k}
            for (label, cut), steps_us in zip(cuts.items(), measured, strict=True):
                row[label] = {
                    "step_us": median(steps_us),
                    "predicted_us": cut.step_us,
                    "stages_us": [stage.forward_us + stage.backward_us for stage in cut.stages],
                    "received_bytes": [stage.received_bytes for stage in cut.stages],
                }
            row["to_equal_layers"] = row["hocket"]["step_us"] / row["equal_layers"]["step_us"]
            row["predicted_over_measured"] = ours.step_us / row["hocket"]["step_us"]
            rows.append(row)
            result["summary"] = {
                "to_equal_layers": geometric_mean(row["to_equal_layers"] for row in rows),
                "at_most_0.9": sum(row["to_equal_layers"] <= 0.9 for row in rows),
                "predicted_within_0.1": sum(abs(1 - row["predicted_over_measured"]) <= 0.1 for row in rows),
                "cases": len(rows),
            }
            save(result)
    return result


def recorded(layered: LayeredModel) -> tuple[tuple[fx.Node, ...], Chain]:
    """The nodes of a model, and the chain that they are, timed one by one on this machine with one thread."""
    with one_thread():
        traced = torch.export.export(layered.model, (layered.micro_batch,), strict=False).module(check_guards=False)
        inline_grad_modes(traced)
        join_aliases(traced)
        return chain_of(traced, node_times(traced))


def begins_of_layers(ops: Sequence[fx.Node], chain: Chain, layers: Sequence[str], k: int) -> tuple[int, ...]:
    """Where stages begin that have equal numbers of layers. The first ones have one more where they cannot.

    A stage begins at the first op of its first layer, or at the next place where a cut may be.
    """
    firsts = []
    for layer in layers:
        inside = (number for number, node in enumerate(ops) if layer in _modules(node))
        firsts.append(next(inside))
    allowed = np.flatnonzero(np.isfinite(chain.crossing_bytes))
    parts = np.array_split(np.arange(len(layers)), k)
    return tuple(int(allowed[np.searchsorted(allowed, firsts[part[0]])]) for part in parts[1:])


def _modules(node: fx.Node) -> set[str]:
    """The paths of the modules whose code a node is of."""
    found = {path for path, _ in node.meta.get("nn_module_stack", {}).values()}
    return {path.removeprefix("L['self'].") for path in found}


def _measured(cuts: Sequence[PipelineCut], steps: int) -> list[list[float]]:
    """Return the time of each step of each cut, measured in turns on the slowest rank."""
    stages = [
        [
            PacedTimes(s.forward_us, s.backward_us, *(max(1, round(size / 4)) for size in (s.received_bytes, behind)))
            for s, behind in zip(cut.stages, [*(s.received_bytes for s in cut.stages[1:]), 4.0], strict=True)
        ]
        for cut in cuts
    ]
    found = _ranks(len(stages[0]), _paced_rank, (stages, steps))
    return [np.max([each[number] for each in found], axis=0).tolist() for number in range(len(cuts))]


def _ranks(count: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    store = TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=TIMEOUT_S))
    places = [(rank, count, store.port, work, arguments) for rank in range(count)]
    return results(_rank, places, "benchmarks.partition.paced")


def _rank(rank: int, world: int, port: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    join_job(rank, world, "127.0.0.1", port)
    store = TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = work(rank, *arguments)
    dist.barrier()
    return found


def _link_rank(rank: int) -> dict[str, float]:
    link = measured_link()
    return {"latency_us": link.latency_us, "bytes_per_s": link.bytes_per_s}


def _paced_rank(rank: int, splits: list[list[PacedTimes]], steps: int) -> list[list[float]]:
    made = []
    for stages in splits:
        times = stages[rank]
        given = torch.zeros(1, times.received, requires_grad=rank > 0)
        result = torch.zeros(1, times.sent, requires_grad=True)
        device = torch.device("cpu")
        stage = PipelineStage(_PacedModule(times), rank, len(stages), device, input_args=given, output_args=result)
        made.append(Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda output, target: (output * target).sum()))
    first = (torch.zeros(MICRO_BATCHES, splits[0][0].received),) if rank == 0 else ()
    target: dict[str, Any] = {"target": torch.zeros(MICRO_BATCHES, 1)} if rank == len(splits[0]) - 1 else {}
    found: list[list[float]] = [[] for _ in splits]
    for step in range(WARM_UP_STEPS + steps):
        for number, schedule in enumerate(made):
            dist.barrier()
            begin_s = time.perf_counter()
            schedule.step(*first, **target, return_outputs=False)
            if step >= WARM_UP_STEPS:
                found[number].append((time.perf_counter() - begin_s) * 1e6)
    return found


class _PacedModule(nn.Module):
    def __init__(self, times: PacedTimes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.times = times
        self.pace = _Pace()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Slept.apply(value, self.weight, self.times, self.pace)
        return found


class _Pace:
    """Sleeps for recorded durations. A sleep that takes too long shortens the next one.

    What was recorded had allocated its results: making the zeros in their place is part of the duration.
    """

    def __init__(self) -> None:
        self._late_us = 0.0

    def sleep(self, takes_us: float, begin_s: float) -> None:
        end_s = begin_s + (takes_us - self._late_us) / 1e6
        if (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        self._late_us = (time.perf_counter() - end_s) * 1e6


class _Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, times: PacedTimes, pace: _Pace) -> torch.Tensor:
        begin_s = time.perf_counter()
        ctx.times, ctx.pace, ctx.size = times, pace, value.shape
        result = torch.zeros(value.shape[0], times.sent)
        pace.sleep(times.forward_us, begin_s)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        begin_s = time.perf_counter()
        result = torch.zeros(ctx.size)
        ctx.pace.sleep(ctx.times.backward_us, begin_s)
        return result, torch.zeros(1), None, None


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    columns = {
        **{"model": "{model}", "ranks": "{ranks}", "equal layers us": "{equal_layers[step_us]:.0f}"},
        **{"hocket us": "{hocket[step_us]:.0f}", "ratio": "{to_equal_layers:.2f}"},
        "predicted over measured": "{predicted_over_measured:.2f}",
    }
    yield table_of(f"paced: {result['paced']}", columns, result["rows"])
    yield str(result["summary"])
