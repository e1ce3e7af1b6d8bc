"""The page of algorithms has the built-in ones, with the steps that the cost model takes."""

from __future__ import annotations

import re

from pages import ROOT

from shotcast.collectives.registry import BUILT_IN
from shotcast.wire import NodeShape, Op

TEXT = (ROOT / "docs" / "reference" / "algorithms.md").read_text()


def test_names_and_steps() -> None:
    listed = dict(re.findall(r"^\| `(\w+)`[^|]* \| (2N-2|\d)", TEXT.partition("## Fused")[0], re.MULTILINE))
    own = [algorithm for algorithm in BUILT_IN if not algorithm.library]
    assert set(listed) == {algorithm.name for algorithm in own}
    for algorithm in own:
        for ranks in (2, 5):
            steps = 2 * ranks - 2 if listed[algorithm.name] == "2N-2" else int(listed[algorithm.name])
            assert algorithm.forms[Op.ALL_REDUCE].work(1 << 20, NodeShape(1, ranks), 4).steps == steps, algorithm.name
