"""Versions of tensors, by which autograd notices that a tensor it saved was written since.

The only file that uses PyTorch's private names for them. The public form of the first,
``torch.autograd.graph.increment_version``, takes twice the 0.1 microseconds.
"""

from __future__ import annotations

import torch

increment_version = torch._C._increment_version
"""Tell autograd that the tensors of a tuple are about to be written by something that it does not see."""

Unseen = torch._C._AutoDispatchBelowADInplaceOrView
"""A context in which autograd does not see what PyTorch writes: it counts no versions and records nothing, and tensors
of inference mode can be written outside of it."""
