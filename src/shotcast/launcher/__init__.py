"""Starting the ranks of a job on one machine, and watching over them."""
