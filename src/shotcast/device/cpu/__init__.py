"""What compiled host code shares: compilation, atomics, float formats, vectors, threads."""
