"""Collectives followed through their rounds: rank by rank, and message by message."""
