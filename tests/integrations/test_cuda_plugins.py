"""The sums of the plug-ins on GPUs, in graphs that are captured as vLLM and SGLang capture them."""

from __future__ import annotations

import cuda_plugin_targets as targets
import pytest

import shotcast

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_captured_sums(batch_invariant: bool) -> None:
    for calls in shotcast.spawn(targets.captured_sums, 2, batch_invariant, timeout_s=300):
        assert (calls["all_reduce"], calls["declined"]) == (9, 0)
