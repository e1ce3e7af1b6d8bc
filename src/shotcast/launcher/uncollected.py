"""First import of the rank server: without garbage collection, imports take three quarters of the time.

:mod:`shotcast.transport.cpu.preload`, which is imported last, turns it on again, and so does each rank.
"""

from __future__ import annotations

import gc

gc.disable()
