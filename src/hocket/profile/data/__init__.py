"""Curve sets that come with Hocket, and how those that were not recorded were built."""
