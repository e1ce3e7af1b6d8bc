"""NCCL without thread blocks: its zero-CTA policy, by which copy engines move bytes between windows.

It needs memory of NCCL, on which PyTorch's symmetric memory has to be set before any is allocated, and ours is of
another kind. So the form has ranks of its own, without our communicator. NCCL falls back to kernels without a word, so
its log is read: where it names no copy engines, there is no time.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch_symmetric
from overlap_bench.config import LIBRARY, LIBRARY_PLAIN, OverlapConfig
from overlap_bench.library import GROUP_TIMEOUT_S, Messages
from overlap_bench.result import Measured
from overlap_bench.steps import Steps
from overlap_bench.times import times_of
from product_room import seen_kernels

from shotcast import env
from shotcast.collectives.communicator import Communicator
from shotcast.collectives.rank_device import device_of
from shotcast.errors import RankFailed, ShotcastError
from shotcast.launcher.spawn import spawn
from shotcast.overlap.policy import Way

NAME = "library, zero CTAs"
OPS = ("all_gather", "all_to_all")
"""The operations that NCCL does by copy engines."""
MARK = "Copy Engine"
"""The words by which NCCL's log says that copy engines were used."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The times of NCCL as it is and without thread blocks, and the kernels of one message without."""

    plain_us: float
    zero_us: float
    kernels: tuple[str, ...]


def with_zero_ctas(measured: Measured, config: OverlapConfig, timeout_s: float) -> Measured:
    """Return the results with a row more: NCCL without thread blocks, of the same products and messages."""
    like = next(row for row in measured.rows if row.way == LIBRARY_PLAIN)
    same = replace(config, nbytes=0 if config.whole else like.nbytes, repeat=like.repeat)
    row = replace(like, way=NAME, by=LIBRARY, time_us=None, spans=(), evidence="", reason="")
    with tempfile.TemporaryDirectory() as folder:
        log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL,TUNING", "NCCL_DEBUG_FILE": f"{folder}/%p.log"}
        if not env.multicast():
            log["NCCL_NVLS_ENABLE"] = "0"
        try:
            seen: Seen = spawn(measure_on_rank, config.world_size, same, timeout_s=timeout_s, env=log)[0]
        except RankFailed as error:
            return replace(measured, rows=(*measured.rows, replace(row, reason=_last_error(error))))
        lines = [line for file in Path(folder).glob("*.log") for line in file.read_text(errors="replace").splitlines()]
    evidence, reason = judged(lines, seen)
    row = replace(row, time_us=seen.zero_us if evidence else None, evidence=evidence, reason=reason)
    return replace(measured, rows=(*measured.rows, row))


def judged(lines: list[str], seen: Seen) -> tuple[str, str]:
    """Return what shows that copy engines were used, and else why there is no time."""
    found = [line for line in lines if MARK in line]
    ran = f"kernels of a message: {', '.join(seen.kernels) or 'none'}"
    if not found:
        return "", f"none of {len(lines)} lines of NCCL's log names copy engines; {ran}"
    line = found[0].split("NCCL INFO", 1)[-1].strip()
    own = f"ranks of its own, where {LIBRARY_PLAIN} took {seen.plain_us / 1e3:.2f} ms"
    return f"NCCL's log: {line}; {ran}; {own}", ""


def _last_error(error: RankFailed) -> str:
    """Return the last line of the failed rank's error that says what was wrong."""
    lines = [line.strip() for line in error.detail.splitlines() if line.strip()]
    return [line for line in lines if not line.startswith("(")][-1][:300]


class _Ranks:
    """The ranks of a job without our communicator: what products, messages and times need of one."""

    def __init__(self) -> None:
        self.device = device_of("cuda")
        torch.cuda.set_device(self.device)
        options = dist.ProcessGroupNCCL.Options()
        cast(Any, options.config).cta_policy = cast(Any, dist.ProcessGroupNCCL).NCCL_CTA_POLICY_ZERO
        timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
        dist.init_process_group("nccl", timeout=timeout, pg_options=options, device_id=self.device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.plain = cast(dist.ProcessGroup, dist.new_group(backend="nccl", timeout=timeout))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(parts, x, group=self.plain)
        return torch.cat(parts)

    def barrier(self) -> None:
        dist.all_reduce(torch.ones(1, device=self.device), group=self.plain)
        torch.cuda.synchronize(self.device)


def measure_on_rank(config: OverlapConfig) -> Seen:
    """Measure as one rank of several."""
    with torch.no_grad():
        ranks = _Ranks()
        torch_symmetric.use_memory_of_nccl()
        world = dist.group.WORLD
        assert world is not None
        dist.all_reduce(torch.ones(1, device=ranks.device))  # NCCL's communicator has to exist before windows
        comm = cast(Communicator, ranks)
        plain = Steps(config, comm, config.nbytes, config.repeat)
        windows = Messages(plain.elsewhere(torch_symmetric.allocator(world, ranks.device)), world)
        forms = {LIBRARY_PLAIN: Messages(plain, ranks.plain).form(True), NAME: windows.form(True)}
        for name, form in forms.items():
            form.steps.load()
            form.run()
            torch.cuda.synchronize(ranks.device)
            if wrong := form.wrong():
                raise ShotcastError(f"{name}: {wrong}")
        kernels = tuple(kernel.name for kernel in seen_kernels(_message(windows)))
        times = times_of(comm, [Way(name, form.run) for name, form in forms.items()], config)
        dist.destroy_process_group()
        return Seen(times[LIBRARY_PLAIN], times[NAME], kernels)


def _message(messages: Messages) -> Callable[[], None]:
    def one() -> None:
        messages.begin(0)()

    return one
