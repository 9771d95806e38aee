"""A small convolutional net on real data: the handwritten digits that come with scikit-learn.

The data are 1,797 images of 8 x 8 pixels (E. Alpaydin & C. Kaynak, "Optical Recognition of Handwritten
Digits", UCI Machine Learning Repository, 1998). The default of 28 batches is one pass over them.

    job = load("digits-cnn")
    losses = [job.step(batch).item() for batch in job.batches]      # falls from 2.3 to below 0.5
"""

from __future__ import annotations

import torch
from torch import nn

from hocket.job import Job
from hocket.zoo import classify, data
from hocket.zoo.base import Option, Request, ZooEntry, optional

MAX_PIXEL = 16.0


def build(request: Request) -> Job:
    """Two convolutions and two linear layers; images ``[batch, 1, 8, 8]`` from 0 to 1."""
    batches = _batches(request)
    width = request.size["width"]
    model = nn.Sequential(
        nn.Conv2d(1, width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 4 * 4, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, 10),
    )
    return classify.job(request, classify.initialised(model), batches)


def _batches(request: Request) -> list[classify.Batch]:
    """Shuffled passes over the data, one after the other, cut into batches."""
    datasets = optional("sklearn.datasets", package="scikit-learn", extra="demo", needed_by=request.name)
    digits = datasets.load_digits()
    pictures = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / MAX_PIXEL
    labels = torch.tensor(digits.target, dtype=torch.int64)
    drawn = data.generator(request)
    passes = -(-request.num_batches * request.batch_size // len(labels))
    order = torch.cat([torch.randperm(len(labels), generator=drawn) for _ in range(passes)])
    picked = order.split(request.batch_size)[: request.num_batches]
    return [(pictures[rows].to(request.device), labels[rows].to(request.device)) for rows in picked]


ENTRY = ZooEntry(
    name="digits-cnn",
    summary="small convolutional net on real handwritten digits, 8 x 8 pixels",
    source="E. Alpaydin & C. Kaynak, Optical Recognition of Handwritten Digits, UCI 1998",
    build=build,
    batch_size=64,
    num_batches=28,
    options=(Option("width", 16, "channels of the first convolution"),),
    package="scikit-learn",
    extra="demo",
)
