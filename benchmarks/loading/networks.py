"""Models to load, the batch of their first forward, and the order that planner `transfers` finds for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.contenders import language_job
from hocket import zoo
from hocket.ir import Edge, Graph, Link, Machine, Op
from hocket.job import Job
from hocket.loading.ordering import with_siblings
from hocket.loading.targets import named_tensors
from hocket.planning.transfers.insertion import searched_order
from hocket.planning.transfers.receives import receives_of
from hocket.profiling.analytic import estimate
from hocket.tracing import capture

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
