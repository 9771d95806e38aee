"""A machine that is not here: the step's ops are measured on this one and simulated on one of other cores.

python examples/simulated_machine.py 16
"""

import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss

import hocket


def main(cores: int = 16, branches: int = 8) -> float:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)) for _ in range(branches))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        loss = mse_loss(torch.stack([branch(x) for branch in model]).mean(0), y)
        loss.backward()
        optimizer.step()
        return loss

    captured = hocket.capture(step, model, optimizer, (torch.randn(64, 64), torch.randn(64, 1)))
    graph, costs = captured.graph, hocket.profile(captured, widths=[1])
    serial_us = 0.0
    for number in (1, 2, cores):
        machine = hocket.Machine.of(cores=number)
        plan = hocket.plan(graph, costs, machine, planner="list")
        step_us = hocket.simulate(graph, plan, costs, machine).makespan_us
        serial_us = serial_us or step_us
        limit_us = hocket.bounds(graph, costs, machine).lower_us
        print(
            f"{number} cores: {step_us:.0f} us, {serial_us / step_us:.2f}x of one core; no plan below {limit_us:.0f} us"
        )
    return serial_us / step_us


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
