"""Start the ranks of a job on one machine, or join those that something else started, and watch over them."""
