"""Places in which Python programs keep state: each holds one value, which a step reads and writes.

A holder is made anew for each run: ``make(first)`` returns two functions, one that reads the value and one that puts
another one there, as user code would. `NUMBERS` hold whole numbers only.
"""

from loops.holders import elsewhere, objects, whole_numbers
from loops.holders.registry import HOLDERS, NUMBERS, REFUSED_COUNTERS, REFUSED_DRAWS, Made

__all__ = ["HOLDERS", "NUMBERS", "REFUSED_COUNTERS", "REFUSED_DRAWS", "Made", "elsewhere", "objects", "whole_numbers"]
