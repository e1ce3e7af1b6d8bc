"""All-reduce over nodes compiled for GPUs that are not here: what PTX and machine code must and must not contain."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import cross
from shotcast.hardware.nodes import folded
from shotcast.transport.triton.fused_nvrar import nvrar_norm
from shotcast.transport.triton.nvrar import nvrar_all_reduce

MAX_REGISTERS = 255
MAX_STACK = {"doubling": 24, "pairs": 96, "halving": 96, "pairs_16bit": 24, "two_shot_16bit": 32}
"""Bytes of addresses and sizes that the assembler may spill to hold more blocks; large tiles have the most of them."""
EXACT = ("doubling", "pairs", "halving")


@dataclass(frozen=True)
class Form:
    """The parameters that the kernel is compiled for."""

    exchange: str
    nodes: int
    local: int
    dtype: str = "bfloat16"
    unit: int = 16
    block: int = 128
    warps: int = 1
    clears: bool = False
    capability: int = 90

    def __str__(self) -> str:
        shape = f"{self.exchange}-{self.nodes}x{self.local}-{self.dtype}-u{self.unit}"
        return f"{shape}-{self.block}x{self.warps}{'-clears' * self.clears}-sm{self.capability}"

    @property
    def kernel(self) -> Any:
        return cross.compiled_nodes(
            *(self.exchange, self.nodes, self.local, self.dtype, self.unit, self.block, self.warps, self.clears),
            capability=self.capability,
        )

    @property
    def ptx(self) -> str:
        return str(self.kernel.asm["ptx"])

    @property
    def parts(self) -> int:
        return 1 if self.dtype == "float32" else 2

    @property
    def sent(self) -> int:
        """Return the words in which a word of partial sums is sent."""
        return self.parts if self.exchange in EXACT else 1

    @property
    def accesses(self) -> int:
        """Return the 16-byte accesses by which a thread moves a tile of 32-bit words."""
        return self.block // (128 * self.warps)

    @property
    def doublings(self) -> int:
        return self.nodes.bit_length() - 1

    @property
    def folds(self) -> int:
        return int(folded(self.nodes) > 0)

    @property
    def tiles_put(self) -> int:
        """Return the tiles of words that the code puts. With more than one step, code for each of them."""
        values, words = {
            "doubling": (self.doublings + 2 * self.folds, self.folds),  # a pivot puts step 0 later than others
            "pairs": (self.nodes - 1, 0),
            "halving": (self.doublings + 2 * self.folds, self.doublings + self.folds),
            "pairs_16bit": (self.nodes - 1, 0),
            "two_shot_16bit": (1, self.nodes - 1),
        }[self.exchange]
        return values * self.sent + words

    @property
    def tiles_polled(self) -> int:
        values, words = {
            "doubling": (self.doublings + self.folds, self.folds),
            "pairs": (self.nodes, 0),
            "halving": (self.doublings + self.folds, self.doublings + self.folds),
            "pairs_16bit": (self.nodes, 0),
            "two_shot_16bit": (self.nodes, 1),
        }[self.exchange]
        return values * self.sent + words

    @property
    def additions(self) -> int:
        """Return the additions for one value: its own are added up before and after the epoch in a node of one rank."""
        tree = self.doublings + self.folds if self.exchange in ("doubling", "halving") else self.nodes - 1
        return tree + (2 if self.local == 1 else self.local)


QUICK = [
    Form("doubling", 3, 2, "float32"),
    Form("pairs", 4, 1, "float16", 2),
    Form("halving", 4, 1, block=512, warps=4),
    Form("two_shot_16bit", 4, 2),
]
EVERY = [
    Form(exchange, nodes, local, dtype, unit, *shape)
    for exchange, (nodes, local), dtype, unit, shape in itertools.product(
        cross.EXCHANGES,
        [(2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (4, 1), (4, 2), (5, 1), (7, 1), (8, 1)],
        ["float32", "bfloat16", "float16"],
        [16, 2],
        [(128, 1), (1024, 8)],
    )
    if (unit == 16 or (dtype == "bfloat16" and shape == (128, 1)))
    and (exchange in EXACT or dtype != "float32")
    and (exchange, nodes) != ("two_shot_16bit", 2)  # two nodes send their sums at once
]
EVERY.append(Form("doubling", 2, 4, block=1024, warps=8, clears=True))
FORMS = [*QUICK, *(pytest.param(one, marks=pytest.mark.full) for one in EVERY if one not in QUICK)]


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_form(form: Form, tmp_path: Path) -> None:
    """Words pass four by four, partial sums are added without fusing, and tiles stay in registers."""
    counts = cross.instructions(form.ptx)
    assert counts["griddepcontrol.wait"] == 1
    assert set(cross.read_before_waiting(form.kernel)) == {("ld.global.b64", "peers")}
    polled = form.tiles_polled + (2 * form.local if form.local > 1 else 0)
    assert counts["ld.volatile.global.v4.b32"] == 2 * form.accesses * polled, "before the loop and in it"
    in_node = 2 * (form.local - 1)
    cleared = 1 + form.clears * polled  # a tile of the call before, and what was read
    out = (1 + (form.local if form.local > 1 else 0)) * (form.unit == 16)  # the own slice, then those of the node
    assert counts["st.global.v4.b32"] == form.accesses * (form.tiles_put + in_node + cleared + out)
    assert (counts["st.global.v2.b64"], counts["ld.volatile.global.v2.b64"]) == (0, 1), "one brings the epoch"
    adds = counts["add.rn.f32"] + 2 * counts["add.rn.f32x2"]
    assert adds == form.additions * form.accesses * 4 * form.parts
    assert not [key for key in counts if key.startswith(("fma", "mad.rn")) or ".ftz" in key]
    used = cross.resources(form.kernel, tmp_path)
    assert used["LOCAL"] == 0
    assert used["REG"] <= MAX_REGISTERS
    assert used["STACK"] <= MAX_STACK[form.exchange]
    code = cross.machine_instructions(cross.sass(form.kernel, tmp_path))
    assert code["LDG.E.128.STRONG.SYS"] > 0
    assert not [key for key in code if key.startswith("FFMA")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("exchange", "nodes", "local"),
    [
        ("doubling", 2, 2),
        *(
            pytest.param(exchange, *shape, marks=pytest.mark.full)
            for exchange in EXACT
            for shape in ((2, 1), (2, 4), (3, 1), (4, 2), (8, 1))
        ),
    ],
)
def test_rows_are_normed_in_registers(exchange: str, nodes: int, local: int, tmp_path: Path) -> None:
    made = cross.compiled_nodes(exchange, nodes, local, hidden=8192)
    counts = cross.instructions(made.asm["ptx"])
    assert set(cross.read_before_waiting(made)) == {("ld.global.b64", "peers")}
    assert counts["rsqrt.approx.ftz.f32"] + counts["rsqrt.approx.f32"] == local, "one for each tile of a program"
    used = cross.resources(made, tmp_path)
    assert used["LOCAL"] == 0
    assert used["REG"] <= MAX_REGISTERS
    assert used["STACK"] <= MAX_STACK[exchange]


@pytest.mark.full
@pytest.mark.parametrize("exchange", ["doubling", pytest.param("pairs", marks=pytest.mark.full)])
def test_no_word_is_in_two_halves(exchange: str) -> None:
    """Only 16-byte accesses grow with a tile: no word, and no part of one, has an access of its own."""
    small, large = (
        cross.instructions(cross.compiled_nodes(exchange, 3, 1, "float32", block=block).asm["ptx"])
        for block in (128, 256)
    )
    for key in small | large:
        if re.match(r"(ld|st)\b.*global", key):
            wide = key.endswith("v4.b32")
            assert large[key] == small[key] * (2 if wide else 1), key


@pytest.mark.parametrize(
    "exchange",
    [
        "doubling",
        pytest.param("halving", marks=pytest.mark.full),
        pytest.param("two_shot_16bit", marks=pytest.mark.full),
    ],
)
def test_a_lone_rank_puts_its_words_before_it_counts_itself_in(exchange: str) -> None:
    """The first words are on their way before the barrier and the atomic of the readers of the epoch."""
    ptx = cross.compiled_nodes(exchange, 2, 1).asm["ptx"].partition("griddepcontrol.wait")[2]
    assert ptx.index("ld.global.v4.b32") < ptx.index("ld.volatile.global.v2.b64"), "loaded before the epoch"
    put = ptx.index("st.global.v4.b32")
    counts = [match.start() for match in re.finditer(r"atom\.global\.gpu\.relaxed\.add\.u64", ptx)]
    assert any(put < count for count in counts)
    assert "ld.volatile.global.v4.b32" not in ptx[:put]


def test_no_runtime_argument_is_specialised() -> None:
    for param in (*nvrar_all_reduce.params, *nvrar_norm.params):
        assert param.is_constexpr or param.do_not_specialize, param.name
