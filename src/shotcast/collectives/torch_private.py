"""Private names of PyTorch: by which autograd notices that a tensor was written, and by which traces are told."""

from __future__ import annotations

import torch
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_compiling, is_dynamo_compiling

increment_version = torch._C._increment_version
"""Tell autograd that the tensors of a tuple are about to be written by something that it does not see.

The public form, ``torch.autograd.graph.increment_version``, takes twice the 0.1 microseconds."""

Unseen = torch._C._AutoDispatchBelowADInplaceOrView
"""A context in which autograd does not see what PyTorch writes: it counts no versions and records nothing, and tensors
of inference mode can be written outside of it."""


def is_traced() -> bool:
    """Return whether this thread traces a graph. PyTorch's ``is_compiling()`` is true while any thread does."""
    return is_dynamo_compiling() or (is_compiling() and _len_torch_dispatch_stack() > 0)
