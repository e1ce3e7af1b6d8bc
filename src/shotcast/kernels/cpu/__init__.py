"""Model kernels for CPUs, compiled by numba."""
