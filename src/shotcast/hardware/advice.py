"""Advice for running ranks on a host, based on facts about it."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

from shotcast.hardware import catalog
from shotcast.hardware.detect import HostFacts
from shotcast.units import about_size, counted
from shotcast.wire import MAX_WORLD_SIZE


class Level(enum.Enum):
    """Severity of a finding."""

    GOOD = "good"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence of advice. A problem prevents something; a note says what is slower or otherwise different."""

    level: Level
    text: str


_good, _note, _problem = (functools.partial(Finding, level) for level in Level)

SHM_PER_RANK_BYTES = 17 << 18
"""The maximum tmpfs use of a CPU rank, which a test compares with the actual use."""


def findings(facts: HostFacts) -> list[Finding]:
    """Return the advice for ``facts``, CPU ranks first."""
    return [*_cpu(facts), *_gpu(facts)]


def _cpu(facts: HostFacts) -> list[Finding]:
    found = []
    shm_needed_bytes = MAX_WORLD_SIZE * SHM_PER_RANK_BYTES
    if facts.shm_bytes == 0:
        found.append(_problem(f"{facts.shm_dir} does not exist: CPU ranks need a tmpfs; name one in SHOTCAST_SHM_DIR."))
    elif facts.shm_free_bytes < shm_needed_bytes:
        found.append(
            _problem(
                f"{facts.shm_dir} has {about_size(facts.shm_free_bytes)} free; {MAX_WORLD_SIZE} CPU ranks need up "
                f"to {about_size(shm_needed_bytes)}. Enlarge it (docker run --shm-size=1g), or pass a smaller "
                "max_bytes."
            )
        )
    else:
        found.append(_good(f"CPU ranks work: {facts.shm_dir} is large enough for {MAX_WORLD_SIZE} of them."))
    if facts.cores < facts.cores_installed:
        found.append(
            _note(f"This process may use {facts.cores} of {facts.cores_installed} cores (affinity or cgroup).")
        )
    if facts.cores < MAX_WORLD_SIZE:
        ranks = f"{facts.cores} ranks" if facts.cores > 1 else "one rank"
        found.append(
            _note(
                f"Beyond {ranks}, CPU ranks share the {counted(facts.cores, 'core')}: results are correct, but a call "
                "then waits for the scheduler."
            )
        )
    return found


def _gpu(facts: HostFacts) -> list[Finding]:
    if not facts.gpus:
        return [_note(f"{_why_no_gpu(facts)} Ranks are CPU processes.")]
    found = []
    if "triton" not in facts.versions:
        found.append(
            _problem("Triton is not installed, and the GPU kernels are written in it: pip install 'shotcast[triton]'.")
        )
    found.append(_world_sizes(facts))
    found.append(_multicast(facts))
    for name in dict.fromkeys(gpu.name for gpu in facts.gpus):
        spec = catalog.find(name)
        if spec is None:
            text = f"{name} is not in the catalog, so the cost model has no figures for it, and layout auto no plan."
            found.append(_note(text))
        else:
            link = spec.link
            found.append(
                _good(f"{name}: {link.name}, expect {link.usable_bw_gbps:g} GB/s in each direction ({link.source}).")
            )
    return found


def _why_no_gpu(facts: HostFacts) -> str:
    if facts.cuda_error:
        return f"CUDA does not start: {facts.cuda_error}."
    if not facts.cuda_runtime:
        return f"This PyTorch ({facts.versions['torch']}) is built without CUDA."
    return "No GPU is visible." if facts.cuda_driver else "There is no NVIDIA driver."


def _world_sizes(facts: HostFacts) -> Finding:
    count = len(facts.gpus)
    if count == 1:
        return _note("One GPU has no other to exchange tensors with; CPU ranks work.")
    if not facts.all_peers:
        apart = [
            f"{i}-{j}"
            for i, row in enumerate(facts.peer_access)
            for j, reached in enumerate(row)
            if i < j and not reached
        ]
        return _problem(
            f"GPUs {', '.join(apart)} cannot access each other's memory, which own algorithms need; NCCL serves those."
        )
    if count > MAX_WORLD_SIZE:
        return _note(
            f"{count} GPUs can access each other's memory; own algorithms serve groups of up to {MAX_WORLD_SIZE}, NCCL "
            "serves larger ones."
        )
    sizes = "2" if count == 2 else f"2 to {count}"
    return _good(f"All {count} GPUs can access each other's memory: world sizes {sizes} are served.")


def _multicast(facts: HostFacts) -> Finding:
    if not all(gpu.multicast for gpu in facts.gpus):
        return _note("These GPUs have no multicast: a store to all ranks is one store to each of them.")
    if facts.multicast_disabled_by:
        return _note(
            f"The GPUs offer multicast, which {facts.multicast_disabled_by} leaves off, so peer stores are used."
        )
    return _good(
        "The GPUs offer multicast: one store reaches all ranks. Where the system forbids it, peer stores are used."
    )
