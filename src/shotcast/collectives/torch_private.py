"""PyTorch's private names for autograd's version counters and for detecting traces."""

from __future__ import annotations

import torch
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_compiling, is_dynamo_compiling

increment_version = torch._C._increment_version
"""Tell autograd that the tensors of a tuple are about to be written by code that it cannot see.

The public function, ``torch.autograd.graph.increment_version``, takes twice as long as these 0.1 microseconds.
"""

Unseen = torch._C._AutoDispatchBelowADInplaceOrView
"""A context that hides writes from autograd: it counts no versions and records nothing, and inference-mode tensors can
be written outside of inference mode."""


def is_traced() -> bool:
    """Return whether this thread is tracing a graph. PyTorch's ``is_compiling()`` is true while any thread does."""
    return is_dynamo_compiling() or (is_compiling() and _len_torch_dispatch_stack() > 0)
