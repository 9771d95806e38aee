"""Random model classes whose forwards look at things, as source text, and how they are fused and called."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from loops.held_numbers import HOLDERS, PLACEMENTS, held_number
from loops.looks import FRAMES, IMPORTS, PIECES, USES, VALUES, Piece

WAYS = ("forward", "tuple", "dict", "loss", "losses")
BACKBONES = {
    "linear": ("", "h = torch.tanh(self.a(x))"),
    "norm": ("self.norm = nn.LayerNorm(6)", "h = self.norm(F.gelu(self.a(x)))"),
    "batch norm": ("self.norm = nn.BatchNorm1d(6)", "h = self.norm(F.elu(self.a(x)))"),
    "convolution": ("self.conv = nn.Conv1d(1, 6, 3)", "h = torch.tanh(self.a(x) + self.conv(x[:, None]).mean(2))"),
}


@dataclass(frozen=True)
class Use:
    """A piece in a program: which frame uses it, and at which tensor it looks."""

    piece: Piece
    frame: str = "if"
    value: str = "x"

    def text(self, what: str, k: int) -> str:
        """A part of the piece as source; `k` is its number in the program."""
        piece = self.piece
        text = getattr(piece, what)
        if what == "lines" and not text:
            frame = FRAMES[self.frame] if piece.test else USES[self.frame]
            text = frame.replace("{t}", piece.test).replace("{r}", piece.number)
        for name, value in {"{k}": str(k), "{v}": self.value, "{new}": "(0.5 + 0.25 * (n % 5))"}.items():
            text = text.replace(name, value)
        return text


@dataclass(frozen=True)
class Call:
    """One call: rows of the batch, numbers of the uses whose change comes before it, and the modes around it."""

    rows: int = 5
    changes: tuple[int, ...] = ()
    training: bool = True
    grad: bool = True
    autocast: bool = False


@dataclass(frozen=True)
class Program:
    """A model class with some looks, how its models are fused, and how they are called."""

    uses: tuple[Use, ...]
    calls: tuple[Call, ...]
    seed: int = 0
    num_models: int = 2
    backend: str = "auto"
    way: str = "forward"
    shared: bool = True
    seeds: bool = False
    input_grad: bool = False
    backbone: str = "linear"

    @property
    def source(self) -> str:
        """The user's file."""
        parts: dict[str, list[str]] = {what: [] for what in ("top", "init", "lines")}
        changes = []
        for k, use in enumerate(self.uses):
            for what, texts in parts.items():
                texts += use.text(what, k).splitlines()
            lines = use.text("change", k).splitlines() or ["pass"]
            changes += [f"def change_{k}(models, held, n):", *_indented(lines, 1), ""]
        init, body = BACKBONES[self.backbone]
        out = {"tuple": "(out, h.mean(-1))", "dict": "{'out': out, 'deep': [h.sum(-1)]}"}.get(self.way, "out")
        made = ["self.a = nn.Linear(4, 6)", *filter(None, [init]), "self.t = nn.Linear(6, 3)"]
        made.append("self.register_buffer('scale', torch.randn(5, 4))")
        forward = [body, *parts["lines"], "out = self.t(torch.tanh(h.to(self.t.weight.dtype)))", f"return {out}"]
        lines = [IMPORTS, *parts["top"], "", "class Model(nn.Module):", "    def __init__(self, i, held):"]
        lines += _indented(["super().__init__()", *made, *parts["init"]], 2)
        lines += ["", "    def forward(self, x):", *_indented(forward, 2), "", *changes]
        return "\n".join(lines) + "\n"


def _indented(lines: list[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]


def program_of(pieces: Sequence[Piece], number: int, backend: str = "auto") -> Program:
    """A program of these pieces, `number` of all, whose other choices go by its number."""
    changes = tuple(range(len(pieces)))
    calls = (Call(), Call(changes=changes), Call(4), Call(5, changes, training=False), Call(grad=False))
    frames = ("if", "ternary", "sum", "except")
    uses = tuple(
        Use(piece, "times" if piece.number else frames[(number + k) % 4], VALUES[(number + k) % 2])
        for k, piece in enumerate(pieces)
    )
    draws = any(piece.draws for piece in pieces)
    return Program(uses, (*calls, Call(changes=changes)), number, 2, backend, WAYS[number % 5], number % 3 > 0, draws)


def looking_program(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    uses = tuple(_use(rng) for _ in range(rng.choice((1, 1, 2, 3))))
    changing = [k for k, use in enumerate(uses) if use.piece.change]
    is_exact = any(use.piece.group in ("values", "parameters") for use in uses)
    backbone = rng.choice(list(BACKBONES))
    calls = [Call()]
    for _ in range(rng.randrange(2, 6)):
        changes = tuple(k for k in changing if rng.random() < 0.5)
        modes = (
            rng.random() < 0.8,
            rng.random() < 0.85,
            not is_exact and "batch" not in backbone and rng.random() < 0.04,
        )
        calls.append(Call(rng.choice((5, 5, 5, 4, 6)), changes, *modes))
    num_models, way, shared = rng.choice((1, 2, 2, 3)), rng.choice(WAYS), rng.random() < 0.6
    backend = rng.choice(("auto", "auto", "auto", "auto", "rule", "vmap"))
    seeds = rng.random() < (0.5 if any(use.piece.draws for use in uses) else 0.05)
    input_grad = shared and way != "losses" and rng.random() < 0.2
    return Program(uses, tuple(calls), seed, num_models, backend, way, shared, seeds, input_grad, backbone)


def _use(rng: random.Random) -> Use:
    piece: Piece | None = None
    if rng.random() < 0.3:
        while piece is None:
            piece = held_number(rng.choice(HOLDERS), rng.choice(list(PLACEMENTS)))
    else:
        group = rng.choice(sorted({piece.group for piece in PIECES}))
        piece = rng.choice([each for each in PIECES if each.group == group])
    return Use(piece, rng.choice(list(USES if piece.number else FRAMES)), rng.choice(VALUES))
