"""Measure the kernels of a GPU of this machine, its host's time, and with several GPUs their link, for a calibration.

Results go to a folder: ``kernels_x1.json``, and with several GPUs ``all_reduce_bf16_x<N>.json`` and
``fused_bf16_x<N>.json`` as ``shotcast bench`` writes them. :func:`gpu_calibration.fit.calibrate` reads
such a folder. Nothing here runs a model that predictions are held against.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gpu_times
import torch
from call_modes import harness
from call_modes.mode_config import ModeConfig
from call_modes.rows import kernels_of
from gpu_calibration import attention, host, passes, products
from gpu_calibration.case import Cases
from gpu_calibration.fit import KERNELS_FILE
from gpu_calibration.host import HostSteps
from gpu_calibration.products import ProductShape

from shotcast.bench import kernels, report
from shotcast.bench.progress import progress
from shotcast.collectives.rank_device import gpu_of
from shotcast.errors import ConfigError
from shotcast.hardware import catalog
from shotcast.hardware.catalog import GpuSpec
from shotcast.hardware.detect import detect
from shotcast.launcher.spawn import RankGroup, spawn

_MOST_COMPILERS = 14
_FP8_CAPABILITY = 8, 9
_SIZES = tuple(1 << power for power in range(10, 29))
_FUSED_TOKENS = tuple(1 << power for power in range(10))
_HIDDEN = 8192


@dataclass(frozen=True, slots=True)
class Measurement:
    """The points to measure; the default is all of them."""

    products: tuple[ProductShape, ...]
    sustained: tuple[ProductShape, ...]
    others: tuple[Cases, ...]
    host: HostSteps
    heat_s: float = gpu_times.HEAT_S

    @classmethod
    def everything(cls, fp8: bool) -> Measurement:
        """Return all points of a GPU, with or without FP8."""
        dtypes = (False, True) if fp8 else (False,)
        alone, sustained = [], []
        for each in dtypes:
            head_rows = () if each else products.HEAD_ROWS
            alone += products.shapes(each, products.MODELS[each], products.ROWS, head_rows)
            sustained += products.shapes(each, products.SUSTAINED[each], products.SUSTAINED_ROWS)
        others: tuple[Cases, ...] = (
            *attention.decode_shapes(),
            *attention.prompt_shapes(),
            *passes.pass_shapes(fp8),
        )
        return cls(tuple(alone), tuple(sustained), others, HostSteps())


def require_gpus(number: int) -> GpuSpec:
    """Return the data sheet of this machine's GPUs.

    Raises:
        ConfigError: there are fewer GPUs, they are of several kinds, or the catalog does not know them.
    """
    names = [gpu.name for gpu in detect().gpus]
    if not names:
        raise ConfigError("PyTorch finds no usable GPU to calibrate; shotcast calibrate measures this machine's CPU")
    if not 1 <= number <= len(names):
        raise ConfigError(f"--world-size must be from 1 to the {len(names)} GPUs of this machine, not {number}")
    if len(set(names[:number])) > 1:
        raise ConfigError(f"a calibration is of one kind of GPU, and this machine has {', '.join(sorted(set(names)))}")
    spec = catalog.find(names[0])
    if spec is None:
        raise ConfigError(f"{names[0]} is not in the catalog of GPUs, so the fit does not know where to begin")
    return spec


def measure(
    folder: Path,
    ranks: int,
    command: str,
    shown: bool = False,
    points: Measurement | None = None,
) -> list[Path]:
    """Measure, and return the files that were written. Each is complete, and the kernels' is kept after each group.

    Args:
        folder: where they go.
        ranks: GPUs; with 2 or more, collectives between them are measured too.
        command: as results record it.
        shown: show progress on standard error.
        points: what is measured; None for everything that the GPU has.

    Raises:
        ConfigError: there is no such GPU, or there are fewer.
    """
    spec = require_gpus(ranks)
    fp8 = spec.fp8_tflops is not None and spec.compute_capability >= _FP8_CAPABILITY
    points = Measurement.everything(fp8) if points is None else points
    file = folder / KERNELS_FILE
    document: dict[str, Any] = report.stamped(detect().as_json(), command, kernels.of_layout("cuda", 1)) | {"rows": []}
    with progress(1, shown) as advance:
        advance("compiling kernels")
        compile_all(points)
    for name, shapes in (("products", points.products), ("attention and passes", points.others)):
        document["rows"] += spawn(cases_of_rank, 1, shapes, name if shown else "")[0]
        file.write_text(as_text(document))
    for name, target, *arguments in (
        ("products in a row", spawn, sustained_of_rank, 1, points.sustained, points.heat_s),
        ("the host", spawn, host.measure, 1, "cuda", points.host),
        ("first tokens", host.first_tokens, points.host),
    ):
        with progress(1, shown) as advance:
            advance(name)
            found = target(*arguments)
        document["rows"] += found[0] if target is spawn else found
        file.write_text(as_text(document))
    return [file, *(_link(folder, ranks, fp8, command, shown) if ranks > 1 else ())]


def cluster_text() -> str:
    """Return the description of this machine as a cluster of one node, in YAML."""
    gpus = detect().gpus
    spec = catalog.find(gpus[0].name)
    assert spec is not None
    return f"""\
name: {len(gpus)} x {gpus[0].name}
gpu: {spec.name}  # {spec.source}; the link: {spec.link.source}
node:
  num_gpus_per_node: {len(gpus)}
"""


def as_text(document: dict[str, Any]) -> str:
    """Return a result as a file, a row in a line."""
    head = json.dumps({name: value for name, value in document.items() if name != "rows"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(_short(row))}" for row in document["rows"])
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in row.items()}


def compile_all(points: Measurement) -> None:
    """Compile the kernels of all points, in several processes at once, into Triton's cache."""
    count = max(1, min(_MOST_COMPILERS, (os.cpu_count() or 1) - 1))
    shapes: list[Cases] = [*points.products, *points.sustained, *points.others]
    one_thread = {"OMP_NUM_THREADS": "1"}
    groups = [RankGroup.start(compile_shapes, 1, shapes[part::count], env=one_thread) for part in range(count)]
    groups.append(RankGroup.start(host.compile_steps, 1, "cuda", points.host, env=one_thread))
    for group in groups:
        group.results(None)


def compile_shapes(shapes: Sequence[Cases]) -> None:
    """Call each kernel once, on data that may hold anything."""
    with torch.inference_mode():
        for case in _cases(shapes, False):
            case.call(0)
        torch.cuda.synchronize()


def cases_of_rank(shapes: Sequence[Cases], shown: str = "") -> list[dict[str, Any]]:
    """Check and measure kernels, each alone; ``shown`` names them where progress is shown."""
    with torch.inference_mode(), progress(len(shapes), bool(shown)) as advance:
        torch.manual_seed(0)
        rows = []
        for shape in shapes:
            advance(shown)
            for case in _cases([shape], True):
                case.check()
                rows.append(case.row | {"us": gpu_times.time_us(case.call, case.turns)})
        return rows


def sustained_of_rank(shapes: Sequence[ProductShape], heat_s: float) -> list[dict[str, Any]]:
    """Measure matmuls in sequence without a pause, so that the clock goes down. Each type of weights runs by
    itself."""
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        torch.manual_seed(0)
        for fp8 in sorted({shape.fp8 for shape in shapes}):
            cases = list(_cases([shape for shape in shapes if shape.fp8 == fp8], True))
            graphs = []
            for case in cases:
                case.check()
                calls = gpu_times.calls_of(case.call, gpu_times.SUSTAINED_GRAPH_S)
                graphs.append(gpu_times.captured(case.call, case.turns, calls))
            times = gpu_times.sustained_us(graphs, heat_s)
            kernel = {"kernel": "sustained_product"}
            rows += [case.row | kernel | {"us": us} for case, us in zip(cases, times, strict=True)]
            del cases, graphs, case
            torch.cuda.empty_cache()
    return rows


def _cases(shapes: Sequence[Cases], filled: bool) -> Iterator[Any]:
    device = torch.device("cuda", gpu_of(0))
    torch.cuda.set_device(device)
    for shape in shapes:
        yield from shape.cases(device, filled)


def _link(folder: Path, ranks: int, fp8: bool, command: str, shown: bool) -> Iterator[Path]:
    """Measure all-reduces, plain and fused with the norm, with ``fp8`` also in FP8."""
    plain = ModeConfig("all_reduce", "cuda", "bfloat16", _SIZES, ("one_shot", "two_shot", "ring"), budget_s=0.04)
    fused = ModeConfig(
        "all_reduce_rms_norm",
        "cuda",
        "bfloat16",
        tuple(tokens * _HIDDEN * 2 for tokens in _FUSED_TOKENS),
        ("one_shot", "two_shot", "plain_one_shot", "plain_two_shot", *(("fp8_dynamic",) if fp8 else ())),
        budget_s=0.04,
        hidden=_HIDDEN,
    )
    for name, config in (("all_reduce", plain), ("fused", fused)):
        rows = harness.run(replace(config, progress=shown), ranks)
        path = folder / f"{name}_bf16_x{ranks}.json"
        made_by = kernels_of(rows)
        report.write(path, report.Result.now(rows, environment=detect().as_json(), command=command, kernels=made_by))
        yield path
