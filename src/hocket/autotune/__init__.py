"""From an ordinary training step to the fastest way of making it: watch, capture, verify, profile, compare, decide."""
