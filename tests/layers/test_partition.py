"""Division of dimensions and heads: every element belongs to one rank, evenly, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotcast.errors import ConfigError
from shotcast.layers.partition import partition, partition_heads, shard


@given(total=st.integers(1, 5000), parts=st.integers(1, 16), unit=st.sampled_from([1, 2, 16, 64, 128]))
def test_shares_cover_all_in_order_and_evenly(total: int, parts: int, unit: int) -> None:
    if total < parts:
        with pytest.raises(ConfigError, match=f"{total} cannot be divided between {parts} ranks"):
            partition(total, parts, unit)
        return
    ranges = partition(total, parts, unit)
    assert [element for part in ranges for element in part] == list(range(total))
    assert len(ranges) == parts
    assert all(ranges)
    used = unit
    while used > 1 and total // used < parts:
        used //= 2
    assert all(part.start % used == 0 for part in ranges)
    assert max(map(len, ranges)) - min(map(len, ranges)) < 2 * used


@given(kv_heads=st.integers(1, 12), group=st.integers(1, 8), ranks=st.integers(1, 24))
def test_heads_read_their_own_group(kv_heads: int, group: int, ranks: int) -> None:
    heads = kv_heads * group
    seen: list[int] = []
    for rank in range(ranks):
        mine, kept, kv_head_of, zeroed = partition_heads(heads, kv_heads, rank, ranks)
        assert mine, "a rank has nothing to compute"
        assert [kept[place] for place in kv_head_of] == [head // group for head in mine]
        assert set(kv_head_of) == set(range(len(kept))), "a head is kept that nobody reads"
        seen += [] if zeroed else mine
    assert seen == list(range(heads))


@given(total=st.integers(1, 300), ranks=st.integers(1, 32), unit=st.sampled_from([1, 16, 64]))
def test_shards_that_count_cover_all_in_order(total: int, ranks: int, unit: int) -> None:
    shards = [shard(total, rank, ranks, unit) for rank in range(ranks)]
    assert all(each.part for each in shards)
    assert [element for each in shards if not each.zeroed for element in each.part] == list(range(total))
    assert [each.part for each in shards if not each.zeroed] == partition(total, min(ranks, total), unit)


def test_nine_heads_on_two_ranks_and_more_ranks_than_groups() -> None:
    assert partition_heads(9, 3, 0, 2) == (range(5), range(2), (0, 0, 0, 1, 1), False)
    assert partition_heads(9, 3, 1, 2) == (range(5, 9), range(1, 3), (0, 1, 1, 1), False)
    assert [partition_heads(8, 2, rank, 4)[1] for rank in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]


def test_heads_that_form_no_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="9 heads do not divide into groups for 2"):
        partition_heads(9, 2, 0, 1)
