"""From a call to the algorithm and launch that serve it, identical on all ranks."""
