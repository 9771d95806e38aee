"""Targets of the fuse bench: entries of the zoo in suitable sizes, and one training step of B of them at once.

The same lines train one plain model and B fused ones: a `Net` is either, and knows how its loss is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from benchmarks.jax_steps import jax_peer
from hocket import optim as fused_optim
from hocket import zoo
from hocket.fusion import fuse
from hocket.fusion.model import Array
from hocket.session import Schedule, schedule


@dataclass(frozen=True)
class Training:
    """Settings of SGD with momentum or Adam. With `own_rates` each model has a rate and a weight decay, as in a search.

    With `precision` "bfloat16" or "float16" under autocast, the latter with a `GradScaler`.
    """

    precision: str = "float32"
    optimizer: str = "sgd"
    own_rates: bool = False

    @property
    def amp(self) -> bool:
        """True if forwards run under autocast."""
        return self.precision != "float32"

    def autocast(self, device: str) -> torch.autocast:
        """Return the context of forwards."""
        return torch.autocast(device, torch.float16 if self.precision == "float16" else torch.bfloat16, self.amp)

    def scaler_of(self, model: nn.Module, device: str) -> Any:
        """The scaler of a model's losses, or of fused ones. None where none is needed."""
        if self.precision != "float16":
            return None
        if isinstance(model, Array):
            return fused_optim.GradScaler(model.num_models, device)
        return torch.amp.GradScaler(device)

    def rates(self, first: int, size: int) -> tuple[list[float], list[float]]:
        """Rates and weight decays of these models."""
        if not self.own_rates:
            return [1e-3] * size, [0.0] * size
        numbers = range(first, first + size)
        return [1e-3 * (1 + n / 8) for n in numbers], [1e-4 * (1 + n % 4) for n in numbers]

    def optimizer_of(self, model: nn.Module, first: int) -> Any:
        """The optimizer of model number `first`, or of the fused models from that number on."""
        is_fused = isinstance(model, Array)
        options: dict[str, Any] = {"momentum": 0.9} if self.optimizer == "sgd" else {}
        rates, decays = self.rates(first, model.num_models if isinstance(model, Array) else 1)
        if self.own_rates:
            options |= (
                {"lr": rates, "weight_decay": decays} if is_fused else {"lr": rates[0], "weight_decay": decays[0]}
            )
        else:
            options["lr"] = rates[0]
        library: Any = fused_optim if is_fused else torch.optim
        return {"sgd": library.SGD, "adam": library.Adam}[self.optimizer](model.parameters(), **options)


SHARED = Training()


class Net:
    """A plain model or B fused ones, and its optimizer."""

    def __init__(self, model: Any, training: Training, first: int = 0) -> None:
        self.model: Any = model
        self.device = next(model.parameters()).device.type
        self.training = training
        self.scaler = training.scaler_of(model, self.device)
        self.optimizer = training.optimizer_of(model, first)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.training.autocast(self.device):
            return self.model(*args, **kwargs)

    def loss(self, fn: Callable[..., Tensor], inputs: Any, *targets: Tensor) -> Tensor:
        """The loss, or B losses, of what the model gives for these inputs."""
        if not isinstance(self.model, Array):
            return self.loss_of(fn, self(**inputs) if isinstance(inputs, dict) else self(inputs), *targets)
        with self.training.autocast(self.device):
            return self.model.losses(partial(_in_single, fn) if self.training.amp else fn, inputs, *targets)

    def loss_of(self, fn: Callable[..., Tensor], out: Any, *targets: Tensor) -> Tensor:
        """The loss, or B losses, of this output, in single precision, as torch's losses are under autocast."""
        fn = partial(_in_single, fn) if self.training.amp else fn
        return self.model.loss(fn, out, *targets) if isinstance(self.model, Array) else fn(out, *targets)

    def backward(self, losses: Tensor) -> None:
        """Each model's gradients of its own loss, scaled where that is needed."""
        (losses if self.scaler is None else self.scaler.scale(losses)).sum().backward()

    def update(self) -> None:
        """One step of the optimizer."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def _in_single(fn: Callable[..., Tensor], out: Any, *targets: Tensor) -> Tensor:
    return fn(out.float() if isinstance(out, Tensor) else out, *targets)


# The backends of contenders that fuse:
BACKENDS = {"vmap": "vmap", "fused": "rule", "auto": "auto", "scheduled": "auto", "close": "auto"}
NOISE_WIDTH = 100  # of DCGAN's generator
# One batch over and over, or classes that nothing blurs, and after some ten steps those of 64 models with high rates
# are told apart so well that thousands of gradients are denormal numbers, on which a step takes half as long again.
NUM_BATCHES = 16
WRONG_LABELS = 0.1  # of all


@dataclass(frozen=True)
class Target:
    """An entry of the zoo, and how large: its own batch size if None.

    It is trained as a "classifier", by "words" (scores for each token), by its "own" loss, or as a "gan" (a generator
    and a discriminator, each with its optimizer).
    """

    entry: str
    batch_size: int | None = None
    options: tuple[tuple[str, int], ...] = ()
    kind: str = "classifier"

    def models(self, seed: int, device: str) -> list[nn.Module]:
        """The models of one job."""
        return list(self._job(seed, device, num_batches=1).models)

    def batches(self, device: str, seed: int = 0) -> list[Any]:
        """Return the batches that steps take in turns, by a seed. Classifiers get some wrong labels."""
        batches = list(self._job(seed, device, NUM_BATCHES).batches)
        if self.kind != "classifier":
            return batches
        return [(inputs, _partly_wrong(labels, number)) for number, (inputs, labels) in enumerate(batches)]

    def has_images(self) -> bool:
        """Return True if there are convolutions, for which the memory format matters."""
        convolutions = (nn.Conv2d, nn.ConvTranspose2d)
        return any(isinstance(each, convolutions) for model in self.models(0, "cpu") for each in model.modules())

    def _job(self, seed: int, device: str, num_batches: int) -> Any:
        size: dict[str, Any] = {"batch_size": self.batch_size, **dict(self.options)}
        return zoo.load(self.entry, seed=seed, num_batches=num_batches, device=device, **size)


def _partly_wrong(labels: Tensor, seed: int) -> Tensor:
    drawn = torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(drawn.to(labels.device) < WRONG_LABELS, labels.flip(0), labels)


_TEXT = (("width", 64), ("depth", 2), ("steps", 32), ("vocab", 1000))
TARGETS = {
    "mlp-32": Target("mlp", options=(("width", 32),)),
    "mlp-128": Target("mlp", options=(("width", 128),)),
    "digits-cnn": Target("digits-cnn"),
    "pointnet-cls": Target("pointnet-cls", 8, (("points", 256),)),
    # As searches of `benchmarks.tune` have.
    "pointnet-tuned": Target("pointnet-cls", 8, (("points", 64), ("width", 16))),
    "pointnet-seg": Target("pointnet-seg", 8, (("points", 256),)),
    "dcgan": Target("dcgan", 8, (("image_size", 32), ("width", 16)), "gan"),
    "transformer-2x64": Target("transformer", 4, _TEXT, "words"),
    "bert-2x64": Target("bert-medium", 4, _TEXT, "own"),
    "resnet20": Target("resnet20", 16),
    "mobilenet-v2": Target("mobilenet-v2", 4, (("image_size", 64),)),
}


# HFTA's three and its secondary four (Appendix H), in its sizes: for GPUs.
_CIFAR = (("image_size", 32),)
PAPER = {
    "pointnet-cls-paper": Target("pointnet-cls"),
    "pointnet-seg-paper": Target("pointnet-seg"),
    "dcgan-paper": Target("dcgan", kind="gan"),
    "resnet18-paper": Target("resnet18", 128, _CIFAR),
    "mobilenet-v3-large-paper": Target("mobilenet-v3-large", 1024, _CIFAR),
    "transformer-2x128-paper": Target(
        "transformer", 32, (("width", 128), ("depth", 2), ("heads", 2), ("steps", 32), ("vocab", 33278)), "words"
    ),
    "bert-medium-paper": Target("bert-medium", 32, (("steps", 32),), "own"),
}


def named(name: str) -> Target:
    """One of those above, or a zoo entry that classifies, in its own size."""
    return TARGETS.get(name) or PAPER.get(name) or Target(name)


@dataclass(frozen=True)
class Step:
    """One training step of B models: the fused ones in it, what planned it, and how another process times it."""

    run: Callable[[], Any]
    arrays: tuple[Array, ...] = ()
    schedule: Schedule | None = None
    times_s: Callable[[int], list[float]] | None = None

    def __call__(self, _: Any = None) -> None:
        """Take the step."""
        self.run()

    def chosen(self) -> list[str]:
        """Return the choices of ``backend="auto"`` so far, in order, and the verdict of the schedule."""
        chosen = [str(choice.winner) for array in self.arrays for choice in array.choices]
        return chosen + ([f"{self.schedule.verdict}: {self.schedule.why}"] if self.schedule else [])

    def is_settled(self) -> bool:
        """Return True if ``backend="auto"`` has made all choices."""
        return all(choice.is_settled for array in self.arrays for choice in array.choices)

    def close(self) -> None:
        """End the lanes' threads, which would slow other contenders down. The next step starts them again."""
        if self.schedule is not None:
            self.schedule.close()


def step_of(name: str, target: Target, size: int, device: str, training: Training = SHARED, first: int = 0) -> Step:
    """Return a training step of B models by a contender. A scheduled one has decided already.

    The number of the `first` model is the seed of its weights and of its own rate.
    """
    numbers = range(first, first + size)
    jobs = [target.models(number, device) for number in numbers]
    batches = target.batches(device)
    if name == "channels-last":
        layout: Any = {"memory_format": torch.channels_last}
        jobs = [[model.to(**layout) for model in models] for models in jobs]
        batches = pytree.tree_map_only(Tensor, lambda x: x.contiguous(**layout) if x.ndim == 4 else x, batches)
    if name == "jax":
        peer = jax_peer([model for (model,) in jobs], batches, training.optimizer, *training.rates(first, size))
        return Step(lambda: peer.times_s(1), times_s=peer.times_s)
    train = partial(_train, target.kind)
    if name in ("serial", "channels-last", "lanes"):
        loop = [[Net(model, training, n) for model in models] for n, models in zip(numbers, jobs, strict=True)]

        def one_after_another(batch: Any) -> list[Tensor]:
            return [train(nets, batch) for nets in loop]

        if name == "lanes":
            return _scheduled(one_after_another, [net for nets in loop for net in nets], batches)
        return _in_turns(one_after_another, batches)
    # A discriminator sees the same real images in all models, and other generated ones in each: that is seen by shape.
    shared = None if target.kind == "gan" else True
    fused = [fuse(list(models), backend=BACKENDS[name], shared=shared) for models in zip(*jobs, strict=True)]
    nets = [Net(model, training, first) for model in fused]
    if name in ("scheduled", "close"):
        return _scheduled(partial(train, nets), nets, batches, tuple(fused), "close" if name == "close" else "bitwise")
    return _in_turns(partial(train, nets), batches, tuple(fused))


def _in_turns(
    step: Callable[[Any], Any], batches: Sequence[Any], arrays: tuple[Array, ...] = (), fast: Schedule | None = None
) -> Step:
    """A step that takes one batch after another."""
    turns = cycle(batches)
    return Step(lambda: step(next(turns)), arrays, fast)


def _scheduled(
    step: Callable[[Any], Any],
    nets: list[Net],
    batches: Sequence[Any],
    arrays: tuple[Array, ...] = (),
    numerics: str = "bitwise",
) -> Step:
    """Return the scheduled step once it has decided, with ``numerics="close"`` on compiled forms, too."""
    models, optimizers = [net.model for net in nets], [net.optimizer for net in nets]
    fast = schedule(step, models, optimizers, numerics=numerics, cache=False)
    step_once = _in_turns(fast, batches, arrays, fast)
    for is_due in (lambda: True, lambda: numerics == "close" and fast.compile()):
        if is_due():
            while not fast.decided:
                step_once()
    return step_once


def _train(kind: str, nets: list[Net], batch: Any) -> Tensor:
    """One training step of one job's nets on a batch, which gives their loss."""
    if kind == "gan":
        return _gan(nets, batch)
    (net,) = nets
    net.optimizer.zero_grad()
    losses = net.loss(LOSSES[kind], *((batch,) if kind == "own" else batch))
    net.backward(losses)
    net.update()
    return losses.detach()


def _cross_entropy_of_words(scores: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), words.flatten())


def _loss_of(out: Any) -> Tensor:
    loss: Tensor = out.loss
    return loss


LOSSES: dict[str, Callable[..., Tensor]]
LOSSES = {"classifier": functional.cross_entropy, "words": _cross_entropy_of_words, "own": _loss_of}


def _gan(nets: list[Net], images: Tensor) -> Tensor:
    generator, discriminator = nets
    real = torch.ones(len(images), device=images.device)
    noise = torch.randn(len(images), NOISE_WIDTH, 1, 1, device=images.device)
    loss = functional.binary_cross_entropy
    discriminator.optimizer.zero_grad()
    discriminator.backward(discriminator.loss(loss, images, real))
    fake = generator(noise)
    discriminator.backward(discriminator.loss(loss, fake.detach(), 1 - real))
    discriminator.update()
    generator.optimizer.zero_grad()
    fooled = discriminator.loss_of(loss, discriminator(fake), real)
    generator.backward(fooled)
    generator.update()
    return fooled.detach()
