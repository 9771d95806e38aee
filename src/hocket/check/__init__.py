"""Is this plan legal? Asked before anything runs. No torch."""

from hocket.check.legal import check

__all__ = ["check"]
