"""Times of collectives that users need not ask for: fused with a norm, with work between calls, and of the host."""
