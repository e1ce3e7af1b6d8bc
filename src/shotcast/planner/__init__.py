"""From measured kernels to whole jobs: the time of a model's step in each layout, and the best layout for a target."""
