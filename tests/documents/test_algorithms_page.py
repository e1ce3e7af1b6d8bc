"""The page of algorithms has the built-in ones, with the steps that the cost model takes."""

from __future__ import annotations

import re

from pages import ROOT

from shotcast.collectives.registry import BUILT_IN
from shotcast.wire import NodeShape, Op

TEXT = (ROOT / "docs" / "reference" / "algorithms.md").read_text()


OWN = [algorithm for algorithm in BUILT_IN if not algorithm.library]


def test_names_and_steps() -> None:
    listed = dict(re.findall(r"^\| `(\w+)`[^|]* \| (2N-2|\d)", TEXT.partition("## Between nodes")[0], re.MULTILINE))
    own = [algorithm for algorithm in OWN if not algorithm.between_nodes and Op.ALL_REDUCE in algorithm.forms]
    assert set(listed) == {algorithm.name for algorithm in own}
    for algorithm in own:
        for ranks in (2, 5):
            steps = 2 * ranks - 2 if listed[algorithm.name] == "2N-2" else int(listed[algorithm.name])
            assert algorithm.forms[Op.ALL_REDUCE].work(1 << 20, NodeShape(1, ranks), 4).steps == steps, algorithm.name


def test_names_and_network_steps() -> None:
    """Steps are as the page has them, by k = floor(log2 H), with those of folding where H is no power of two."""
    section = TEXT.partition("## Between nodes")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (2?k|\d)(?:, between two nodes (\d))?", section, re.MULTILINE)
    listed, of_two = {name: steps for name, steps, _ in rows}, {name: int(two) for name, _, two in rows if two}
    own = [algorithm for algorithm in OWN if algorithm.between_nodes]
    assert set(listed) == {algorithm.name for algorithm in own}
    for algorithm in own:
        text = listed[algorithm.name]
        for nodes, doublings, folding in ((2, 1, 0), (3, 1, 2), (4, 2, 0), (7, 2, 2), (8, 3, 0)):
            steps = int(text[:-1] or 1) * doublings + folding if text.endswith("k") else int(text)
            steps = of_two.get(algorithm.name, steps) if nodes == 2 else steps
            work = algorithm.forms[Op.ALL_REDUCE].work(1 << 20, NodeShape(nodes, 2), 4)
            assert work.network_steps + work.spread_steps == steps, (algorithm.name, nodes)
            assert work.steps == 2, "a reduce-scatter and an all-gather inside the node"
