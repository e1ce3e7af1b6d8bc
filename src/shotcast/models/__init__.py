"""Language models of the Llama kind, and the checkpoints that they are read from."""
