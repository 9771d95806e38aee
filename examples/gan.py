"""A GAN on a ring of points: two models and two optimizers in one step.

python examples/gan.py 400
"""

import sys

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import hocket


def net(inputs: int, outputs: int) -> nn.Sequential:
    layers = (nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs))
    return nn.Sequential(*layers)


def main(steps: int = 400) -> float:
    torch.manual_seed(0)
    generator, critic = net(8, 2), net(2, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)

    def step(real: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fake = generator(noise)
        of_critic.zero_grad()
        critic_loss = bce(critic(real), ones) + bce(critic(fake.detach()), zeros)
        critic_loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        generator_loss = bce(critic(fake), ones)
        generator_loss.backward()
        of_generator.step()
        return critic_loss, generator_loss

    fast = hocket.schedule(step, [generator, critic], [of_generator, of_critic])
    for _ in range(steps):
        angle = torch.rand(64, 1) * 6.28
        real = torch.cat((angle.cos(), angle.sin()), 1)
        critic_loss, generator_loss = fast(real, torch.randn(64, 8))
    with torch.no_grad():
        radius = generator(torch.randn(500, 8)).norm(dim=1)
    print(f"losses {critic_loss.item():.2f} and {generator_loss.item():.2f}, radius {radius.mean():.2f} (1 is right)")
    print(f"the step is {fast.verdict} because {fast.why}")
    return float(radius.mean())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
