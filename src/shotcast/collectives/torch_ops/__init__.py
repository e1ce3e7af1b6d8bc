"""The calls as PyTorch operators: their derivatives, and their order in compiled graphs."""
