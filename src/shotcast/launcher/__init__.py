"""Launching the ranks of a job on one machine, or joining ranks started elsewhere, and watching over them."""
