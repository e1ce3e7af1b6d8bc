"""Benchmarks of collectives: one timing harness, one report, and the libraries people would otherwise use."""
