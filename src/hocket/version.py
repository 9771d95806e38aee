"""The version of Hocket, for the package and for what it remembers."""

VERSION = "0.1.0"
