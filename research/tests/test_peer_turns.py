"""Peers' results are compared before they are timed, and the ratio is that to the best of them."""

from __future__ import annotations

import peer_turns
import pytest
import torch
from peer_turns import Contender, Job

JOB = Job(0, 1, torch.device("cpu"), None)  # type: ignore[arg-type]
FACTS = {"op": "all_reduce", "tokens": 0, "bytes": 8}


def test_a_wrong_sum_is_not_timed() -> None:
    contenders = [Contender("other", lambda: torch.tensor([1.0, 2.5]))]
    with pytest.raises(ValueError, match=r"other is off by 0\.5: .*'bytes': 8"):
        peer_turns.in_turns(JOB, contenders, torch.tensor([1.0, 2.0]).double(), torch.tensor(0.25), FACTS)


def test_nan_is_wrong() -> None:
    contenders = [Contender("other", lambda: torch.tensor([float("nan")]))]
    with pytest.raises(ValueError, match="other is off"):
        peer_turns.in_turns(JOB, contenders, torch.zeros(1).double(), torch.tensor(0.25), FACTS)


def test_ratios_are_to_the_best_of_the_others() -> None:
    times = {"shotcast": (3.0, 2.0), "nccl": (9.0, 8.0), "sglang": (4.0, 1.6)}
    rows = [FACTS | {"by": name, "us": us, "together_us": together} for name, (us, together) in times.items()]
    rows += [FACTS | {"bytes": 16, "by": "shotcast", "us": 5.0, "together_us": 5.0}]
    table = peer_turns.table_of(rows)
    cells = [list(column.cells) for column in table.columns]
    assert [column.header for column in table.columns] == ["message", *times, "ratio"]
    assert cells[0] == ["8 B", "16 B"]
    assert cells[2] == ["9.00 8.00", ""]
    assert cells[-1] == ["0.750 1.250", "- -"]


def test_values_of_a_rank_are_the_same_everywhere() -> None:
    assert torch.equal(JOB.values(1, 2, 5), Job(1, 2, JOB.device, JOB.group).values(1, 2, 5))
    assert not torch.equal(JOB.values(1, 2, 5), JOB.values(1, 3, 5))
