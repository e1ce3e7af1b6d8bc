"""Model kernels: matmuls, attention, norms and sampling."""
