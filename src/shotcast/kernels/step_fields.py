"""The words of the tables that tell kernels the inputs of a step; without Triton, for ranks that have none."""

from __future__ import annotations

FIELDS = 4
"""int32 words of a sequence: its row of the tables; position; token (below 0: the one sampled last); and the block that
it gets for this step (below 0: none)."""
TILE_FIELDS = 4
"""int32 words of a tile: its sequence's row of the tables; its first query; its number of queries (0 for an empty
tile); and the position of the first (below 0: queries that attend to nothing, and get zeros)."""
