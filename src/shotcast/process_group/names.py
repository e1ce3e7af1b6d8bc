"""Names registered with PyTorch."""

from __future__ import annotations

BACKEND = "shotcast"
"""The name of the backend."""
DEVICES = ("cpu", "cuda")
"""Device types that the backend accepts."""
