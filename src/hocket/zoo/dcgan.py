"""DCGAN: a generator and a discriminator with one optimizer each, trained in one step.

Source: A. Radford, L. Metz, S. Chintala, "Unsupervised Representation Learning with Deep Convolutional Generative
Adversarial Networks", 2015. Architecture, initial weights and step are those of PyTorch's DCGAN example, which draws
its noise inside the step.

    job = load("dcgan", image_size=16, width=8)
    generator, discriminator = job.models
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hocket.errors import InputError
from hocket.job import Job
from hocket.zoo import data
from hocket.zoo.base import Request

CHANNELS = 3
NOISE_WIDTH = 100
REAL, FAKE = 1.0, 0.0
BETAS = (0.5, 0.999)


def make_generator(side: int, width: int) -> nn.Sequential:
    """Noise ``[batch, 100, 1, 1]`` to images ``[batch, 3, side, side]`` from -1 to 1."""
    channels = width * side // 8
    layers: list[nn.Module] = [nn.ConvTranspose2d(NOISE_WIDTH, channels, 4, 1, 0, bias=False)]
    while channels > width:
        layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        layers += [nn.ConvTranspose2d(channels, channels // 2, 4, 2, 1, bias=False)]
        channels //= 2
    layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    layers += [nn.ConvTranspose2d(width, CHANNELS, 4, 2, 1, bias=False), nn.Tanh()]
    return nn.Sequential(*layers)


def make_discriminator(side: int, width: int) -> nn.Sequential:
    """Images ``[batch, 3, side, side]`` to the chance that they are real, ``[batch]``."""
    layers: list[nn.Module] = [nn.Conv2d(CHANNELS, width, 4, 2, 1, bias=False)]
    layers += [nn.LeakyReLU(0.2, inplace=True)]
    channels = width
    while channels < width * side // 8:
        layers += [nn.Conv2d(channels, 2 * channels, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * channels)]
        layers += [nn.LeakyReLU(0.2, inplace=True)]
        channels *= 2
    layers += [nn.Conv2d(channels, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0)]
    return nn.Sequential(*layers)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def build(request: Request) -> Job:
    """Build both models. A batch is one tensor of real images, and the loss is the sum of both models' losses."""
    side, width = request.size["image_size"], request.size["width"]
    if side & (side - 1):
        raise InputError(f"{request.name}: image_size: expected a power of two, got {side}")
    generator = make_generator(side, width).apply(_initialise).to(request.device)
    discriminator = make_discriminator(side, width).apply(_initialise).to(request.device)
    optimizer_g = request.optimizer(generator.parameters(), betas=BETAS)
    optimizer_d = request.optimizer(discriminator.parameters(), betas=BETAS)
    criterion = nn.BCELoss()

    def step(batch: Tensor) -> Tensor:
        # The discriminator learns to tell real images from generated ones.
        discriminator.zero_grad()
        label = torch.full((batch.size(0),), REAL, dtype=batch.dtype, device=batch.device)
        loss_real = criterion(discriminator(batch), label)
        loss_real.backward()
        noise = torch.randn(batch.size(0), NOISE_WIDTH, 1, 1, device=batch.device)
        fake = generator(noise)
        label.fill_(FAKE)
        loss_fake = criterion(discriminator(fake.detach()), label)
        loss_fake.backward()
        optimizer_d.step()
        # The generator learns to have its images taken for real.
        generator.zero_grad()
        label.fill_(REAL)
        loss_g: Tensor = criterion(discriminator(fake), label)
        loss_g.backward()
        optimizer_g.step()
        return loss_real + loss_fake + loss_g

    batches = [images.tanh() for images, _ in data.images(request, channels=CHANNELS, side=side)]
    models, optimizers = [generator, discriminator], [optimizer_g, optimizer_d]
    return Job(step, models, optimizers, batches, name=request.name)
