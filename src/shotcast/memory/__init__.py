"""Symmetric memory: one owner of every byte that ranks share."""
