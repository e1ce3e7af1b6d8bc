"""From measured kernels to whole jobs: what a step of a model takes in each layout, and which layout suits a target."""
