"""Communication and computation at once."""
