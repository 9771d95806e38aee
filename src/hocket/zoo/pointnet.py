"""PointNet: classification of point clouds, and segmentation, which assigns a part to each point.

Source: C. Qi, H. Su, K. Mo, L. Guibas, "PointNet: Deep Learning on Point Sets for 3D Classification and Segmentation",
2017, with the input transform, without the feature transform. Nearly all work is in convolutions one point wide and in
the batch norms after them, so a step is bound by memory, and one model leaves a large device mostly idle.

    job = load("pointnet-cls", points=256, batch_size=4)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from hocket.job import Job
from hocket.zoo import data
from hocket.zoo.base import Request
from hocket.zoo.training import classifier_job

CLASSES = 16  # of ShapeNet's parts data set, on which the paper trains
PARTS = 4


def _pointwise(*widths: int) -> nn.Sequential:
    """Convolutions one point wide, each with batch norm and ReLU, ``[batch, widths[0], points]``."""
    return _layers(lambda before, after: nn.Conv1d(before, after, 1), widths)


def _dense(*widths: int) -> nn.Sequential:
    return _layers(nn.Linear, widths)


def _layers(kind: Callable[[int, int], nn.Module], widths: tuple[int, ...]) -> nn.Sequential:
    pairs = pairwise(widths)
    return nn.Sequential(*(m for old, new in pairs for m in (kind(old, new), nn.BatchNorm1d(new), nn.ReLU())))


class Transform(nn.Module):
    """A 3 x 3 matrix for each cloud, near the unit matrix: ``[batch, 3, points]`` to ``[batch, 3, 3]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = _pointwise(3, width, 2 * width, 16 * width)
        self.dense = _dense(16 * width, 8 * width, 4 * width)
        self.matrix = nn.Linear(4 * width, 9)

    def forward(self, points: Tensor) -> Tensor:
        features = self.features(points).amax(2)
        matrix = self.matrix(self.dense(features)).view(-1, 3, 3)
        return matrix + torch.eye(3, dtype=points.dtype, device=points.device)


class Features(nn.Module):
    """Clouds ``[batch, 3, points]`` to a feature of each point, and one of the whole cloud."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.transform = Transform(width)
        self.local = _pointwise(3, width)
        self.middle = _pointwise(width, 2 * width)
        self.last = nn.Sequential(nn.Conv1d(2 * width, 16 * width, 1), nn.BatchNorm1d(16 * width))

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        turned = torch.bmm(points.transpose(2, 1), self.transform(points)).transpose(2, 1)
        local = self.local(turned)
        return local, self.last(self.middle(local)).amax(2)


class Classifier(nn.Module):
    """Clouds ``[batch, 3, points]`` to ``[batch, 16]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = Features(width)
        self.dense = _dense(16 * width, 8 * width)
        self.last = nn.Sequential(
            nn.Linear(8 * width, 4 * width), nn.Dropout(0.3), nn.BatchNorm1d(4 * width), nn.ReLU()
        )
        self.scores = nn.Linear(4 * width, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        _, whole = self.features(points)
        return self.scores(self.last(self.dense(whole)))


class Segmenter(nn.Module):
    """Clouds ``[batch, 3, points]`` to ``[batch, 4, points]``: every point sees its own feature and the cloud's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = Features(width)
        self.head = nn.Sequential(
            _pointwise(17 * width, 8 * width, 4 * width, 2 * width), nn.Conv1d(2 * width, PARTS, 1)
        )

    def forward(self, points: Tensor) -> Tensor:
        local, whole = self.features(points)
        spread = whole.unsqueeze(2).expand(-1, -1, points.shape[2])
        return self.head(torch.cat([spread, local], dim=1))


def build_classifier(request: Request) -> Job:
    """Generated clouds ``[batch, 3, points]`` with a label each."""
    batches = [(clouds, labels) for clouds, labels, _ in _clouds(request)]
    return classifier_job(request, Classifier(request.size["width"]), batches)


def build_segmenter(request: Request) -> Job:
    """Generated clouds ``[batch, 3, points]`` with a part for each point, ``[batch, points]``."""
    batches = [(clouds, parts) for clouds, _, parts in _clouds(request)]
    return classifier_job(request, Segmenter(request.size["width"]), batches)


def _clouds(request: Request) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Ellipsoids: the label tells how long the axes are, and the part is the quadrant a point lies in."""
    drawn = data.generator(request)
    axes = torch.rand(data.NUM_LABELS, 3, 1, generator=drawn) + 0.2
    batches = []
    for _ in range(request.num_batches):
        labels = torch.randint(data.NUM_LABELS, (request.batch_size,), generator=drawn)
        directions = torch.randn(request.batch_size, 3, request.size["points"], generator=drawn)
        clouds = functional.normalize(directions, dim=1) * axes[labels]
        parts = (clouds[:, 0] > 0).long() + 2 * (clouds[:, 1] > 0).long()
        batches.append((clouds.to(request.device), labels.to(request.device), parts.to(request.device)))
    return batches
