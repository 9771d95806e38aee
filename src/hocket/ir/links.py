"""`Link`, a connection that carries transfers, and `NetworkCard`, whose rate links share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hocket.errors import FormatError
from hocket.ir._fields import Reader, require_finite

MAX_CHANNELS = 4096


@dataclass(frozen=True)
class Link:
    """A one-way connection on which a transfer takes ``latency_us + bytes / bytes_per_s``.

    `channels` transfers fit side by side, each at full bandwidth, and without a limit if it is None. `cards` names the
    network cards that the link passes. Links that pass the same card share its rate.
    """

    src: str
    dst: str
    bytes_per_s: float
    latency_us: float = 0.0
    channels: int | None = 1
    cards: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "cards", tuple(self.cards))

    @property
    def channel(self) -> str:
        """The device of a lane of kind ``channel`` on this link: ``src->dst``."""
        return f"{self.src}->{self.dst}"

    def duration_us(self, size_bytes: float) -> float:
        return self.latency_us + size_bytes / self.bytes_per_s * 1e6


@dataclass(frozen=True)
class NetworkCard:
    """One direction of a network card: all transfers through it together are no faster than `bytes_per_s`."""

    name: str
    bytes_per_s: float


def read_link(reader: Reader) -> Link:
    """A link of a ``hocket-machine/1`` file."""
    reader.only("src", "dst", "bytes_per_s", "latency_us", "channels", "cards")
    channels = reader.get("channels", 1)
    return Link(
        src=reader["src"].text(),
        dst=reader["dst"].text(),
        bytes_per_s=reader["bytes_per_s"].number(),
        latency_us=reader.get("latency_us", 0.0).duration_us(),
        channels=None if channels.value is None else channels.integer(1),
        cards=tuple(card.text() for card in reader.get("cards", []).elements()),
    )


def read_card(reader: Reader) -> NetworkCard:
    """A network card of a ``hocket-machine/1`` file."""
    reader.only("name", "bytes_per_s")
    return NetworkCard(reader["name"].text(), reader["bytes_per_s"].number())


def wires_document(links: Sequence[Link], cards: Sequence[NetworkCard]) -> dict[str, Any]:
    """The fields of a ``hocket-machine/1`` file for links and cards."""
    document: dict[str, Any] = {
        "links": [
            {
                "src": link.src,
                "dst": link.dst,
                "bytes_per_s": link.bytes_per_s,
                "latency_us": link.latency_us,
                "channels": link.channels,
                **({"cards": list(link.cards)} if link.cards else {}),
            }
            for link in links
        ]
    }
    if cards:
        document["cards"] = [{"name": card.name, "bytes_per_s": card.bytes_per_s} for card in cards]
    return document


def check_wires(links: Sequence[Link], cards: Sequence[NetworkCard], source: str) -> None:
    """Return if links and cards of a machine fit together, or raise a `FormatError` that names the field."""
    names: set[str] = set()
    for position, card in enumerate(cards):
        if not card.name or card.name in names:
            raise FormatError(source, f"cards[{position}].name", f"expected a name of its own, got {card.name!r}")
        names.add(card.name)
        require_finite(card.bytes_per_s, source, f"cards[{position}].bytes_per_s", positive=True)
    ends: set[tuple[str, str]] = set()
    for position, link in enumerate(links):
        if (link.src, link.dst) in ends:
            raise FormatError(source, f"links[{position}]", f"duplicate link from {link.src!r} to {link.dst!r}")
        ends.add((link.src, link.dst))
        require_finite(link.bytes_per_s, source, f"links[{position}].bytes_per_s", positive=True)
        require_finite(link.latency_us, source, f"links[{position}].latency_us")
        if link.channels is not None and not 1 <= link.channels <= MAX_CHANNELS:
            expected = f"expected at least 1 and at most {MAX_CHANNELS}, or null"
            raise FormatError(source, f"links[{position}].channels", f"{expected}, got {link.channels!r}")
        for name in link.cards:
            if name not in names:
                raise FormatError(source, f"links[{position}].cards", f"names a missing card {name!r}")
