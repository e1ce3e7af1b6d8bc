"""Model kernels for CPUs, as host code that numba compiles."""
