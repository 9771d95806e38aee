"""Training on ranks with a compiled model: ``torchrun -m dynamo.distributed KIND BACKEND FILE`` saves how it ends.

Kinds: ``ddp`` (`DistributedDataParallel`, several buckets) and ``fsdp2`` (`fully_shard`, blocks compiled).
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from support.regions import made_regions

NUM_STEPS = 60


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(nn.functional.dropout(nn.functional.gelu(self.first(x)), 0.1)).tanh()


class _Net(nn.Module):
    """Modules of our own: Dynamo skips a wrapped `nn.Sequential`, whose forward is torch's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head, self.end = nn.Linear(32, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def _ddp(backend: str) -> tuple[nn.Module, Any]:
    # Buckets of 1 MB: Dynamo cuts the graph at each.
    model = DistributedDataParallel(_Net(512), bucket_cap_mb=1)
    return model, torch.compile(model, backend=backend)


def _fsdp2(backend: str) -> tuple[nn.Module, Any]:
    model = _Net(64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        block.compile(backend=backend)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model


def trained(kind: str, backend: str) -> dict[str, Any]:
    """Losses and the state after some steps of this rank, and the verdicts of its regions, whose plans run."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model, run = {"ddp": _ddp, "fsdp2": _fsdp2}[kind](backend)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    with made_regions() as made:
        for _ in range(NUM_STEPS):
            x = torch.randn(16, 32, generator=generator)
            y = torch.randint(0, 8, (16,), generator=generator)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    state = [value.to_local() if isinstance(value, DTensor) else value for value in model.state_dict().values()]
    return {"losses": losses, "state": [value.clone() for value in state], "verdicts": [each.verdict for each in made]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.save(trained(*sys.argv[1:3]), f"{sys.argv[3]}.{dist.get_rank()}")
    dist.destroy_process_group()
