"""The role, the parameter and the name of each op of a step.

The backward of a layer is three tasks (TurboDL, section III): the *activation gradient*, which the layer below waits
for, and the *weight* and *bias gradients*, which only the update waits for. Capture knows the phase of each op. Within
the backward, an op is a weight (or bias) gradient when all it makes ends as the gradient of a parameter, by way of
views, sums and casts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hocket.tracing.lowering.calls import AnnotatedCall

# Ops that only add up, cast or copy what was made before them: a gradient that passes through stays what it is.
_GATHERING = ("add", "add_", "clone", "_to_copy", "contiguous", "copy_")


@dataclass(frozen=True)
class Described:
    """For each piece: its role (one of `hocket.ir.ROLES`), the parameter it updates (or ""), and a unique name."""

    roles: list[str]
    owners: list[str]
    names: list[str]


def describe(
    pieces: Sequence[AnnotatedCall], root: Sequence[int | None], inputs: dict[int, Any], gradients: dict[int, Any]
) -> Described:
    """Say of each piece what it is for. `gradients` maps slots to the gradient that they hold at the end."""
    owned = {slot: source.owner for slot, source in inputs.items() if source.kind == "gradient"}
    owned.update({slot: gradient.owner for slot, gradient in gradients.items()})
    owners = _owners(pieces, inputs, owned)
    roles = _roles(pieces, root, inputs, owned)
    return Described(roles, owners, _names(pieces, owners, roles))


def _roles(
    pieces: Sequence[AnnotatedCall], root: Sequence[int | None], inputs: dict[int, Any], gradients: dict[int, str]
) -> list[str]:
    parameters = {root[slot] for slot, source in inputs.items() if source.kind == "parameter"}
    result: list[str] = []
    made_late: set[int] = set()
    for piece in pieces:
        note = piece.note
        role = {"backward": "activation_grad", "update": "update"}.get(note.phase, "forward")
        if role != "update" and note.writes & parameters:
            role = "update"
        elif role == "forward" and not note.layer and made_late.intersection(piece.call.reads):
            # Outside of any module, on gradients: clipping, scaling.
            role = "other"
        if role in ("activation_grad", "other"):
            made_late.update(_fills(piece))
        result.append(role)
    for position, owners in _parameter_gradients(pieces, result, root, gradients).items():
        biases = [owner.rpartition(".")[2].startswith("bias") for owner in owners]
        result[position] = "bias_grad" if all(biases) else "weight_grad"
    return result


def _parameter_gradients(
    pieces: Sequence[AnnotatedCall], found: list[str], root: Sequence[int | None], gradients: dict[int, str]
) -> dict[int, set[str]]:
    """Positions of the pieces whose results all end as gradients, with the parameters."""
    maker: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for position, piece in enumerate(pieces):
        maker.update(dict.fromkeys(_fills(piece), position))
        for slot in _reads(piece):
            readers.setdefault(slot, []).append(position)
    result: dict[int, set[str]] = {}
    waiting = [(maker[slot], owner) for slot, owner in gradients.items() if slot in maker]
    # An addition to a gradient in place makes no new value: from the end, it comes before the value that it changes.
    for position, piece in enumerate(pieces):
        waiting += [(position, gradients[s]) for s in _reads(piece) if s in gradients and root[s] in piece.note.writes]
    while waiting:
        position, owner = waiting.pop()
        piece = pieces[position]
        if found[position] != "activation_grad":
            continue
        if position in result:
            result[position].add(owner)
            continue
        fills = _fills(piece)
        viewed = {slot for view in piece.views for slot in view.reads}
        inner = [reader for slot in fills for reader in readers.get(slot, ())]
        if any(found[reader] == "activation_grad" and reader not in result for reader in inner):
            continue
        if any(slot not in gradients and slot not in viewed and not readers.get(slot) for slot in fills):
            continue
        result[position] = {owner}
        if piece.kernel in _GATHERING or _only_moves(piece):
            waiting += [(maker[slot], owner) for slot in _reads(piece) if slot in maker]
    return result


def _only_moves(piece: AnnotatedCall) -> bool:
    returns = [root for root in piece.note.returns if root is not None]
    return bool(returns) and piece.note.reads.issuperset(returns) and not piece.note.writes


def _owners(pieces: Sequence[AnnotatedCall], inputs: dict[int, Any], gradients: dict[int, str]) -> list[str]:
    """For ops of the update the parameter it is about, known by the state or the gradient they start from."""
    owner = {slot: source.owner for slot, source in inputs.items() if source.owner}
    owner.update(gradients)
    result = []
    for piece in pieces:
        found = {owner[slot] for slot in _reads(piece) if slot in owner} if piece.note.phase == "update" else set()
        name = found.pop() if len(found) == 1 else ""
        if name:
            owner.update(dict.fromkeys(_fills(piece), name))
        result.append(name)
    return result


def _names(pieces: Sequence[AnnotatedCall], owners: Sequence[str], roles: Sequence[str]) -> list[str]:
    """Unique, without white space and commas: ``layer/kernel``, ``parameter/update``."""
    count: dict[str, int] = {}
    taken: set[str] = set()
    result = []
    for piece, owner, role in zip(pieces, owners, roles, strict=True):
        if role == "update" and owner:
            name = f"{owner}/update"
        else:
            kernel = f"{piece.kernel}.{piece.part}" if piece.part else piece.kernel
            name = f"{piece.note.layer}/{kernel}" if piece.note.layer else kernel
        name = "".join("_" if c.isspace() or c == "," else c for c in name)
        unique = name
        while unique in taken:
            count[name] = count.get(name, 0) + 1
            unique = f"{name}.{count[name]}"
        taken.add(unique)
        result.append(unique)
    return result


def _fills(piece: AnnotatedCall) -> list[int]:
    return [slot for call in (piece.call, *piece.views) for slot in call.outs.values()]


def _reads(piece: AnnotatedCall) -> list[int]:
    own = set(_fills(piece))
    calls = (piece.call, *piece.views)
    return [slot for slot in dict.fromkeys(s for call in calls for s in call.reads) if slot not in own]
