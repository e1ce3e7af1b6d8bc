"""What all kernels share: words, floats, intrinsics and launches."""
