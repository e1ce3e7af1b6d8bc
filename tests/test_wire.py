"""Header and abort words survive the trip, and say which field differs."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shotcast import wire
from shotcast.collectives.registry import registered
from shotcast.errors import ConfigError
from shotcast.wire import CallPlan, Fault, Header, HeaderWords, LaunchShape, Op

NAMES = (*registered(), *(f"added_{number}" for number in range(wire.MAX_ALGORITHMS)))[: wire.MAX_ALGORITHMS]
"""The largest number of algorithms that headers can tell apart."""


def header_of(plan: CallPlan) -> HeaderWords:
    return wire.encode_header(plan, NAMES.index(plan.algorithm))


def decoded(words: HeaderWords) -> Header:
    return Header.decode(words, NAMES)


launches = st.builds(LaunchShape, st.integers(1, 1024), st.sampled_from([128, 512, 4096]), st.integers(1, 16))
plans = st.builds(
    CallPlan,
    op=st.sampled_from([op for op in Op if op is not Op.BARRIER]),
    algorithm=st.sampled_from(NAMES),
    dtype=st.sampled_from(tuple(wire.DTYPES)),
    nbytes=st.integers(0, wire.MAX_NBYTES - 1),
    root=st.integers(0, wire.MAX_NAMED_RANKS - 1),
    launch=launches,
    piece=st.integers(0, 31),
    reduction=st.sampled_from(wire.REDUCTIONS),
)


@given(plans)
def test_header_round_trip(plan: CallPlan) -> None:
    words = header_of(plan)
    assert all(0 < word < 1 << 48 for word in words), "the epoch has the bits above, and zero means never written"
    assert all(word >> 31 for word in words), "so that Triton takes every header for 64 bits"
    header = decoded(words)
    sent_as = Op.SEND if plan.op is Op.RECV else plan.op
    call = sent_as.label, plan.dtype, plan.algorithm, plan.reduction, plan.root, plan.nbytes
    assert header == Header(*call, plan.launch.digest, plan.piece)


@given(plans, st.integers(0, 0xFFFF), st.integers(0, 0xFFFF))
def test_cells_hold_a_header_of_their_epoch_alone(plan: CallPlan, epoch: int, other: int) -> None:
    words = header_of(plan)
    cells = [word | epoch << 48 for word in words]
    signed = [cell - (cell >> 63 << 64) for cell in cells]
    for kept in (cells, signed):
        assert HeaderWords.of_cells(kept) == HeaderWords.of_cells(kept, epoch | 3 << 16) == words
        assert (HeaderWords.of_cells(kept, other) is None) == (other != epoch)
    assert HeaderWords.of_cells([cells[0], 0]) is HeaderWords.of_cells([0, cells[1]], epoch) is None
    assert HeaderWords.of_cells([cells[0], words.call | (epoch ^ 1) << 48], epoch) is None


@given(plans, plans)
def test_equal_headers_mean_equal_calls(a: CallPlan, b: CallPlan) -> None:
    def call(plan: CallPlan) -> tuple[object, ...]:
        sent_as = Op.SEND if plan.op is Op.RECV else plan.op
        how = plan.algorithm, plan.dtype, plan.reduction, plan.launch.digest
        return (sent_as, *how, plan.nbytes, plan.root, plan.piece)

    assert (header_of(a) == header_of(b)) == (call(a) == call(b))


def test_send_matches_its_recv() -> None:
    send, recv = (CallPlan(op, "one_shot", "float32", 64, root=3) for op in (Op.SEND, Op.RECV))
    assert header_of(send) == header_of(recv)


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=8), st.lists(st.integers(0, 1 << 20), max_size=8))
def test_sizes_are_part_of_the_header(a: list[int], b: list[int]) -> None:
    assume(a != b)
    plan_a, plan_b = (CallPlan(Op.ALL_GATHER, "ring", "int8", 0, sizes=tuple(sizes)) for sizes in (a, b))
    assert header_of(plan_a) != header_of(plan_b)


@pytest.mark.parametrize("nbytes", [-1, 1 << 44])
def test_message_beyond_the_field_is_refused(nbytes: int) -> None:
    with pytest.raises(ConfigError, match="a message has from 0 to 17592186044415 bytes, not"):
        header_of(CallPlan(Op.ALL_REDUCE, "ring", "float32", nbytes))


@given(launches, launches)
def test_launches_differ_in_the_header_where_their_digests_do(a: LaunchShape, b: LaunchShape) -> None:
    def words(launch: LaunchShape) -> HeaderWords:
        return header_of(CallPlan(Op.ALL_REDUCE, "ring", "float32", 64, launch=launch))

    assert (words(a) == words(b)) == (a.digest == b.digest)
    assert a != b or a.digest == b.digest


def test_launches_close_to_each_other_have_other_digests() -> None:
    """About one of 2^14 pairs goes undetected, as with a random digest, and never twice as many."""
    shapes = [(p, block, warps) for p in range(1, 1026) for block in (128, 512, 4096) for warps in range(1, 17)]
    digests = {(*shape, chunk): LaunchShape(*shape, chunk).digest for shape in shapes for chunk in (0, 4096)}
    for more, other in ((1, 0), (0, 4096), (1, 4096)):
        pairs = [
            (digest, digests.get((p + more, *rest, chunk ^ other))) for (p, *rest, chunk), digest in digests.items()
        ]
        undetected = sum(one == another for one, another in pairs)
        assert undetected <= len(pairs) >> 13


@given(st.integers(1, 1 << 16), st.integers(1, 1 << 16), st.sampled_from(wire.NORM_KINDS))
def test_norms_of_rows_of_other_lengths_differ_in_the_header(a: int, b: int, kind: str) -> None:
    """A pair of lengths goes undetected as a pair of launches does: one of 2^14."""

    def plan(hidden: int, launch: LaunchShape) -> CallPlan:
        norm = wire.Norm(hidden, kind=kind)
        return CallPlan(Op.ALL_REDUCE_RMS_NORM, "two_shot", "float32", 64, norm.code, launch=launch, norm=norm)

    launch = LaunchShape(4, 512, 8)
    assert header_of(plan(a, launch)) == header_of(plan(a, launch))
    near = [hidden for first in (a, b) for hidden in (first, first + 1, first + 512, 2 * first)]
    apart = {header_of(plan(hidden, launch)).call for hidden in near}
    assert len(apart) >= len(set(near)) - 1
    said = decoded(header_of(plan(a, launch))).differs(["launch"])
    assert " in rows or launch #" in said


def test_digest_of_launches_is_spread_evenly() -> None:
    """One of 2^14 pairs of launches goes undetected, as with a random digest."""
    shapes = [LaunchShape(p, b, w) for p in range(1, 200) for b in (128, 256, 512, 1024) for w in (1, 2, 4, 8)]
    digests = [shape.digest for shape in shapes]
    expected = (1 << 14) * (1 - (1 - 2**-14) ** len(digests))
    assert len(set(digests)) > 0.95 * expected


def test_a_piece_says_the_size_of_its_call() -> None:
    whole = CallPlan(Op.ALL_REDUCE, "ring", "float32", 64 << 20)
    piece = CallPlan(Op.ALL_REDUCE, "ring", "float32", 64 << 20, whole_nbytes=128 << 20, piece=1)
    assert (header_of(whole).size, header_of(piece).size) == (1 << 47 | 64 << 20, 1 << 47 | 128 << 20)
    assert decoded(header_of(piece)).differs(["piece", "nbytes"]) == "all_reduce(float32, 128 MiB, ring), piece 1"
    said = decoded(header_of(whole)).differs(["launch"])
    assert said == f"all_reduce(float32, 64 MiB, ring) in launch #{whole.launch.digest:04x}"


def test_barrier_has_no_dtype() -> None:
    assert decoded(header_of(CallPlan(Op.BARRIER, "one_shot", "float32", 0))).dtype == "-"


@given(st.integers(0, (1 << 48) - 1), st.integers(0, (1 << 48) - 1))
def test_any_words_can_be_read(size: int, call: int) -> None:
    """A header of a rank gone astray is shown, whatever it holds."""
    assert str(decoded(HeaderWords(size, call)))


def test_every_field_has_room_for_its_last_value() -> None:
    assert len(registered()) < wire.MAX_ALGORITHMS
    last = CallPlan(Op.BARRIER, NAMES[-1], "float32", 0, root=1023, piece=31, reduction=wire.REDUCTIONS[-1])
    digest = LaunchShape().digest
    assert decoded(header_of(last)) == Header("barrier", "-", NAMES[-1], wire.REDUCTIONS[-1], 1023, 0, digest, 31)


@given(
    st.sampled_from([wire.TIMEOUT, wire.MISMATCH, wire.DEAD, wire.INTERRUPTED, wire.UNREACHABLE]),
    st.sampled_from(list(Op)),
    st.sets(st.integers(0, wire.MAX_NAMED_RANKS - 1) | st.integers(0, 15)),
    st.integers(1, 1 << 64),
)
def test_fault_round_trip(kind: int, op: Op, ranks: set[int], epoch: int) -> None:
    word = wire.encode_fault(kind, int(op), ranks, epoch)
    assert 0 < word < 1 << 63, "positive as a signed number"
    named = tuple(sorted(rank for rank in ranks if rank // 16 == min(ranks) // 16))
    assert Fault.decode(word) == Fault(kind, op.label, named, epoch & 0xFFFFFFFF)


def test_fault_names_the_last_rank_and_every_operation_its_field_holds() -> None:
    assert Fault.decode(wire.encode_fault(wire.DEAD, 63, (1008, 1023, 1023), 7)) == Fault(
        wire.DEAD, "op 63", (1008, 1023), 7
    )
    assert Fault.decode(wire.encode_fault(wire.TIMEOUT, 1, (40, 17, 16), 7)).ranks == (16, 17)


@given(st.integers(0, 1 << 32), st.integers(1, wire.MAX_WORLD_SIZE))
def test_slices_cover_the_message(nbytes: int, world_size: int) -> None:
    size = wire.slice_bytes(nbytes, world_size)
    assert size % wire.SLICE_ALIGN == 0
    assert size * world_size >= nbytes
    assert size * world_size < nbytes + world_size * wire.SLICE_ALIGN, "no slice is larger than it must be"


def test_sentinel_is_a_nan_in_every_dtype_and_its_stand_in_too() -> None:
    import torch

    for word in (wire.SENTINEL, wire.SENTINEL_STAND_IN):
        bits = torch.tensor([word - (1 << 32) if word >> 31 else word], dtype=torch.int32)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert bits.view(dtype).isnan().all()
    assert wire.SENTINEL != wire.SENTINEL_STAND_IN


def test_headers_read_as_calls() -> None:
    def said(**fields: object) -> str:
        plain = {"op": Op.ALL_REDUCE, "algorithm": "one_shot", "dtype": "float32", "nbytes": 2048}
        return str(decoded(header_of(CallPlan(**plain | fields))))

    assert said() == "all_reduce(float32, 2 KiB, one_shot)"
    assert said(reduction="max", algorithm="vendor") == "all_reduce(float32, 2 KiB, vendor, max)"
    assert said(op=Op.BROADCAST, root=3) == "broadcast(float32, 2 KiB, one_shot, root 3)"
    assert said(op=Op.SEND, root=2) == "send(float32, 2 KiB, one_shot, from rank 2)"
    uneven = said(op=Op.ALL_GATHER, root=wire.UNEVEN, sizes=(3, 4))
    assert uneven == f"all_gather(float32, uneven sizes #{wire._fnv('3,4'):08x}, one_shot)"
