"""Measurements of Hocket itself, each against its baseline in the same run."""
