"""Tell calls that are traced for a graph from those that are made."""

from __future__ import annotations

from torch._C import _len_torch_dispatch_stack  # a private name of PyTorch
from torch.compiler import is_compiling, is_dynamo_compiling


def is_traced() -> bool:
    """Return whether this thread traces a graph. PyTorch's ``is_compiling()`` is true while any thread does."""
    return is_dynamo_compiling() or (is_compiling() and _len_torch_dispatch_stack() > 0)
