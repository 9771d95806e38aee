"""Runs any plan: on Python threads (the reference), later on native lanes and on CUDA streams."""
