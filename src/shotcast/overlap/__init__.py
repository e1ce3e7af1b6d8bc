"""Communication and computation at once.

:func:`chain` communicates each of several results under the computation of the next.
"""

from __future__ import annotations

from shotcast.overlap.chains import Chain, chain
from shotcast.overlap.policy import Decision

__all__ = ["Chain", "Decision", "chain"]
