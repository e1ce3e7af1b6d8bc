"""What Triton kernels share: intrinsics of the machine, 32-bit words, FP8 conversions, the launch."""
