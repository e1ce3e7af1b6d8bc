"""Benchmarks of collectives and of the engine: one timing harness, one report, and the libraries to compare with."""
