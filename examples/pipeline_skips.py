"""A pipeline of torch over ranks, of a net with skips that torch alone does not split.

torchrun --standalone --nproc-per-node 2 examples/pipeline_skips.py 20
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, pipeline
from torch.nn.functional import mse_loss

import hocket

MICROBATCHES, ROWS = 4, 8


class Skips(nn.Module):
    """Layers on the way down are added to those on the way up, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            x = layer(x).relu()
            kept.append(x)
        for layer, skip in zip(self.up, reversed(kept), strict=True):
            x = layer(x + skip).relu()
        return x


def main(steps: int = 100) -> None:
    dist.init_process_group("gloo")
    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    torch.manual_seed(0)
    policy = hocket.split_policy(world, microbatches=MICROBATCHES)
    pipe = pipeline(Skips(), (torch.randn(ROWS, 32),), split_policy=policy)
    stage = pipe.build_stage(rank, device)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mse_loss)
    for _ in range(steps):
        x = torch.randn(MICROBATCHES * ROWS, 32)  # of the same seed on all ranks
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.tanh(), losses=losses)
        optimizer.step()
    if rank == world - 1:
        print(f"loss {torch.stack(losses).mean().item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
