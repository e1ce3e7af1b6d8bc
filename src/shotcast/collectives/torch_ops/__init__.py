"""The calls as PyTorch knows them: operators, derivatives, and their order in compiled graphs."""
