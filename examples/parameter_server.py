"""Two workers and a parameter server; rank 0 publishes, and an agent follows the model while it trains.

torchrun --standalone --nproc-per-node 3 examples/parameter_server.py 50
"""

import os
import sys
import threading

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hocket


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def follow(address: str, calls: int = 3) -> None:
    """An agent: any process may run it, at any time. Here it is a thread of rank 0."""
    with hocket.distribute.agent(net().eval(), address) as fresh:
        for _ in range(calls):
            fresh(torch.randn(1, 16))
        print(f"the agent's last forward ran on version {fresh.version}")


def main(steps: int = 100) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(rank)  # each worker has batches of its own
    inputs = torch.randn(steps, 32, 16)
    batches = [(x, x[:, :4].argmax(1)) for x in inputs]
    if rank == world - 1:
        hocket.distribute.server(step, model, optimizer, batches[0], num_servers=1)
        return
    with hocket.distribute.worker(step, model, optimizer, num_servers=1, order="auto") as fast:
        for batch in batches:
            loss = fast(batch)
            fast.publish()
        if rank == 0:
            agent = threading.Thread(target=follow, args=(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",))
            agent.start()
            agent.join()
            print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
