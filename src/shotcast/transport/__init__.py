"""How bytes move between ranks: collectives as Triton kernels and as compiled host code."""
