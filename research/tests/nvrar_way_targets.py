"""Ways for tests/bench/test_nvrar_nodes.py, in place of those that need GPUs."""

from __future__ import annotations

import os
import time

from nvrar_nodes import Rows, Shape


def measures(shape: Shape, rows: Rows, factor: float) -> None:
    for nbytes in shape.sizes:
        rows.add(int(os.environ["RANK"]), nbytes, factor * nbytes, 0.1)


def fails(shape: Shape, rows: Rows) -> None:
    rows.add(int(os.environ["RANK"]), shape.sizes[0], 1.0, 0.1)
    raise RuntimeError("no such adapter")


def stalls(shape: Shape, rows: Rows) -> None:
    rows.add(int(os.environ["RANK"]), shape.sizes[0], 2.0, 0.1)
    time.sleep(60)
