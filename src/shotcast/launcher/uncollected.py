"""Imported first by the server of ranks: without garbage collections, imports take three quarters of the time.

:mod:`shotcast.transport.cpu.preload`, which is imported last, switches them on again, and so does each rank.
"""

from __future__ import annotations

import gc

gc.disable()
