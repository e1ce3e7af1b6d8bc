"""The collectives as Triton kernels: compiled for NVIDIA GPUs, or run by Triton's interpreter over shared memory."""
