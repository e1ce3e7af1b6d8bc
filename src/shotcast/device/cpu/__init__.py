"""The foundation of compiled CPU kernels: compilation, atomics, float formats, vectors and threads."""
