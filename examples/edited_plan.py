"""A plan as text: made by a planner, edited by hand, checked, and run.

python examples/edited_plan.py 100
"""

import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss

import hocket
from hocket.errors import PlanError


def main(steps: int = 100) -> str:
    torch.manual_seed(0)
    left, right = nn.Linear(64, 64), nn.Linear(64, 64)
    optimizer = torch.optim.SGD([*left.parameters(), *right.parameters()], lr=0.1)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        loss = mse_loss(left(x).tanh() + right(x).sigmoid(), y)
        loss.backward()
        optimizer.step()
        return loss

    batch = torch.randn(32, 64), torch.randn(32, 64)
    captured = hocket.capture(step, [left, right], optimizer, batch)
    machine = hocket.Machine.here()
    costs = hocket.profile(captured, widths=[1], machine=machine)
    text = str(hocket.plan(captured.graph, costs, machine, planner="list"))
    print(text)

    lines = text.splitlines()  # an editor's work: the first two ops of the text change places
    first = next(number for number, line in enumerate(lines) if line.lstrip().startswith("run"))
    lines[first], lines[first + 1] = lines[first + 1], lines[first]
    try:
        plan = hocket.Plan.parse("\n".join(lines) + "\n")
        hocket.check(captured.graph, plan)
    except PlanError as error:
        print("the edited plan is refused:", error)
        plan = hocket.Plan.parse(text)
    fast = hocket.schedule(step, [left, right], optimizer, plan=plan, guard=False)
    for _ in range(steps):
        loss = fast(batch)
    print(f"loss {loss.item():.3f}; the step is {fast.verdict} because {fast.why}")
    return text


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
