"""The kernels that models are computed with: products, attention, norms, sampling."""
