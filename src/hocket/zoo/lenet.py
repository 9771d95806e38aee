"""LeNet-5, the first convolutional net that everybody trains.

Source: Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-Based Learning Applied to Document Recognition",
Proceedings of the IEEE, 1998; in its usual form of today, with ReLU and maximum pooling.

    job = load("lenet", batch_size=128)
"""

from __future__ import annotations

from torch import nn

from hocket.job import Job
from hocket.zoo import classify, data
from hocket.zoo.base import Option, Request, ZooEntry


def build(request: Request) -> Job:
    """Two convolutions and three linear layers; generated images ``[batch, 1, image_size, image_size]``."""
    side = request.size["image_size"]
    pooled = (side // 2 - 4) // 2
    model = nn.Sequential(
        nn.Conv2d(1, 6, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * pooled * pooled, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )
    return classify.job(request, classify.initialised(model), data.images(request, channels=1, side=side))


ENTRY = ZooEntry(
    name="lenet",
    summary="LeNet-5 on generated images, 28 x 28 pixels",
    source="LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998",
    build=build,
    batch_size=64,
    lr=0.01,
    options=(Option("image_size", 28, "side of the square images, pixels", minimum=12),),
)
