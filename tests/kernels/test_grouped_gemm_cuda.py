"""Products with weights as checkpoints store them, on a GPU. Run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
from grouped_targets import Case, excess

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("int4", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_as_exact_as_float32_sums(int4: bool, dtype: str) -> None:
    for rows in (1, 2, 17, 64):
        for inputs, outputs, group in ((4096, 4096, 128), (14336, 1030, 128), (2752, 512, 64), (4096, 256, 4096)):
            case = Case(rows, inputs, outputs, group, int4, dtype, rows == 2)
            assert max(excess(case, "cuda")) <= 1, case
            assert max(excess(case._replace(gated=True), "cuda")) <= 1, case
