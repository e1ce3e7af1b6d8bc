"""Benchmarks of the collectives and the engine: one timing harness, one report, and the libraries to compare with."""
