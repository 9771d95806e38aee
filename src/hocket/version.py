"""The version of Hocket, for the package and for what it remembers."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
