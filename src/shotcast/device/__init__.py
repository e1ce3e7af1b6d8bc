"""The foundation of all kernels: intrinsics, words, float formats, compilation and launches."""
