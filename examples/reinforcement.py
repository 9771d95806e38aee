"""Q-learning with small nets: a walk of ten places, a replay buffer, a target net. The update is scheduled.

python examples/reinforcement.py 600
"""

import copy
import random
import sys

import torch
from torch import nn
from torch.nn.functional import one_hot, smooth_l1_loss

import hocket

PLACES, DISCOUNT = 10, 0.95


def walk(place: int, action: int) -> tuple[int, float, bool]:
    """Go left (0) or right (1). The right end is worth 1 and the left end 0.1."""
    place += 1 if action else -1
    ends = {0: 0.1, PLACES - 1: 1.0}
    return place, ends.get(place, 0.0), place in ends


def main(steps: int = 600) -> float:
    torch.manual_seed(0)
    random.seed(0)
    values = nn.Sequential(nn.Linear(PLACES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    target = copy.deepcopy(values).requires_grad_(False)
    optimizer = torch.optim.Adam(values.parameters(), lr=1e-3)

    def update(
        at: torch.Tensor, act: torch.Tensor, reward: torch.Tensor, to: torch.Tensor, go_on: torch.Tensor
    ) -> None:
        optimizer.zero_grad()
        best = target(to).amax(1)
        found = values(at).gather(1, act.unsqueeze(1)).squeeze(1)
        smooth_l1_loss(found, reward + DISCOUNT * go_on * best).backward()
        optimizer.step()

    fast = hocket.schedule(update, [values, target], optimizer)
    buffer: list[tuple[int, int, float, int, bool]] = []
    place = PLACES // 2
    for number in range(steps + 32):
        action = random.randrange(2)
        after, reward, done = walk(place, action)
        buffer.append((place, action, reward, after, done))
        place = PLACES // 2 if done else after
        if len(buffer) <= 32:
            continue
        at, act, gain, to, over = zip(*random.choices(buffer, k=32), strict=True)
        states = one_hot(torch.tensor(at), PLACES).float(), one_hot(torch.tensor(to), PLACES).float()
        fast(states[0], torch.tensor(act), torch.tensor(gain), states[1], 1 - torch.tensor(over).float())
        if number % 50 == 0:
            target.load_state_dict(values.state_dict())
    middle = values(one_hot(torch.tensor([PLACES // 2]), PLACES).float())[0].tolist()
    print(f"left {middle[0]:.2f}, right {middle[1]:.2f}; the update is {fast.verdict} because {fast.why}")
    return float(middle[1] - middle[0])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
