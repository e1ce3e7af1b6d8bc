"""The benchmark of overlap: products and messages one after the other and at once, beside other libraries."""
