"""From a call to the algorithm and launch that serve it, alike on all ranks."""
