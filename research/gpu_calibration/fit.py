"""The fit of a GPU's calibration to a folder of results: kernels, the host's time, and collectives, each alone.

``kernels_x1.json`` has the kernels of one GPU and the host's time (``research/calibrate_gpu.py`` writes it);
``all_reduce_bf16_x<N>.json`` and ``fused_bf16_x<N>.json`` have the sums of N GPUs (``shotcast bench``). Rows say what
was run, not how much work that is: the amounts of work are those of :mod:`shotcast.cost.inference`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from gpu_calibration.least_squares import FusedNormPoint, Measured, fit, fit_fused_norm, fit_kernel

from shotcast.collectives.registry import registered
from shotcast.cost.collective import time_us
from shotcast.cost.inference import (
    FP8,
    PASSES,
    HostCost,
    KernelCost,
    KernelWork,
    decode_attention,
    product,
    product_kind,
    prompt_attention,
    rows_pass,
    sustained_kind,
)
from shotcast.errors import ConfigError
from shotcast.hardware import catalog
from shotcast.hardware.catalog import GpuSpec
from shotcast.planner.calibration import FUSED_NORM, FUSED_NORMS, STAND_IN, Calibration, Fit, load
from shotcast.planner.cpu_rows import KernelPoint
from shotcast.wire import DTYPES, NodeShape, Op

KERNELS_FILE = "kernels_x1.json"
OF_STAND_IN = f"of the packaged calibration of {STAND_IN}"
"""The end of a source of a calibration that is not its own results."""
_LINK_ALGORITHMS = ("ring", "one_shot", "two_shot")
_KEYS_RATE = 3e4  # thousands of keys a second that one program reads: where the fit begins
_WIDEST_IN_REGISTERS = 32768
"""The widest row that is quantized by a program in its registers. Wider ones take several times as long; of the models
that are measured only an undivided 405B has them, and no constant is fitted to them."""
_ITEM = 2
_PAIR = 2


def calibrate(folder: Path, part: str = "") -> Calibration:
    """Return the calibration of a GPU by the results in ``folder``, which all say that they are of it.

    Without results of sums, or of sums with norms in their kernel, the constants of these are those of the packaged
    calibration of the H200: the link by the data sheets, and the norms as they are. Sums of two ranks do not tell bytes
    sent from bytes taken in, so without more ranks the bandwidth of the link is taken from there.

    Args:
        folder: the results.
        part: the GPU, as CUDA names it; "" for the one in the files.

    Raises:
        ConfigError: results are missing, are of several GPUs or of another one, or do not determine a constant.
    """
    if part:
        _known(part, "--part")
    files = _Results(folder)
    points: dict[str, list[KernelPoint]] = {}
    fused: dict[str, list[FusedNormPoint]] = {}
    host: list[dict[str, Any]] = []
    try:
        for kind, message in _fused_norms(files):
            fused.setdefault(kind, []).append(message)
        by_ranks = list(_collectives(files))
        collectives = [measured for _, measured in by_ranks]
        for row in files.rows(KERNELS_FILE):  # last, as fingerprints of the newest kernels count
            if row["kernel"] in ("host", "first_token"):
                host.append(row)
            elif (found := kernel_point(row)) is not None:
                points.setdefault(found[0], []).append(found[1])
        _require_times(folder, points, collectives, host)
        cost = host_cost(host)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{folder / files.read[-1]} has a row that is no result to calibrate by: {error!r}"
        ) from error
    part, gpu = files.device(part)
    kinds = fit_kinds(points, gpu)
    norms = {kind: fit_fused_norm(messages) for kind, messages in fused.items()}
    lacking = [kind for kind in FUSED_NORMS if kind not in norms and (gpu.fp8_tflops or not kind.endswith(FP8))]
    sources = list(files.read)
    taken = [*(["link"] if not collectives else []), *lacking]
    bw_gbps = None
    pairs_alone = {ranks for ranks, _ in by_ranks} == {_PAIR}
    if taken or pairs_alone:
        packaged = load(STAND_IN).scaled_to(gpu)
        norms |= {kind: packaged.fused_norms[kind] for kind in lacking}
        if pairs_alone:
            bw_gbps = packaged.link.bw_gbps
            taken.append("bandwidth of the link")
        sources.append(f"{', '.join(taken)} {OF_STAND_IN}")
    if collectives:
        link = fit(collectives, bw_gbps)
        wrong = [time_us(work, link) / measured_us - 1 for work, measured_us in collectives]
        residual = math.sqrt(sum(error**2 for error in wrong) / len(wrong))
    else:
        link, residual = packaged.link, packaged.link_residual
    return Calibration(part, kinds, link, residual, tuple(sources), files.kernels, host=cost, fused_norms=norms)


def kernel_point(row: dict[str, Any]) -> tuple[str, KernelPoint] | None:
    """Return the kind and the measurement of a row of a kernel; None for one that nothing is fitted to.

    These are steps of prompts and of sequences that decode in one kernel, which earlier results have.
    """
    kernel, us = row["kernel"], row["us"]
    if kernel in ("product", "sustained_product"):
        fp8 = row["fp8"]
        kind = product_kind(row["rows"], fp8) if kernel == "product" else sustained_kind(fp8)
        work = product(row["rows"], row["outputs"], row["inputs"], 1 if fp8 else _ITEM)
    elif kernel == "decode_attention":
        kind = kernel
        work = decode_attention(row["sequences"], row["context"], row["kv_heads"], row["head_dim"], _ITEM)
    elif kernel == "prompt_attention":
        kind = kernel
        work = prompt_attention([(tokens, before) for tokens, before in row["parts"]], row["heads"], row["head_dim"])
    elif kernel == "rows_pass":
        name = row["name"]
        fp8 = name.endswith(FP8) or name == "quantization"
        if fp8 and row["width"] > _WIDEST_IN_REGISTERS:
            return None
        kind = name if name.removesuffix(FP8) in PASSES else f"{kernel}{FP8 * fp8}"
        work = rows_pass(row["nbytes"])
    elif kernel == "mixed_attention":
        return None
    else:
        raise ValueError(f"there is no kernel {kernel!r}")
    return kind, KernelPoint(work, us)


def fit_kinds(points: dict[str, list[KernelPoint]], gpu: GpuSpec) -> dict[str, Fit[KernelCost]]:
    """Return the constants of each kind of kernel.

    Raises:
        ConfigError: the points of a kind do not determine its constants.
    """
    kinds: dict[str, Fit[KernelCost]] = {}
    for kind, measured in sorted(points.items()):  # few rows before many, and all products before those in a row
        start = _start(kind, gpu)
        read_as = kind.replace("many_rows", "few_rows").replace("sustained_product", "product_many_rows")
        if known := kinds.get(read_as):  # the weights are read as fast
            start = KernelCost(start.fixed_us, known.cost.first_rate, start.second_rate)
        if kind.startswith("sustained"):  # memory has a clock of its own, and these points are bound by arithmetic
            measured = [KernelPoint(KernelWork(0.0, point.work.second), point.time_us) for point in measured]
        try:
            kinds[kind] = fit_kernel(measured, start)
        except ConfigError as error:
            raise ConfigError(f"{kind}: {error}") from error
    return kinds


def host_cost(rows: list[dict[str, Any]]) -> HostCost:
    r"""Fit the host's time of a step to rows of steps without a model's work.

    Steps that graphs replay give a, b, c and d by least squares of the relative errors, none below zero:

    .. math:: T = a + b \cdot sequences + c \cdot rows + d \cdot requests

    where a request is one that begins. The others give the time of a layer: the median of the slopes over the number of
    layers. What a first token takes beyond its step is the client's.

    Raises:
        ConfigError: the rows do not have what is needed.
    """
    graphs = [row for row in rows if row["kernel"] == "host" and row["graphs"]]
    eager: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for row in rows:
        if row["kernel"] == "host" and not row["graphs"]:
            eager.setdefault((row["sequences"], row["rows"]), []).append((row["layers"], row["us"]))
    slopes = [(max(each)[1] - min(each)[1]) / (max(each)[0] - min(each)[0]) for each in eager.values() if len(each) > 1]
    matrix = np.array([[1, row["sequences"], row["rows"], _begins(row)] for row in graphs], float).reshape(-1, 4)
    times = np.array([row["us"] for row in graphs], float)
    if len(graphs) < 4 or np.linalg.matrix_rank(matrix) < 4 or not slopes:
        raise ConfigError("the host's times need steps of several sequences, prompts of several lengths and layers")
    fixed_us, per_sequence_us, per_row_us, per_request_us = _not_negative(matrix / times[:, None])
    first = [row for row in rows if row["kernel"] == "first_token"]
    found = HostCost(
        fixed_us,
        per_sequence_us,
        per_row_us,
        True,
        "steps of a small model",
        per_layer_us=max(0.0, median(slopes)),
        per_request_us=per_request_us,
    )
    if not first:
        return found
    beyond = min(row["us"] - found.time_us(1, row["prompt"], 1) for row in first)
    return HostCost(**{name: getattr(found, name) for name in HostCost.__slots__} | {"client_us": max(0.0, beyond)})


def _begins(row: dict[str, Any]) -> int:
    """Return how many requests begin in a step: prompts have a row more than sequences."""
    return int(row["rows"] > row["sequences"])


def _not_negative(matrix: np.ndarray) -> list[float]:
    """Return the least-squares solution of ``matrix x = 1`` without those that would be negative, which are 0."""
    kept = list(range(matrix.shape[1]))
    while True:
        solution = np.linalg.lstsq(matrix[:, kept], np.ones(len(matrix)), rcond=None)[0]
        if (solution >= 0).all():
            found = np.zeros(matrix.shape[1])
            found[kept] = solution
            return [float(value) for value in found]
        kept = [column for column, value in zip(kept, solution, strict=True) if value >= 0]


def _require_times(
    folder: Path,
    points: dict[str, list[KernelPoint]],
    collectives: list[Measured],
    host: list[dict[str, Any]],
) -> None:
    times = (
        *(point.time_us for each in points.values() for point in each),
        *(each.time_us for each in collectives),
        *(row["us"] for row in host),
    )
    for time in times:
        if not isinstance(time, int | float) or not 0 < time < math.inf:
            raise ConfigError(f"{folder}: a result takes a number of microseconds above 0, not {time!r}")


def _known(part: str, origin: str) -> GpuSpec:
    spec = catalog.find(part)
    if spec is None:
        raise ConfigError(f"{origin}: {part} is not in the catalog of GPUs, so the fit does not know where to begin")
    return spec


class _Results:
    """The files of a folder of results; it remembers which were read, the GPUs and the fingerprints in them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.read: list[str] = []
        self.kernels: dict[str, str] = {}
        self._devices: dict[str, list[str]] = {}  # by file, its GPUs as CUDA names them

    def device(self, part: str) -> tuple[str, GpuSpec]:
        """Return the one GPU of all files, as CUDA names it and of the catalog.

        Args:
            part: what it must be; "" for what the files say.
        """
        first = "--part" if part else ""
        for name, devices in self._devices.items():
            if not devices:
                raise ConfigError(f"{self.folder / name} does not say which GPU it was measured on")
            for device in devices:
                part, first = part or device, first or name
                if _known(device, str(self.folder / name)) != _known(part, first):
                    raise ConfigError(
                        f"{self.folder / name} was measured on {device}, and {first} says {part}: a calibration is of "
                        "one GPU"
                    )
        return part, _known(part, first)

    def named(self, pattern: str) -> list[str]:
        """Return the names of files in order."""
        return sorted(file.name for file in self.folder.glob(pattern))

    def rows(self, name: str) -> list[dict[str, Any]]:
        try:
            value = json.loads((self.folder / name).read_text())
            rows = list(value["rows"])
            kernels = dict(value.get("kernels", {}))
            devices = [str(gpu["name"]) for gpu in value.get("environment", {}).get("gpus", [])]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self.folder / name} has no results to calibrate by: {error}") from error
        self.read.append(name)
        self.kernels |= kernels
        self._devices[name] = devices
        return rows


def _fused_norms(files: _Results) -> Iterator[tuple[str, FusedNormPoint]]:
    """Yield sums with residual and norm in the kernel beside those without, each by the algorithm that is faster."""
    for name in files.named("fused_bf16_x*.json"):
        messages: dict[int, dict[str, float]] = {}
        for row in files.rows(name):
            messages.setdefault(row["nbytes"], {})[row["algorithm"]] = row["time_us"]
        for nbytes, times in messages.items():
            if not (isinstance(nbytes, int) and nbytes > 0 and all(0 < us < math.inf for us in times.values())):
                raise ValueError(f"a message of {nbytes!r} bytes takes {times} us")
            sum_us = min(times["plain_one_shot"], times["plain_two_shot"])
            yield FUSED_NORM, FusedNormPoint(nbytes, sum_us, min(times["one_shot"], times["two_shot"]))
            if "fp8_dynamic" in times:  # some GPUs have no FP8
                yield f"{FUSED_NORM}{FP8}", FusedNormPoint(nbytes, sum_us, times["fp8_dynamic"])


def _collectives(files: _Results, algorithms: Iterable[str] = _LINK_ALGORITHMS) -> Iterator[tuple[int, Measured]]:
    """Yield the ranks and the measurement of each sum."""
    for name in files.named("all_reduce_bf16_x*.json"):
        for row in files.rows(name):
            if row["algorithm"] in algorithms:
                form = registered()[row["algorithm"]].forms[Op[row["op"].upper()]]
                work = form.work(row["nbytes"], NodeShape(1, row["world_size"]), DTYPES[row["dtype"]])
                yield row["world_size"], Measured(work, row["time_us"])


def _start(kind: str, gpu: GpuSpec) -> KernelCost:
    """Return where the fit of a kind begins: the data sheet."""
    if "product" in kind:
        tflops = (gpu.fp8_tflops or gpu.bf16_tflops) if kind.endswith(FP8) else gpu.bf16_tflops
        return KernelCost(2.0, gpu.memory_bw_gbps, tflops * 1e3)
    if kind == "prompt_attention":
        return KernelCost(4.0, gpu.bf16_tflops * 1e3 / 2, _KEYS_RATE)
    if kind == "decode_attention":
        return KernelCost(4.0, gpu.memory_bw_gbps, _KEYS_RATE)
    return KernelCost(1.0, gpu.memory_bw_gbps)
