"""Model kernels for GPUs, in Triton."""
