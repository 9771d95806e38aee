"""DistributedDataParallel: the module is compiled before it is wrapped, and the loop stays torch's.

torchrun --standalone --nproc-per-node 2 examples/ddp.py 300
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def main(steps: int = 300) -> float:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    net.compile(backend="hocket")
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(dist.get_rank())  # each rank has batches of its own
    for _ in range(steps):
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
    dist.all_reduce(mean := loss.detach() / dist.get_world_size())
    if dist.get_rank() == 0:
        print(f"loss {mean.item():.3f}")
    dist.destroy_process_group()
    return float(mean)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
