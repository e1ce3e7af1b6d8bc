"""Names registered with PyTorch."""

from __future__ import annotations

BACKEND = "shotcast"
"""The name of the backend."""
