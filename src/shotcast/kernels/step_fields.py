"""Word counts of the tables that tell kernels the inputs of a step. Importing it does not need Triton."""

from __future__ import annotations

FIELDS = 4
"""int32 words per sequence: its table row; its position; its token (below 0: the last sampled token); and the block
that it gets for this step (below 0: none)."""
TILE_FIELDS = 4
"""int32 words per tile: its sequence's table row; its first query; its number of queries (0 for an empty tile); and the
position of the first (below 0: queries that attend to nothing, and get zeros)."""
