"""Nothing waits for a call of the backend that waits for a late rank. Run with ``pytest -m gpu``, on two GPUs."""

from __future__ import annotations

import progress_targets as targets
import pytest
import torch

import shotcast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_a_message_that_a_sum_waits_for() -> None:
    assert max(shotcast.spawn(targets.message_beside_a_sum, 2, timeout_s=120)) < 5


def test_groups_that_begin_in_another_order() -> None:
    assert max(shotcast.spawn(targets.two_groups, 2, timeout_s=120)) < 5


@pytest.mark.parametrize("elements", [1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 23])
def test_a_product_beside_a_sum(elements: int) -> None:
    assert shotcast.spawn(targets.product_beside_a_sum, 2, elements, timeout_s=120)[0] < 0.5


def test_replays_beside_asynchronous_calls() -> None:
    assert shotcast.spawn(targets.replays_beside_asynchronous_calls, 2, 300, timeout_s=120) == [0, 0]
