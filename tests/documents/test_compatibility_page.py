"""The page of compatibility says of each call what the process group does, and of each framework what tests count."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from pages import ROOT

from shotcast import wire
from shotcast.integrations import ray, sglang, vllm
from shotcast.integrations.status import integrations
from shotcast.process_group.routing import INNER, LIBRARY, MESSAGES, MOVING, OWN, REDUCING, is_scaled, route_of

TEXT = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
REDUCTIONS = {
    "SUM": "sum", "PREMUL_SUM": "sum", "AVG": "avg", "PRODUCT": "prod", "MAX": "max", "MIN": "min",
    "BAND": "band", "BOR": "bor", "BXOR": "bxor",
}  # fmt: skip
"""Ours, by PyTorch's names."""


def rows(title: str, first: str) -> list[list[str]]:
    """Return the cells of the rows of a table of a section, which begins with ``first`` in its head."""
    section = TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    table = section.partition(f"\n| {first} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", cell))


def test_the_routes() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", TEXT.partition("\n## ")[0], re.MULTILINE)
    assert listed == [OWN, LIBRARY, INNER]


def test_every_reduction_of_every_dtype() -> None:
    listed = {name: names(dtypes) for cell, dtypes in rows("torch.distributed", "reduction") for name in names(cell)}
    assert set(listed) == set(REDUCTIONS)
    every = {
        str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
    }
    assert set(wire.REDUCED) <= set(every)
    for op in REDUCING:
        for name, reduction in REDUCTIONS.items():
            own = {dtype for dtype, value in every.items() if route_of(op, value, reduction).is_own}
            own = {dtype for dtype in own if name != "PREMUL_SUM" or is_scaled(every[dtype])}
            assert listed[name] == own, (op, name)


@pytest.mark.parametrize(
    ("ops", "route"),
    [(REDUCING, OWN), ([op for op in MOVING if op != "barrier"], OWN), (["barrier"], OWN), (MESSAGES, INNER)],
)
def test_every_call(ops: list[str], route: str) -> None:
    row = next(row for row in rows("torch.distributed", "call") if names(row[0]) & set(ops))
    assert set(ops) - {"recv_anysource"} <= names(row[0])
    assert row[1].startswith(f"`{route}`")
    assert {route_of(op, torch.float32).name for op in ops} == {route}


def test_frameworks_make_the_calls_that_tests_count() -> None:
    tree = ast.parse((ROOT / "tests" / "process_group" / "test_frameworks.py").read_text())
    (counted,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OWN_CALLS"
    ]
    listed = {script.strip("`"): names(calls) for script, _, calls in rows("Frameworks on torch.distributed", "script")}
    scripts = {file.stem for file in (ROOT / "examples" / "frameworks").glob("*.py")} - {"common"}
    assert set(listed) == scripts
    assert {script: listed[script] for script in counted} == counted


def test_programs_and_their_versions() -> None:
    found = rows("Programs with interfaces of their own", "program")
    text = {re.sub(r"\W", "", row[0].split("]")[0]): row for row in found}
    own = [one.name for one in integrations() if one.name != "torch.distributed"]
    assert set(own) <= set(text)
    for name, module in (("Ray", ray), ("vLLM", vllm), ("SGLang", sglang)):
        assert ".".join(map(str, module.AT_LEAST)) in text[name][0]
    for name in ("vLLM", "SGLang"):
        assert f"SHOTCAST_{name.upper()}=1" in text[name][1]
