"""Tests of the package `benchmarks`; a folder of tests with that name would shadow it."""
