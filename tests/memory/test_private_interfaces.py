"""The private interfaces of PyTorch and Triton that the package uses exist."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist


def test_symmetric_memory() -> None:
    from shotcast.memory import cuda

    assert callable(cuda.symmetric_memory.empty)
    assert {"tensor", "group"} <= set(inspect.signature(cuda.symmetric_memory.rendezvous).parameters)
    ranks = dist.ProcessGroup(dist.HashStore(), 1, 2)
    cuda._register_process_group("ranks without a backend", ranks)
    assert dist.distributed_c10d._resolve_process_group("ranks without a backend") is ranks  # type: ignore[attr-defined]
    cuda._unregister_process_group("ranks without a backend")


def test_the_store_of_the_job() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        from shotcast.memory.host_group import Rendezvous, StoreGroup

        group = StoreGroup(Rendezvous.of_group(dist.group.WORLD), 5.0)
        assert group.all_gather({"a": 1}) == [{"a": 1}]
        assert group.all_gather({"a": 2}) == [{"a": 2}]
        left = [key for key in store.list_keys() if "shotcast/" in key]
        assert sorted(key.partition("shotcast/0/")[2] for key in left) == ["here/0", "numbers"]  # no completed steps
    finally:
        dist.destroy_process_group()


def test_process_groups_are_named_where_they_are_made() -> None:
    from torch.distributed import distributed_c10d

    assert list(inspect.signature(distributed_c10d._process_group_name).parameters) == ["ranks", "use_hashed_name"]
    assert "_process_group_name(" in inspect.getsource(distributed_c10d._new_group_with_tag)


def test_streams_have_capture_state() -> None:
    assert callable(torch.cuda.is_current_stream_capturing)


def test_a_compiled_kernel_can_be_loaded_before_its_launch() -> None:
    from triton.compiler import CompiledKernel

    assert callable(CompiledKernel._init_handles)


@pytest.mark.full
def test_operators_can_be_ordered() -> None:
    assert {"op", "effect", "lib"} <= set(inspect.signature(torch.library._register_effectful_op).parameters)
    assert torch.library.EffectType.ORDERED is not None
    from torch._inductor import ir, lowering

    assert "prev_effect_buffer" in inspect.getsource(ir.EffectfulKernel)
    assert callable(lowering.register_lowering)
