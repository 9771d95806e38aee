"""A deep, narrow multilayer perceptron: a step of operations too small to fill even one core.

Here the time between the operations counts for more than the operations: what a step costs that is dispatched
one operation at a time.

    job = load("mlp", depth=4, width=64)
"""

from __future__ import annotations

from torch import nn

from hocket.job import Job
from hocket.zoo import classify, data
from hocket.zoo.base import Option, Request, ZooEntry


def build(request: Request) -> Job:
    """``depth`` hidden layers, ``width`` wide, and a linear one; generated vectors ``[batch, width]``."""
    width = request.size["width"]
    layers: list[nn.Module] = []
    for _ in range(request.size["depth"]):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, data.NUM_LABELS))
    return classify.job(request, classify.initialised(model), data.vectors(request, width=width))


ENTRY = ZooEntry(
    name="mlp",
    summary="multilayer perceptron, 8 layers of 256, on generated vectors: small operations",
    source="D. Rumelhart, G. Hinton, R. Williams, Learning representations by back-propagating errors, 1986",
    build=build,
    batch_size=32,
    lr=0.01,
    options=(
        Option("depth", 8, "hidden layers"),
        Option("width", 256, "width of the inputs and of every hidden layer"),
    ),
)
