"""The foundation of the Triton kernels: intrinsics, words, float formats and launches."""
