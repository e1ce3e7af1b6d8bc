"""The plain-torch reference against float64: each rounding may contribute half a unit, and no more."""

from __future__ import annotations

import expected_results
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import FLOATS, inputs

from shotcast import wire
from shotcast.collectives import reference
from shotcast.collectives.algorithm import in_rank_order
from shotcast.hardware.nodes import NodeLayout

dtypes = st.sampled_from(list(FLOATS.values()))


def random_inputs(dtype: torch.dtype, world_size: int, count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator).to(dtype) for _ in range(world_size)]


def bound(xs: list[torch.Tensor], dtype: torch.dtype, hops: int) -> torch.Tensor:
    """Return the error bound of a sum: N - 1 additions rounded to float32, and ``hops`` roundings to the dtype.

    Each rounds a value of at most (1 + small) sum |x| by half a unit in the last place, eps / 2 of it.
    """
    total = torch.stack(xs).double().abs().sum(0)
    unit32, unit = torch.finfo(torch.float32).eps / 2, torch.finfo(dtype).eps / 2
    relative = (1 + unit32) ** len(xs) * (1 + unit) ** hops - 1
    return relative * total + hops * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


@settings(max_examples=60)
@given(dtypes, st.integers(1, 8), st.integers(0, 70), st.integers(0, 1 << 20))
def test_sum_is_within_the_stated_roundings(dtype: torch.dtype, world_size: int, count: int, seed: int) -> None:
    xs = random_inputs(dtype, world_size, count, seed)
    exact = torch.stack(xs).double().sum(0)
    for algorithm, hops in (("one_shot", 1), ("two_shot", 1), ("ring", world_size - 1 or 1)):
        got = expected_results.all_reduce(xs, algorithm)
        assert got.dtype is dtype
        assert bool(((got.double() - exact).abs() <= bound(xs, dtype, hops)).all()), algorithm


def test_bound_detects_an_extra_rounding() -> None:
    """A sum kept in bfloat16 throughout exceeds the bound."""
    xs = random_inputs(torch.bfloat16, 8, 1000, 1)
    careless = xs[0].clone()
    for x in xs[1:]:
        careless += x
    exact = torch.stack(xs).double().sum(0)
    assert bool(((careless.double() - exact).abs() > bound(xs, torch.bfloat16, 1)).any())


# -- several nodes ----------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> NodeLayout:
    """Draw even nodes of up to 16 ranks, whose ranks may be interleaved."""
    nodes = draw(st.integers(1, 9))
    keys = [str(node) for node in range(nodes) for _ in range(draw(st.integers(1, 16 // nodes)))]
    counts = min(keys.count(str(node)) for node in range(nodes))
    even = [str(node) for node in range(nodes)] * counts
    return NodeLayout.of_keys(draw(st.permutations(even)))


def by_recursive_doubling(xs: list[torch.Tensor], layout: NodeLayout) -> list[torch.Tensor]:
    """Return the sum that each node has after the exchange: fold, then partner = position xor 2^step, then unfold."""
    nodes = []
    for members in layout.members:
        total = torch.zeros_like(xs[0], dtype=torch.float32)
        for rank in members:
            total = total + xs[rank].float()
        nodes.append(total)
    extra = len(nodes)
    while extra & (extra - 1):
        extra -= 1
    extra = len(nodes) - extra
    folding = {2 * i + 1: 2 * i for i in range(extra)}
    for source, target in folding.items():
        nodes[target] = nodes[target] + nodes[source]
    active = [node for node in range(len(nodes)) if node not in folding]
    step = 1
    while step < len(active):
        before = [nodes[node] for node in active]
        for position, node in enumerate(active):
            nodes[node] = before[position] + before[position ^ step]
        step *= 2
    for source, target in folding.items():
        nodes[source] = nodes[target]
    return [total.to(xs[0].dtype) for total in nodes]


@settings(max_examples=80)
@given(dtypes, layouts(), st.integers(0, 20), st.integers(0, 1 << 20))
def test_sums_over_nodes(dtype: torch.dtype, layout: NodeLayout, count: int, seed: int) -> None:
    """The order of recursive doubling with folding is that of the reference, and the error is within the bound."""
    xs = random_inputs(dtype, layout.world_size, count, seed)
    got = reference.tree_sum(xs, layout)
    assert got.dtype is dtype
    for total in by_recursive_doubling(xs, layout):
        assert torch.equal(total, got), "all nodes have the same bits"
    exact = torch.stack(xs).double().sum(0)
    assert bool(((got.double() - exact).abs() <= bound(xs, dtype, 1)).all())
    one = NodeLayout.one_node(layout.world_size)
    ordered = reference.ordered_sum(xs)
    assert torch.equal(reference.tree_sum(xs, one), ordered)
    if in_rank_order(layout.shape):
        assert torch.equal(got, ordered), "sums in rank order may serve these nodes"


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 2), (4, 1), (5, 1), (8, 1)], ids=str)
def test_sums_in_rank_order_are_others(shape: tuple[int, int]) -> None:
    """So ``auto`` must not take them for these nodes."""
    nodes, ranks = shape
    layout = NodeLayout.of_keys([str(rank // ranks) for rank in range(nodes * ranks)])
    assert not in_rank_order(layout.shape)
    xs = random_inputs(torch.float32, layout.world_size, 1000, 5)
    assert not torch.equal(reference.tree_sum(xs, layout), reference.ordered_sum(xs))


TREES = {
    2: lambda a, b: a + b,
    3: lambda a, b, c: (a + b) + c,
    4: lambda a, b, c, d: (a + b) + (c + d),
    5: lambda a, b, c, d, e: ((a + b) + c) + (d + e),
    6: lambda a, b, c, d, e, f: ((a + b) + (c + d)) + (e + f),
    7: lambda a, b, c, d, e, f, g: ((a + b) + (c + d)) + ((e + f) + g),
    8: lambda a, b, c, d, e, f, g, h: ((a + b) + (c + d)) + ((e + f) + (g + h)),
}


@pytest.mark.parametrize("nodes", TREES)
def test_trees_as_the_page_of_numerics_writes_them(nodes: int) -> None:
    layout = NodeLayout.of_keys([str(rank // 2) for rank in range(2 * nodes)])
    xs = random_inputs(torch.bfloat16, 2 * nodes, 500, nodes)
    sums = [xs[2 * node].float() + xs[2 * node + 1].float() for node in range(nodes)]
    expected = TREES[nodes](*sums).to(torch.bfloat16)
    assert torch.equal(reference.tree_sum(xs, layout), expected)
    rounded = [total.to(torch.bfloat16).float() for total in sums]
    expected = TREES[nodes](*rounded).to(torch.bfloat16)
    assert torch.equal(expected_results.all_reduce(xs, "nvrar_16bit", layout), expected)


# -- sums of nodes in 16 bits ----------------------------------------------------------------------------------------


def rounded_nodes_bound(xs: list[torch.Tensor], layout: NodeLayout, got: torch.Tensor) -> torch.Tensor:
    """Return the bound of docs/reference/numerics.md: p_h are sums of nodes, exact to a part in 2^23."""
    unit, sizes = torch.finfo(xs[0].dtype).eps / 2, [x.double().abs() for x in xs]
    partial = sum(sum(xs[rank].double() for rank in members).abs() for members in layout.members)
    return unit * partial + len(xs) * 2.0**-23 * sum(sizes) + unit * got.double().abs()


sixteen_bits = st.sampled_from([torch.float16, torch.bfloat16])


@pytest.mark.full
@settings(max_examples=150)
@given(
    sixteen_bits,
    layouts(),
    st.lists(st.floats(-1e3, 1e3, width=16), min_size=1, max_size=60),
    st.integers(-30, 0),
    st.integers(0, 1 << 20),
)
def test_rounded_sums_of_nodes_within_their_bound(
    dtype: torch.dtype, layout: NodeLayout, values: list[float], power: int, seed: int
) -> None:
    """Hypothesis makes the values, down to subnormal ones; each rank has them in another order, and of other signs."""
    generator = torch.Generator().manual_seed(seed)
    xs = []
    for _ in range(layout.world_size):
        x = torch.tensor(values)[torch.randperm(len(values), generator=generator)] * 2.0**power
        sign = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
        xs.append((x * sign).to(dtype))
    got = expected_results.rounded_nodes_sum(xs, layout)
    assert got.dtype is dtype
    off = (got.double() - torch.stack(xs).double().sum(0)).abs()
    assert bool((off <= rounded_nodes_bound(xs, layout, got)).all())
    last = torch.finfo(dtype).eps / 2 * got.double().abs()
    coarse = [reference.rounded_nodes_error_bound([x.double() for x in xs], one) for one in (dtype, None)]
    assert all(bool((off <= each + last).all()) for each in coarse)
    if layout.ranks_per_node == 1:
        assert torch.equal(got, reference.tree_sum(xs, layout)), "a lone rank's numbers have 16 bits"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_bound_of_rounded_sums_is_neither_too_wide_nor_for_another_rounding(dtype: torch.dtype) -> None:
    layout = NodeLayout.of_keys([str(rank // 2) for rank in range(16)])
    xs = random_inputs(dtype, 16, 1 << 14, 1)
    exact = torch.stack(xs).double().sum(0)
    got = expected_results.all_reduce(xs, "nvrar_16bit", layout)
    off, allowed = (got.double() - exact).abs(), rounded_nodes_bound(xs, layout, got)
    assert 0.4 < float((off / allowed).max()) <= 1
    assert not torch.equal(got, reference.tree_sum(xs, layout))
    careless = xs[0].clone()
    for x in xs[1:]:
        careless += x
    assert bool(((careless.double() - exact).abs() > allowed).any()), "rounded after each addition"


def test_rounded_sums_of_small_and_large_numbers() -> None:
    half, layout = torch.float16, NodeLayout.of_keys(["a", "a", "b", "b"])
    xs = [torch.tensor([value], dtype=half) for value in (-(2.0**-24), 0.0, -0.0, -0.0)]
    assert expected_results.rounded_nodes_sum(xs, layout).item() == -(2.0**-24)
    xs = [torch.tensor([value], dtype=half) for value in (60000.0, 60000.0, -60000.0, -60000.0)]
    assert reference.tree_sum(xs, layout).item() == 0.0
    assert expected_results.rounded_nodes_sum(xs, layout).isnan().all(), "sums of nodes beyond float16"
    zeros = expected_results.rounded_nodes_sum([torch.tensor([-0.0], dtype=half)] * 4, layout)
    assert not torch.signbit(zeros).item(), "sums start at +0.0"


# -- FP8 transport ----------------------------------------------------------------------------------------------------


def block_maxima(values: torch.Tensor, width: int) -> torch.Tensor:
    """Return the largest value of each element's block. Slices of ``width`` elements have their own blocks."""
    parts = []
    for part in values.split(width):
        rows = torch.nn.functional.pad(part, (0, -len(part) % 128)).view(-1, 128)
        parts.append(rows.amax(1, keepdim=True).expand(rows.shape).reshape(-1)[: len(part)])
    return torch.cat(parts)


def fp8_error(size: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Compute E(x, a) of docs/reference/numerics.md."""
    return (1 + 2.0**-20) * torch.maximum(size / 16, largest.clamp_min(2.0**-100) / 458752) + 2.0**-20 * size


def fp8_bound(xs: list[torch.Tensor], got: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bound of docs/reference/numerics.md for each element, and the coarser one from largest values.

    The bound refers to S, the owner's sum. The test knows only that S is near the exact sum.
    """
    dtype, count = xs[0].dtype, len(xs)
    width = max(wire.slice_bytes(got.numel() * dtype.itemsize, count) // dtype.itemsize, 1)
    sizes = [x.double().abs() for x in xs]
    largest = [block_maxima(size, width) for size in sizes]
    first = sum(fp8_error(size, top) for size, top in zip(sizes, largest, strict=True))
    first = first + count * 2.0**-23 * sum(largest)
    total = torch.stack(xs).double().sum(0).abs() + first
    unit = torch.finfo(dtype).eps / 2
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    last = unit * got.double().abs() + least
    return first + fp8_error(total, block_maxima(total, width)) + last, 0.13 * sum(largest) + 2.0**-100 + last


@pytest.mark.full
@settings(max_examples=150)
@given(
    dtypes,
    st.integers(1, 8),
    st.lists(st.floats(-1e4, 1e4, width=16), min_size=1, max_size=300),
    st.integers(-16, -1),
    st.booleans(),
    st.integers(0, 1 << 20),
)
def test_fp8_within_its_bound(
    dtype: torch.dtype, world_size: int, values: list[float], power: int, alike: bool, seed: int
) -> None:
    """Hypothesis makes the values (many equal, some tiny, few large), of any sign and order on each rank."""
    generator = torch.Generator().manual_seed(seed)
    xs = []
    for _ in range(world_size):
        x = torch.tensor(values)[torch.randperm(len(values), generator=generator)] * 2.0**power
        spread = torch.randint(-6, 1, x.shape, generator=generator).float()
        xs.append((x if alike else x * 2.0**spread).to(dtype))
    got = expected_results.all_reduce(xs, "two_shot_fp8")
    assert got.dtype is dtype
    exact = torch.stack(xs).double().sum(0)
    for bound_of_it in fp8_bound(xs, got):
        assert bool(((got.double() - exact).abs() <= bound_of_it).all())


def test_fp8_bound_detects_an_extra_quantisation() -> None:
    """A sum that is quantised four times exceeds the bound, and a bound of half the size would not hold."""
    xs = random_inputs(torch.float32, 4, 4096, 1)
    exact = torch.stack(xs).double().sum(0)
    got = expected_results.all_reduce(xs, "two_shot_fp8")
    bound_of_it, _ = fp8_bound(xs, got)
    off = (got.double() - exact).abs()
    assert bool((off <= bound_of_it).all())
    assert float((off / bound_of_it).max()) > 0.5
    assert 0.01 < float(off.norm() / exact.norm()) < 0.04, "about 3%"
    coarse = torch.stack([expected_results.through_fp8(x * 5) / 5 for x in xs]).sum(0).mul(1.13).double()
    assert bool(((coarse - exact).abs() > bound_of_it).any())


def test_fp8_rounds_to_e4m3_values() -> None:
    """A block whose largest value is 448 has the scale 1, so its roundings can be written by hand."""
    x = torch.tensor([448.0, 1.0, 17.0, 18.5, 2.0**-9, 2.0**-10, 3 * 2.0**-11, -0.0, -(2.0**-11)])
    got = expected_results.through_fp8(x)
    assert got.tolist() == [448.0, 1.0, 16.0, 18.0, 2.0**-9, 0.0, 2.0**-9, 0.0, 0.0]
    assert got.signbit().tolist() == [False] * 7 + [True, True]


def test_fp8_blocks_have_their_own_scales() -> None:
    x = torch.cat([torch.full((128,), 448.0), torch.full((130,), 2.0**-12)])
    assert torch.equal(expected_results.through_fp8(x), x)
    assert expected_results.through_fp8(x[1:])[127].item() == 0.0, "now in a block with 448"
    assert torch.equal(expected_results.through_fp8(x[1:])[128:], x[129:])


def test_fp8_makes_a_block_nan_but_not_its_neighbours() -> None:
    for odd in (float("inf"), float("-inf"), float("nan")):
        x = torch.ones(384)
        x[130] = odd
        got = expected_results.through_fp8(x)
        assert got[128:256].isnan().all()
        assert torch.equal(got[:128], x[:128])
        assert torch.equal(got[256:], x[256:])
    huge = [torch.full((8,), 3e38)] * 2
    assert expected_results.all_reduce(huge, "two_shot_fp8").isnan().all(), "a sum beyond float32"


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 2.0**-101, 2.0**-100, 1e-20, torch.finfo(torch.float32).max])
def test_fp8_of_the_smallest_and_the_largest_is_never_nan(size: float) -> None:
    x = torch.full((128,), size)
    got = expected_results.through_fp8(torch.cat([x, -x]))
    assert not got.isnan().any()
    assert bool(((got[:128] - x).abs().double() <= fp8_error(x.double(), x.double())).all())
    assert got[128:].signbit().all()


def test_order_and_start_are_part_of_the_contract() -> None:
    big, one = torch.tensor([2.0**25]), torch.tensor([1.0])
    assert reference.ordered_sum([one, big, -big]).item() == 0.0
    assert reference.ordered_sum([big, -big, one]).item() == 1.0
    minus_zero = torch.tensor([-0.0])
    assert not torch.signbit(reference.ordered_sum([minus_zero, minus_zero])).item(), "sums start at +0.0"
    # bfloat16: the ring rounds 256 + 1 at each hop, the other algorithms only once at the end.
    xs = [torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, 1.0, 256.0)]
    assert reference.ordered_sum(xs).item() == 258.0
    assert expected_results.ring_sum(xs, owner=1).item() == 256.0, "256 + 1 twice, from rank 2 on"
    assert expected_results.ring_sum(xs, owner=2).item() == 258.0, "1 + 1, then 256"


@pytest.mark.parametrize("dtype", FLOATS.values())
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_reduce_scatter_equals_part_of_all_reduce(dtype: torch.dtype, world_size: int) -> None:
    xs = [x.view(world_size, 8) for x in inputs(8 * world_size, dtype, world_size, 2, "cpu")]
    for algorithm in ("one_shot", "ring"):
        # Slices of 8 elements are multiples of 16 bytes, so the ring's slices equal the parts of the scatter.
        whole = expected_results.all_reduce(xs, algorithm)
        parts = [expected_results.reduce_scatter(xs, rank, algorithm) for rank in range(world_size)]
        assert torch.equal(torch.cat(parts).nan_to_num(7.0), whole.nan_to_num(7.0))


def test_infinities_and_nan() -> None:
    inf, nan = float("inf"), float("nan")
    xs = [torch.tensor([inf, inf, nan, 3e38]), torch.tensor([1.0, -inf, 1.0, 3e38])]
    for algorithm in ("one_shot", "ring"):
        got = expected_results.all_reduce(xs, algorithm)
        assert got[0] == inf
        assert got[1:3].isnan().all()
        assert got[3] == inf
