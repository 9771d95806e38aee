"""Benches that reproduce the papers and our own tables: ``python -m benchmarks NAME``, from the root of the repository.

Not part of the installed package. Each bench measures Hocket against its baseline in the same run. What they wrote on
our machines is in ``results/``.
"""
