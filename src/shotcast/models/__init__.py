"""Models of the Llama family, and the checkpoints they are read from."""
