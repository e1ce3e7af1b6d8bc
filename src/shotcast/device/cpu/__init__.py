"""The basis of the compiled CPU kernels: compilation, atomics, float formats, vectors and threads."""
