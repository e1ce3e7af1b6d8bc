"""Model kernels: matrix products, attention, norms and sampling."""
