"""Kernels compiled for GPUs that are not here: what their PTX and machine code must and must not contain.

The FP8 transport has its own file, ``test_compiled_two_shot_fp8.py``.

Counts follow from the source. A thread of one warp holds 4 of the 128 words of a tile, so each move of a tile is one
16-byte access. Triton unrolls nothing but ``static_range``; if a later release unrolls more, the counts will show it.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import cross
from shotcast.device.triton.launch import Wide
from shotcast.wire import REDUCIBLE

pytestmark = pytest.mark.long

KERNELS = [name for name in cross.KERNELS if name not in cross.FP8]
SEND_RECV = ("send", "recv")
EPOCH = re.compile(r"ld\.volatile\.global\.v2\.b64 \{(%rd\d+), %rd\d+\}")
"""The load of the epoch and the generation, from one copy."""
SUMS: dict[str, Callable[[int], int]] = {
    "one_shot": lambda n: n,
    "one_shot_scatter": lambda n: n,
    "one_shot_scatter_clears": lambda n: n,
    "two_shot": lambda n: n,
    "two_shot_clears": lambda n: n,
    "two_shot_multicast": lambda n: n,
    "ring": lambda n: 1 + 2 * (n - 1),  # each hop begins at +0.0
    "ring_scatter": lambda n: 1 + 2 * (n - 1),
}
"""Additions that one value of the output takes."""
LOADS: dict[str, Callable[[int], int]] = {
    "one_shot": lambda n: 3,  # twice to send (the next is loaded while one is sent), and once to add
    "one_shot_scatter": lambda n: 2 * n - 1,
    "one_shot_scatter_clears": lambda n: 2 * n - 1,
    "two_shot": lambda n: 2 * n - 1,
    "two_shot_clears": lambda n: 2 * n - 1,
    "two_shot_multicast": lambda n: 2 * n - 1,
    "multimem": lambda n: n,
    "ring": lambda n: n,
    "ring_scatter": lambda n: n,
    "exchange": lambda n: 2 * n - 1,
    "exchange_cells": lambda n: 2 * n - 1,
    "from_root_clears": lambda n: n,
    "barrier": lambda n: 0,
    "recv": lambda n: 0,
}
"""Tiles of the caller's tensor that a kernel loads (1 if not listed). All other loads of tiles are polls."""
LOADS |= {name: lambda n: 2 for name in cross.KERNELS if name.startswith(("gather", "broadcast"))}  # to send, twice
POLLS: dict[str, Callable[[int], int]] = {
    "one_shot": lambda n: n,
    "one_shot_scatter": lambda n: n,
    "two_shot": lambda n: 2 * n,
    "two_shot_clears": lambda n: 2 * n,
    "two_shot_multicast": lambda n: 2 * n,
    "ring": lambda n: 2 * (n - 1),
    "ring_scatter": lambda n: n - 1,
    "ring_gather": lambda n: n - 1,
    "broadcast": lambda n: 1,
    "broadcast_multicast": lambda n: 1,
    "broadcast_cells": lambda n: 1,
    "from_root_clears": lambda n: 1,
    "barrier": lambda n: 0,
    "send": lambda n: 0,
    "recv": lambda n: 1,
}
"""Tiles that a kernel waits for (one a rank if not listed)."""
CELLS = ("gather_cells", "exchange_cells", "broadcast_cells", "to_root_cells", *SEND_RECV)
WIDE = {"v4.b32", "v2.b64"}
MAX_REGISTERS = {2: 128, 3: 128, 4: 128, 8: 232}
"""Registers by number of ranks, which is that of the slots in flight.

With up to 256, the 65,536 registers of a multiprocessor are enough for two blocks of four warps."""
MAX_STACK = 40
"""Bytes of addresses that the assembler may spill to hold more blocks; a tile takes 16 for each slot."""


@dataclass(frozen=True, order=True)
class Form:
    """The parameters that a kernel is compiled for."""

    name: str
    dtype: str = "bfloat16"
    unit: int = 16
    world_size: int = 4
    block: int = 128
    warps: int = 1
    capability: int = 90

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}-u{self.unit}-n{self.world_size}-{self.block}x{self.warps}-sm{self.capability}"

    @property
    def kernel(self) -> Any:
        return cross.compiled(
            self.name, self.dtype, self.unit, self.world_size, self.block, self.warps, self.capability
        )

    @property
    def ptx(self) -> str:
        return str(self.kernel.asm["ptx"])

    @property
    def accesses(self) -> int:
        """Return the 16-byte accesses by which a thread moves a tile of 32-bit words."""
        return (512 if self.name in SEND_RECV else self.block) // (128 * self.warps)

    @property
    def loads(self) -> int:
        """Return the accesses that load the caller's tensor.

        Two-shot with several warps loads one tile before the others.
        """
        several = self.warps > 1 and self.name.startswith("two_shot")
        count = LOADS.get(self.name, lambda n: 1)
        return (self.world_size + 1 if several else count(self.world_size)) * self.accesses

    @property
    def pdl(self) -> bool:
        return self.capability >= 90


def form(name: str, *args: Any, **kwargs: Any) -> Form:
    """Return a form as the executor launches it: send and recv have four warps, a barrier has one."""
    made = Form(name, *args, **kwargs)
    warps, block = {"send": (4, 512), "recv": (4, 512), "barrier": (1, 128)}.get(name, (made.warps, made.block))
    return Form(name, made.dtype, made.unit, made.world_size, block, warps, made.capability)


def narrow(dtype: str) -> int:
    """Return the other unit that the executor uses."""
    return 4 if dtype == "float32" else 2


def every_form() -> list[Form]:
    """Return all forms that the executor can ask for, up to two launch shapes."""
    made = set()
    for name, dtype, world_size, shape, capability in itertools.product(
        KERNELS, REDUCIBLE, (2, 3, 4, 8), ((128, 1), (512, 4)), (80, 90, 100, 120)
    ):
        if name in cross.MULTICASTS and capability < 90:
            continue
        for unit in (16, narrow(dtype)):
            made.add(form(name, dtype, unit, world_size, *shape, capability))
    return sorted(made)


def several_warps(name: str) -> Form:
    """Return a kernel with four warps, whose dtype, unit, number of ranks and architecture rotate with the kernel."""
    turn = list(KERNELS).index(name)
    dtype = REDUCIBLE[turn % 3]
    world_size = 8 if name in SUMS else (2, 3, 8)[(turn + turn // 3) % 3]
    return form(
        name, dtype, 16 if turn % 2 else narrow(dtype), world_size, 512, 4, (90, 100, 120)[(turn // 2 + turn // 6) % 3]
    )


def chosen_forms() -> list[Form]:
    """Return every kernel for sm_90 with one warp, and with four and other parameters; and a few more."""
    made = [form(name) for name in KERNELS] + [several_warps(name) for name in KERNELS]
    made += [form(name, "float16", world_size=2) for name in ("one_shot_scatter", "two_shot", "ring")]
    made += [form("send", "float16", 2, 2, capability=120), form("recv", "float32", 4, 2, capability=100)]
    made += [form("one_shot", capability=80), form("ring", "float32", world_size=2, capability=80)]
    made += [form(name, "float32", world_size=2, capability=80) for name in ("gather_cells", "recv")]
    made += [form("multimem", dtype, world_size=2, capability=90) for dtype in ("float32", "float16")]
    made += [form("multimem", dtype, world_size=2, capability=100) for dtype in REDUCIBLE]
    made += [form("multimem", block=256), form("two_shot_multicast", world_size=2, capability=100)]
    return list(dict.fromkeys(made))


def of_kind(counts: Counter[str], *pattern: str) -> Counter[str]:
    """Return the accesses to global memory of one kind, by width: ``ld``, ``ld.volatile``, ``st``."""
    prefix = ".".join((*pattern, "global."))
    return Counter({key.removeprefix(prefix): n for key, n in counts.items() if key.startswith(prefix)})


# -- checks -----------------------------------------------------------------------------------------------------------


def waits_for_the_prior_kernel_first(form: Form, folder: Path) -> None:
    counts = cross.instructions(form.ptx)
    assert counts["griddepcontrol.wait"] == form.pdl
    assert (counts["griddepcontrol.launch_dependents"] > 0) == form.pdl
    if (
        form.pdl
    ):  # the addresses of peers never change; calls that are not small, or send to no rank, look them up later
        later = ("barrier", "multimem", "gather_multicast", "broadcast_multicast", *cross.FP8, *SEND_RECV)
        early = set() if form.name in later else {("ld.global.b64", "peers")}
        assert set(cross.read_before_waiting(form.kernel)) == early


def polls_volatile_and_wide(form: Form, folder: Path) -> None:
    """Tiles are polled twice, before and in the loop, by volatile 16-byte loads; other volatile loads are of words."""
    polled = of_kind(cross.instructions(form.ptx), "ld", "volatile")
    tiles = POLLS.get(form.name, lambda n: n)(form.world_size) * form.accesses * 2
    wide = Counter({"v2.b64": 2 * tiles} if form.name in CELLS else {"v4.b32": tiles}) + Counter({"v2.b64": 1})
    assert len(EPOCH.findall(form.ptx)) == 1, "epoch and generation"
    assert {key: n for key, n in polled.items() if key != "b64"} == wide
    assert polled["b64"] >= 1, "headers"


def moves_data_in_16_bytes(form: Form, folder: Path) -> None:
    counts = cross.instructions(form.ptx)
    loaded, stored = of_kind(counts, "ld"), of_kind(counts, "st")
    tiles = form.loads
    unit = {16: "v4.b32", 4: "b32", 2: "b16"}[form.unit]
    data = {key: n for key, n in loaded.items() if key not in ("b64", "sys.relaxed.b64")}
    assert data == ({unit: tiles * 16 // form.unit} if tiles else {})
    widths = set(stored) - {"b64"}
    delivers, clears = form.name not in ("barrier", "send"), form.name not in CELLS and form.name != "barrier"
    expected = {unit} if delivers else set()
    expected |= {"v4.b32"} if clears else set()
    expected |= {"v2.b64"} if form.name in CELLS and form.name != "recv" else set()
    assert widths == expected


def multicasts_where_asked(form: Form, folder: Path) -> None:
    """One instruction moves 16 bytes, and a thread has each of its quads once. Machine code has no other multicasts."""
    used = {key: n for key, n in cross.instructions(form.ptx).items() if key.startswith("multimem")}
    asked = {"multimem.st.relaxed.sys.global.v4.f32": form.accesses} if form.name in cross.MULTICASTS else {}
    loads = {}
    if form.name == "multimem":
        kind = {"float32": "add.v4.f32", "bfloat16": "add.acc::f32.v4.bf16x2", "float16": "add.acc::f32.v4.f16x2"}
        asked[f"multimem.ld_reduce.relaxed.sys.global.{kind[form.dtype]}"] = form.accesses
        wide = "F32ADD" if form.capability == 90 else "HPADD"  # accumulation in float32; ADD alone would add in 16 bits
        kind = {"float32": "ADD.F32x4", "bfloat16": f"{wide}.BF16x8", "float16": f"{wide}.F16x8"}
        loads = {f"LDGMC.E.{kind[form.dtype]}.RN.STRONG.SYS": form.accesses}
    assert used == asked
    machine = cross.machine_instructions(cross.sass(form.kernel, folder))
    assert {key: n for key, n in machine.items() if key.startswith("LDGMC")} == loads


def loads_sums_behind_flags(form: Form, folder: Path) -> None:
    """The order is: staging, block barrier, flags; flags polled, fences, block barrier, sums."""
    orders = ("st.release.sys.global.b64", "fence.acq_rel.sys", "fence.proxy.alias")
    counts = cross.instructions(form.ptx)
    assert [counts[key] for key in orders] == [int(form.name == "multimem")] * 3
    if form.name != "multimem":
        return
    raised, fenced = form.ptx.index(orders[0]), form.ptx.index(orders[1])
    staged = form.ptx.rindex("st.global.v4.b32", 0, raised)
    polled = form.ptx.rindex("ld.volatile.global.b64", 0, fenced)
    loaded, sent = form.ptx.index("multimem.ld_reduce"), form.ptx.index("multimem.st")
    assert staged < raised < polled < fenced < form.ptx.index(orders[2]) < loaded < sent
    assert "bar.sync" in form.ptx[staged:raised], "all warps have stored"
    assert "bar.sync" in form.ptx[fenced:loaded], "all warps know what each thread has seen"
    order = ("STG.E.128 ", "BAR.SYNC", "MEMBAR.ALL.SYS", "STG.E.64.STRONG.SYS", "MEMBAR.ALL.SYS", "BAR.SYNC", "LDGMC")
    assert re.search(r"[\s\S]*?".join(map(re.escape, order)), cross.sass(form.kernel, folder))


def adds_in_order_and_rounds_to_nearest(form: Form, folder: Path) -> None:
    counts = cross.instructions(form.ptx)
    adds = counts["add.rn.f32"] + 2 * counts["add.rn.f32x2"]
    adds += counts["add.rn.f32.f16"] + counts["add.rn.f32.bf16"]  # sm_100 and later widen a half while adding it
    if form.dtype == "float16":  # for +0.0 + x alone, rounded to float16, the compiler uses an addition of halves
        halves = Counter({key: counts.pop(key) for key in list(counts) if re.fullmatch(r"add(\.rn)?\.f16(x2)?", key)})
        adds += sum(n * (2 if key.endswith("x2") else 1) for key, n in halves.items())
    values = form.accesses * 4 * (1 if form.dtype == "float32" else 2)
    assert adds == SUMS.get(form.name, lambda n: 0)(form.world_size) * values
    assert not [key for key in counts if re.match(r"(mad|mul|sub|add)\.(?!rn\.f32)[\w.]*(f32|f16)", key)]
    assert not [key for key in counts if key.startswith("fma") or ".ftz" in key]
    rounds = {key for key in counts if re.match(r"cvt\.[\w.]*(?<!\.)\.(bf16|f16)(x2)?\.f32", key)}
    short = {"bfloat16": "bf16", "float16": "f16"}.get(form.dtype)
    if form.name in SUMS and short:
        assert rounds, "sums of 16-bit floats are rounded"
        assert all(re.fullmatch(rf"cvt\.rn\.{short}(x2)?\.f32", key) for key in rounds), rounds
    else:
        assert not rounds


def keeps_tiles_in_registers(form: Form, folder: Path) -> None:
    used = cross.resources(form.kernel, folder)
    assert used["LOCAL"] == 0
    assert used["REG"] <= MAX_REGISTERS[form.world_size]
    assert used["STACK"] <= (16 if form.warps == 1 and form.world_size <= 4 else MAX_STACK)


def machine_code_is_what_ptx_says(form: Form, folder: Path) -> None:
    counts = cross.machine_instructions(cross.sass(form.kernel, folder))
    polled = POLLS.get(form.name, lambda n: n)(form.world_size)
    assert (counts["LDG.E.128.STRONG.SYS"] > 1) == (polled > 0), "one brings the epoch"
    assert counts["STG.E.128"] > 0 or form.name in ("barrier", "recv")
    assert (counts["STG.E.128.STRONG.SYS"] > 0) == (form.name in cross.MULTICASTS)
    assert not [key for key in counts if key.startswith(("FFMA", "LDG.E.U8", "STG.E.U8"))]
    if form.name in SUMS:
        assert counts["FADD"] + counts["FADD2"] > 0
    if form.unit == 16:
        tiles = form.loads
        # with two ranks the loop that sends has one load, and the assembler unrolls it
        unrolled = form.world_size == 2 and form.name.startswith("two_shot")
        assert counts["LDG.E.128"] == tiles or (unrolled and counts["LDG.E.128"] > tiles)
        assert not [key for key in counts if re.match(r"(LDG|STG)\.E(\.(U|S)?(8|16))(\.|$)", key)]


@pytest.mark.every(46)
@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("name", [name for name in KERNELS if name not in SEND_RECV])
def test_a_program_counts_itself_in_once_it_has_the_epoch(name: str, warps: int) -> None:
    """A load still in flight could see what program 0 writes for the next kernel once all others have counted."""
    made = form(name) if warps == 1 else several_warps(name)
    ptx = made.ptx.partition("griddepcontrol.wait")[2]
    epoch = EPOCH.search(ptx)
    assert epoch is not None
    counts = [match.start() for match in re.finditer(r"atom\.global\.gpu\.relaxed\.add\.u64", ptx)]
    used = [match.start() for match in re.finditer(rf"setp\.\w+\.s64\s+%p\d+, {epoch[1]}, -1;", ptx)]
    assert used
    if used[0] > ptx.index("bra"):  # in program 0, too, which does not count itself
        assert len(used) == len(counts) + 1
    assert all(before < count for before, count in zip(used, counts, strict=False))
    assert bool(counts) == (name != "barrier")
    for count in counts:
        _, answer, after = re.split(r"(%rd\d+)", ptx[count:], maxsplit=1)
        assert not re.search(rf"{answer}\b", after), "nobody waits for an answer"


@pytest.mark.parametrize("name", ["one_shot", "one_shot_scatter", "two_shot", "gather", "gather_cells", "exchange"])
def test_all_senders_are_polled_at_once(name: str) -> None:
    """If senders were waited for one by one, each would cost a trip to the cache, even when all words have come."""
    made = form(name)
    access = "ld.volatile.global." + ("v2.b64" if name in CELLS else "v4.b32")
    straight = re.split(r"^\$L__BB\w+:|\bbra(?:\.uni)?\b", made.ptx, flags=re.M)
    polled = max(block.count(access) for block in straight)
    assert polled == made.world_size * made.accesses * (2 if name in CELLS else 1)


@pytest.mark.parametrize("name", ["one_shot", "two_shot", "gather", "gather_cells", "exchange", "broadcast"])
def test_what_is_sent_is_on_its_way_before_the_epoch_is_used(name: str) -> None:
    ptx = form(name).ptx.partition("griddepcontrol.wait")[2]
    epoch = EPOCH.search(ptx)
    assert epoch is not None
    used = re.search(rf"{epoch[1]}\b", ptx[epoch.end() :])
    assert used is not None
    assert "ld.global.v4.b32" in ptx[: epoch.end() + used.start()]


CHECKS = (
    waits_for_the_prior_kernel_first,
    polls_volatile_and_wide,
    moves_data_in_16_bytes,
    multicasts_where_asked,
    loads_sums_behind_flags,
    adds_in_order_and_rounds_to_nearest,
    keeps_tiles_in_registers,
    machine_code_is_what_ptx_says,
)


@pytest.mark.every(93)
@pytest.mark.parametrize("form", chosen_forms(), ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_form(form: Form, check: Callable[[Form, Path], None], tmp_path: Path) -> None:
    check(form, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("name", KERNELS)
def test_every_form(name: str, capability: int, tmp_path: Path) -> None:
    for form in every_form():
        if (form.name, form.capability) == (name, capability):
            for check in CHECKS:
                try:
                    check(form, tmp_path)
                except AssertionError as error:
                    raise AssertionError(f"{form}: {check.__name__}: {error}") from error


# -- control words ----------------------------------------------------------------------------------------------------


@pytest.mark.every(6)
@pytest.mark.parametrize("name", ["one_shot", "two_shot", "ring", "gather_cells", "exchange_cells", "broadcast_cells"])
def test_only_16_byte_accesses_grow_with_the_tile(name: str) -> None:
    """Only data doubles with the length of a tile. None of it is in 8-byte accesses, which could tear a cell pair."""
    small, large = (cross.instructions(form(name, block=block).ptx) for block in (128, 256))
    for kind in (("ld",), ("ld", "volatile"), ("st",)):
        was, now = of_kind(small, *kind), of_kind(large, *kind)
        assert {key for key in was if key in WIDE}, kind
        if "volatile" in kind:
            was["v2.b64"], now["v2.b64"] = was["v2.b64"] - 1, now["v2.b64"] - 1  # the epoch
        for key in was | now:
            assert now[key] == was[key] * (2 if key in WIDE else 1), (kind, key)


# -- specialisation ---------------------------------------------------------------------------------------------------


def runtime_arguments(kernel: Any, rank: int, size: int, address: int, header: int) -> dict[str, Any]:
    """Return what a launch gives a kernel on a rank: ``address`` and ``size`` for all addresses and numbers."""
    ranks, headers = ("rank", "root", "peer"), ("header_size", "header_call")

    def value(name: str, kind: Any) -> Any:
        if isinstance(kind, tuple):
            names = getattr(kind, "_fields", [name] * len(kind))
            values = (value(inner, one) for inner, one in zip(names, kind, strict=True))
            return type(kind)(*values) if hasattr(kind, "_fields") else tuple(values)
        if kind == "fp32":
            return 1.0 / size
        if kind == "i64":
            return header if name in headers else Wide(size) if name in cross.SIZES else address
        return rank if name in ranks else size

    return {name: value(name, kind) for name, kind in cross.signature_of(kernel).items() if kind != "constexpr"}


def test_no_runtime_argument_is_specialised() -> None:
    kernels = {id(kernel): kernel for kernel, _ in (cross.KERNELS | cross.FUSED).values()}.values()
    for kernel in kernels:
        for param in kernel.params:
            assert param.is_constexpr or param.do_not_specialize, f"{kernel.__name__} is specialised on {param.name}"


@pytest.mark.parametrize("kernel", cross.ALL, ids=lambda kernel: kernel.__name__)
def test_compiled_form_does_not_depend_on_rank_or_addresses(kernel: Any) -> None:
    """The compiled form is the one of this file for ranks 0, 1 and 7, and for any address and size."""
    for rank, size, address, header in (
        (0, 16, 0x7F0000000000, 1 << 44),
        (1, 1, 0x7F1234567891, (8 << 44) + 1),
        (7, 1 << 29, 0x300000010, (1 << 48) - 1),
    ):
        arguments = runtime_arguments(kernel, rank, size, address, header)
        assert cross.kinds_where_launched(kernel, arguments | {"SHAPE": None}) == cross.signature_of(kernel)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "make",
    [
        lambda: form("gather", world_size=2).kernel,
        lambda: cross.compiled_uneven("int32", 1, 2, 128, 1),
        lambda: cross.compiled_fused("fused_one_shot", hidden=256, world_size=2),
        lambda: cross.compiled_nodes("pairs", 2, 1),
    ],
    ids=["starts", "spans", "norm and cells", "entry with puts"],
)
def test_elements_of_tuples_are_parameters_in_their_order(make: Callable[[], Any]) -> None:
    """The launcher packs a cell of this width for each, and two null addresses that Triton adds."""
    made = make()
    head = made.asm["ptx"].partition(".entry")[2].partition(")")[0]
    widths = [int(width) for width in re.findall(r"\.param \.[a-z](\d+)", head)]
    kinds = [kind for _, kind in cross.flat(made.src.signature)]
    assert widths == [int(re.sub(r"\D", "", kind)) for kind in kinds] + [64, 64]
    assert {32, 64} == set(widths)
