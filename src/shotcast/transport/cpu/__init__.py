"""The collectives of CPU ranks, as host code that numba compiles."""
