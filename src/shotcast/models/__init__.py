"""Llama-style language models, and the checkpoints they are loaded from."""
