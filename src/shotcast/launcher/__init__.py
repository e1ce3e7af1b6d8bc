"""Start the ranks of a job on one machine, and watch over them."""
