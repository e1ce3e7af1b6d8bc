"""The names that PyTorch is given."""

from __future__ import annotations

BACKEND = "shotcast"
"""The name of the backend."""
DEVICES = ("cpu", "cuda")
"""Kinds of tensors that the backend takes."""
