"""The entry point that registers the backend with PyTorch."""

from __future__ import annotations

from typing import Any

from shotcast.process_group.names import BACKEND


def register() -> None:
    """Register the backend, whose parts are imported when its first group is created. A second call does nothing.

    It never raises: PyTorch calls it at ``import torch``, even in builds without torch.distributed.
    """
    try:
        import torch.distributed as dist

        if dist.is_available():
            dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:  # an error here would break every program that imports torch
        import logging

        logging.getLogger(__name__).warning("the backend %s of torch.distributed is not there", BACKEND, exc_info=True)


def _create(options: Any, backend_options: Any) -> Any:
    """Create a process group for torch.distributed, possibly before the group of all ranks exists.

    Raises TypeError if ``pg_options`` are not NCCL options.
    """
    from shotcast.process_group import torch_private
    from shotcast.process_group.device_calls import ThreadWork
    from shotcast.process_group.group import ShotcastProcessGroup
    from shotcast.process_group.works import InnerWork, SeveralWorks, StreamWork

    if backend_options is not None and not torch_private.are_nccl_options(backend_options):
        kind = type(backend_options).__name__
        raise TypeError(f"pg_options of the backend {BACKEND} are ProcessGroupNCCL.Options, for its NCCL, not {kind}")
    others = torch_private.other_backends(BACKEND)
    if others:
        import warnings

        found = ", ".join(f"{device}:{name}" for device, name in others.items())
        warnings.warn(f"the backend {BACKEND} serves all tensors of its groups; {found} is not used", stacklevel=2)
    place = options.store, options.group_rank, options.group_size
    ranks = options.global_ranks_in_group  # none for the group of all ranks
    group = ShotcastProcessGroup(*place, options.timeout, options.group_id, backend_options, ranks)
    torch_private.trace_as_group(ShotcastProcessGroup)
    torch_private.keep_works_of_join()
    torch_private.run_untraced(ShotcastProcessGroup, InnerWork, SeveralWorks, StreamWork, ThreadWork)
    bound = torch_private.bound_device()
    if bound is not None:
        group.bound_device_id = bound
    return group
