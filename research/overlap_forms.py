"""Sets of further forms of ``research/bench_overlap.py``: of other libraries, and forms that no chain chooses.

``own`` has our shaped products, ``library`` NCCL with each option that may help, ``torch`` what PyTorch makes of its
symmetric memory, and ``published`` the grid of arXiv 2606.09200. A form that ends the ranks is left out, and the ranks
start again.
"""

from __future__ import annotations

import functools
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import overlap_progress
import torch_forms
import zero_ctas
from large_gemm import GemmConfig
from matmuls import LibraryProduct, Product, ShapedProduct, own_gemm, sms_of
from occupancy import Multiprocessor
from overlap_bench import library, measure, own
from overlap_bench.config import LIBRARY, OWN, OverlapConfig
from overlap_bench.form import Candidate, Candidates, Form
from overlap_bench.library import Groups, Messages
from overlap_bench.result import Measured
from overlap_bench.steps import Steps
from overlap_verdicts import TORCH, verdicts
from product_room import multiprocessor_of

from shotcast.errors import ConfigError, RankFailed
from shotcast.launcher.spawn import spawn
from shotcast.overlap.chains import Chain
from shotcast.overlap.lanes import HIGH, LOW

logger = logging.getLogger(__name__)

PUBLISHED = "published"
SETS = (OWN, LIBRARY, TORCH, PUBLISHED)
CTAS = (4, 8, 16)
_LEAST_S = 30.0
"""The time in which ranks could start and measure."""
_PUBLISHED_TILES = (32, 64)
_PUBLISHED_BLOCKS = (1, 2, 4, 0)
"""Blocks that an SM holds; 0 for as many as fit."""
_BARRIER_BYTES = 256
"""Shared memory that the compiler takes for barriers, 24 bytes in 2026, and more."""
BESIDE_SMS = 24
"""SMs of a message whose kernels fit beside a block of our product on every SM."""


class LeftOutError(Exception):
    """A form that is not tried again."""


def run(config: OverlapConfig, sets: Sequence[str]) -> Measured:
    """Start the ranks and measure, and start them again without a form of another library that ended them."""
    if config.hosts is not None:
        raise ConfigError("simulated hosts have no further forms: leave out --sets")
    until = time.monotonic() + config.timeout_s
    measured = _beside_failures(config, until, sets)
    if config.device == "cuda" and LIBRARY in sets and config.op in zero_ctas.OPS:
        measured = zero_ctas.with_zero_ctas(measured, config, max(1.0, until - time.monotonic()))
    for sentence in verdicts(measured):
        print(sentence)
    return measured


def _beside_failures(config: OverlapConfig, until: float, sets: Sequence[str]) -> Measured:
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        while True:
            file = overlap_progress.new_file(Path(folder))
            left_s = max(1.0, until - time.monotonic())
            try:
                arguments = (config, sets, left_out, file)
                return spawn(measure_on_rank, config.world_size, *arguments, timeout_s=left_s)[0]
            except RankFailed as error:
                name = overlap_progress.other_form(file)
                if not name or name in left_out or until - time.monotonic() < _LEAST_S:
                    raise
                left_out[name] = f"it ended the ranks: {error.detail.strip().splitlines()[-1]}"[:300]
                logger.warning("%s is left out: %s", name, left_out[name])


def measure_on_rank(config: OverlapConfig, sets: Sequence[str], left_out: dict[str, str], file: Path) -> Measured:
    """Measure as one rank of several.

    Args:
        config: the setting.
        sets: those of the forms.
        left_out: forms that are not tried, and why.
        file: where rank 0 notes the form that it is at.
    """
    progress = overlap_progress.Progress(file)

    def found(steps: Steps, chain: Chain | None, groups: Groups) -> measure.Found:
        for by, candidate in candidates(steps, chain, groups, sets):
            reason = left_out.get(candidate.name)
            yield by, candidate if reason is None else Candidate(candidate.name, functools.partial(_refuse, reason))

    with progress.watch():
        return measure.measure_on_rank(config, found, progress.at)


def _refuse(reason: str) -> Form:
    raise LeftOutError(reason)


def candidates(steps: Steps, chain: Chain | None, groups: Groups, sets: Sequence[str]) -> measure.Found:
    """Yield the usual forms, and those of these sets."""
    yield from measure.candidates(steps, chain, groups)
    if steps.config.device == "cuda":
        if OWN in sets:
            yield from ((OWN, one) for one in shaped(steps))
        if LIBRARY in sets:
            yield from ((LIBRARY, one) for one in options_of_library(steps, groups))
        if TORCH in sets:
            yield from ((TORCH, one) for one in torch_forms.forms(steps, groups))
        if PUBLISHED in sets:
            yield from ((PUBLISHED, one) for one in published(steps, groups))


# -- ours -------------------------------------------------------------------------------------------------------------


def as_published() -> ShapedProduct:
    """Return a product of the faster of the publication's tiles (arXiv 2606.09200), which leave room on every SM."""
    return ShapedProduct(own_gemm().GemmConfig(64, 64, 64, 3, 4))


def shaped(steps: Steps) -> Candidates:
    """Yield the forms on GPUs that a chain does not try: with our products."""
    product = ShapedProduct()
    few = own.by_sms(steps, BESIDE_SMS)
    yield own.on_streams("shaped", steps, LOW, product, few)
    yield own.on_streams("shaped, priority", steps, HIGH, product, few)
    yield own.on_streams("shaped as published, priority", steps, HIGH, as_published(), few)
    for sms in filter(None, steps.config.sms):
        yield own.on_streams(f"{sms} SMs, shaped", steps, HIGH, _leaving(steps, sms), own.by_sms(steps, sms))


def _leaving(steps: Steps, sms: int) -> Product:
    """Return our product on all SMs but this many."""
    device = steps.comm.device
    return ShapedProduct(sms=sms_of(device) - sms if device.type == "cuda" else None)


# -- NCCL -------------------------------------------------------------------------------------------------------------


def options_of_library(steps: Steps, groups: Groups) -> Candidates:
    """Yield the forms of NCCL beside products that leave room, and with fewer thread blocks."""
    yield Candidate("library shaped", library.form_of(steps, groups, ShapedProduct()))
    yield Candidate("library shaped, priority", library.form_of(steps, groups, ShapedProduct(), priority=True))
    published = as_published()
    yield Candidate("library shaped as published", library.form_of(steps, groups, published))
    yield Candidate("library shaped as published, priority", library.form_of(steps, groups, published, priority=True))
    for sms in filter(None, steps.config.sms):
        yield Candidate(f"library, {sms} SMs left", library.form_of(steps, groups, LibraryProduct(sms), priority=True))
        on = ShapedProduct(sms=sms_of(steps.comm.device) - sms)
        yield Candidate(f"library shaped, {sms} SMs left", library.form_of(steps, groups, on, priority=True))
    for ctas in CTAS:
        yield Candidate(f"library, at most {ctas} CTAs", library.form_of(steps, groups, max_ctas=ctas))


# -- the published grid -----------------------------------------------------------------------------------------------


def published_tiles(sm: Multiprocessor) -> Iterator[tuple[str, GemmConfig]]:
    """Yield the tiles of the publication (arXiv 2606.09200), padded until an SM holds a chosen number of blocks."""
    gemm = own_gemm()
    for depth in _PUBLISHED_TILES:
        config = gemm.GemmConfig(64, 64, depth, 3, 4)
        for blocks in _PUBLISHED_BLOCKS:
            name = f"64x64x{depth}, {blocks or 'all'} blocks an SM"
            padding = 0
            if blocks:
                room = min(sm.shared_bytes // blocks - sm.reserved_shared_bytes, sm.max_block_shared_bytes)
                padding = (room - _BARRIER_BYTES - gemm.shared_bytes(config)) // sm.shared_unit * sm.shared_unit
            if padding >= 0:
                yield name, gemm.GemmConfig(64, 64, depth, 3, 4, padding_bytes=padding)


def published(steps: Steps, groups: Groups) -> Candidates:
    """Yield the published experiment: small tiles, few blocks an SM, priorities, and NCCL as it is."""
    for name, config in published_tiles(multiprocessor_of(steps.comm.device)):
        product = ShapedProduct(config)

        def products(product: ShapedProduct = product) -> Form:
            return Form(lambda: steps.multiply_all(product), steps, whole=False)

        def form(overlap: bool, priority: bool, product: ShapedProduct = product) -> Form:
            return Messages(steps, groups.of(priority=priority)).form(overlap, product)

        yield Candidate(f"{PUBLISHED} {name}, products alone", products)
        yield Candidate(f"{PUBLISHED} {name}, sequential", functools.partial(form, False, False))
        yield Candidate(f"{PUBLISHED} {name}", functools.partial(form, True, False))
        yield Candidate(f"{PUBLISHED} {name}, priority", functools.partial(form, True, True))
