"""Transport of bytes between ranks: collectives as Triton kernels and as compiled host code."""
