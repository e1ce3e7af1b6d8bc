"""Calibrations: the constants of kernels and collectives on a GPU, fitted to measurements of them, with residuals.

Only kernels and collectives that were measured alone are fitted, never a run of an engine, so that measured runs of
engines show how far off a prediction is. The packaged calibrations are in ``planner/calibrations``; they are made by
``shotcast calibrate`` from results of ``benchmarks/linear.py``, ``benchmarks/decode_attention.py``,
``benchmarks/prompt_attention.py`` and ``shotcast bench``.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from shotcast.collectives.registry import registered
from shotcast.cost.calibration import KernelFit, KernelPoint, Measured, fit, fit_kernel
from shotcast.cost.collective import LinkCost, time_us
from shotcast.cost.inference import (
    CPU_KINDS,
    FEW_ROWS,
    KINDS,
    NO_HOST,
    HostCost,
    KernelCost,
    decode_attention,
    product,
    product_kind,
    prompt_attention,
    rows_pass,
)
from shotcast.errors import ConfigError
from shotcast.hardware import catalog
from shotcast.hardware.cluster import read_text
from shotcast.hardware.spec import GpuSpec
from shotcast.wire import DTYPES, NodeShape, Op

FUSED_NORM = "fused_norm"
"""The kind of what a fused all-reduce takes beyond the sum: residual and norm."""
LINK = "link"
"""The name of the residual of collectives."""
_LINK_ALGORITHMS = ("ring", "one_shot", "two_shot")
_KEYS_RATE = 3e4  # thousands of keys a second that one program reads: where the fit begins
_PROMPT_STEP = re.compile(r"(?:(\d+) x )?(\d+)(K?)(?: after (\d+)(K?))?$")
_BATCH_LINE = re.compile(r"\s+\w+ of \d\s+(\d+)x(\d+)\s+(.*)")
_BATCH_ROWS = re.compile(r"\s+weight((?:\s+\d+ rows)+)")
_PASS_LINE = re.compile(r"\s+(\d+) over (\d+), (\d+)\s+[\d.]+\s+([\d.]+)")


class Share(NamedTuple):
    """The constants of a rank of a machine whose cores and memory several ranks share."""

    kinds: Mapping[str, KernelFit]
    host: HostCost


@dataclass(frozen=True, slots=True)
class Calibration:
    """The constants of one GPU, or of a rank of one CPU machine.

    Attributes:
        part: the GPU as CUDA names it, or the processor.
        kinds: by kind of kernel, its constants and their residual (:data:`shotcast.cost.inference.KINDS`, and
            :data:`FUSED_NORM`).
        link: the constants of collectives within a node.
        link_residual: the root mean square of the relative errors of the measured collectives.
        sources: the files that it was fitted to.
        kernels: fingerprints of the kernels in these files.
        device: ``cuda`` or ``cpu``.
        dtype: of activations, and of weights that are not in FP8.
        few_rows: the most rows of a product that the engine's own kernels compute.
        host: of an engine on this machine.
        shares: on a CPU, by the number of ranks that share the machine, what ``kinds`` and ``host`` are then; those of
            the calibration itself are of the most ranks. Empty for GPUs, which are each rank's own.
    """

    part: str
    kinds: Mapping[str, KernelFit]
    link: LinkCost
    link_residual: float
    sources: tuple[str, ...]
    kernels: Mapping[str, str]
    device: str = "cuda"
    dtype: str = "bfloat16"
    few_rows: int = FEW_ROWS
    host: HostCost = NO_HOST
    shares: Mapping[int, Share] = field(default_factory=dict)

    @property
    def itemsize(self) -> int:
        """The bytes of an activation, and of a weight that is not in FP8."""
        return DTYPES[self.dtype]

    def of_ranks(self, ranks: int) -> Calibration:
        """Return the constants where so many ranks share the machine: a CPU's depend on that, a GPU's do not.

        Raises:
            ConfigError: so many were not measured.
        """
        if not self.shares:
            return self
        share = self.shares.get(ranks)
        if share is None:
            known = " or ".join(map(str, sorted(self.shares)))
            raise ConfigError(
                f"the calibration of {self.part} is of {known} ranks, and {ranks} are asked for; measure them by "
                f"shotcast calibrate --device cpu --world-size {ranks}"
            )
        return replace(self, kinds=share.kinds, host=share.host)

    @property
    def gpu(self) -> GpuSpec:
        """The data sheet of the GPU."""
        spec = catalog.find(self.part)
        if spec is None:
            raise ConfigError(f"{self.part} is not in the catalog of GPUs")
        return spec

    def time_us(self, kind: str, work: Any) -> float:
        """Return the time of a kernel in microseconds."""
        return self.kinds[kind].cost.time_us(work)

    def residual(self, kind: str) -> float:
        """Return the relative error bar of a kind of kernel, or of :data:`LINK`."""
        return self.link_residual if kind == LINK else self.kinds[kind].residual

    def scaled_to(self, gpu: GpuSpec) -> Calibration:
        """Return the constants for another GPU, by the ratios of the data sheets: the efficiency of kernels stays.

        Fixed costs and the rate at which one program reads keys stay as they are. Residuals stay too, and say nothing
        of how far off that assumption is.

        Raises:
            ConfigError: a CPU's constants are not those of another part.
        """
        if self.device == "cpu":
            if gpu.name != self.part:
                raise ConfigError(
                    f"the calibration is of a CPU, {self.part}, and says nothing of {gpu.name}; give the cluster that "
                    "shotcast calibrate wrote with it"
                )
            return self
        own = self.gpu
        if gpu == own:
            return self
        memory = gpu.memory_bw_gbps / own.memory_bw_gbps
        bf16 = gpu.bf16_tflops / own.bf16_tflops
        fp8 = (gpu.fp8_tflops or 0.0) / own.fp8_tflops if own.fp8_tflops else 0.0

        def scaled(kind: str, cost: KernelCost) -> KernelCost:
            if kind.startswith("product"):
                arithmetic = fp8 if kind.endswith("fp8") else bf16
                return KernelCost(cost.fixed_us, cost.first_rate * memory, cost.second_rate * arithmetic)
            return KernelCost(
                cost.fixed_us, cost.first_rate * (bf16 if kind == "prompt_attention" else memory), cost.second_rate
            )

        kinds = {
            kind: known._replace(cost=scaled(kind, known.cost))
            for kind, known in self.kinds.items()
            if fp8 or not kind.endswith("fp8")
        }
        wires = gpu.link.paper_bw_gbps / own.link.paper_bw_gbps
        link = LinkCost(self.link.fixed_us, self.link.step_us, self.link.bw_gbps * wires, self.link.local_gbps * memory)
        return replace(self, part=gpu.name, kinds=kinds, link=link)

    def as_json(self) -> str:
        """Return the calibration as a file; a CPU's has a line for each of its many kinds."""
        link = {name: getattr(self.link, name) for name in _LINK_FIELDS} | {"residual": self.link_residual}
        text = json.dumps(
            {
                "part": self.part,
                "device": self.device,
                "dtype": self.dtype,
                "few_rows": self.few_rows,
                "sources": list(self.sources),
                "kernels": dict(self.kernels),
                "kinds": {} if self.shares else _kinds_as_json(self.kinds),
                "link": _rounded(link),
                "host": _rounded(asdict(self.host)),
                "shares": {
                    str(ranks): {"kinds": _kinds_as_json(share.kinds), "host": _rounded(asdict(share.host))}
                    for ranks, share in self.shares.items()
                },
            },
            indent=1,
        )
        return _INNERMOST.sub(lambda found: " ".join(found[0].split()), text) if self.shares else text


_INNERMOST = re.compile(r"\{[^{}]*\}")
_LINK_FIELDS = ("fixed_us", "step_us", "bw_gbps", "local_gbps")
_HOST_FIELDS = ("fixed_us", "per_sequence_us", "per_row_us")
_DEVICES, _MODEL_DTYPES = ("cuda", "cpu"), ("bfloat16", "float16", "float32")


def _kinds_as_json(kinds: Mapping[str, KernelFit]) -> Any:
    return _rounded(
        {
            kind: asdict(known.cost) | {"residual": known.residual, "worst": known.worst, "points": known.points}
            for kind, known in kinds.items()
        }
    )


def load(part: str, path: Path | None = None) -> Calibration:
    """Return the calibration in a file, or without one the packaged calibration of a GPU.

    Raises:
        ConfigError: there is none, or the file is none.
    """
    if path is None:
        file = resources.files("shotcast.planner") / "calibrations" / f"{_file_name(part)}.json"
        if not file.is_file():
            raise ConfigError(
                f"there is no calibration of {part}; there is one of {', '.join(calibrated_parts())}. Make one by "
                "shotcast calibrate"
            )
        return parse(file.read_text(), part)
    return parse(read_text(path, "the calibration"), str(path))


def calibrated_parts() -> tuple[str, ...]:
    """Return the GPUs that have a packaged calibration."""
    folder = resources.files("shotcast.planner") / "calibrations"
    return tuple(sorted(json.loads(file.read_text())["part"] for file in folder.iterdir() if file.name[-5:] == ".json"))


def parse(text: str, origin: str) -> Calibration:
    """Return the calibration that a file says. Raises ConfigError if it says none."""
    try:
        value = json.loads(text)
        link = LinkCost(*(float(value["link"][name]) for name in _LINK_FIELDS))
        shares = {
            int(ranks): Share(_kinds_of(share["kinds"]), _host_of(share["host"]))
            for ranks, share in value["shares"].items()
        }
        kinds = shares[max(shares)].kinds if shares else _kinds_of(value["kinds"])
        found = Calibration(
            str(value["part"]),
            kinds,
            link,
            float(value["link"]["residual"]),
            tuple(value["sources"]),
            dict(value["kernels"]),
            str(value["device"]),
            str(value["dtype"]),
            int(value["few_rows"]),
            _host_of(value["host"]),
            shares,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{origin} is no calibration, as shotcast calibrate writes it: {error!r}") from error
    _require_sense(found, origin)
    return found


def _kinds_of(value: Any) -> dict[str, KernelFit]:
    return {
        str(kind): KernelFit(
            KernelCost(*(float(known[name]) for name in ("fixed_us", "first_rate", "second_rate"))),
            float(known["residual"]),
            float(known["worst"]),
            int(known["points"]),
        )
        for kind, known in value.items()
    }


def _host_of(value: Any) -> HostCost:
    if not isinstance(value["hidden"], bool):
        raise ValueError(f"hidden must be true or false, not {value['hidden']!r}")
    fixed_us, per_sequence_us, per_row_us = (float(value[name]) for name in _HOST_FIELDS)
    return HostCost(fixed_us, per_sequence_us, per_row_us, value["hidden"], str(value["source"]))


def _require_sense(calibration: Calibration, origin: str) -> None:
    """Raise ConfigError if a calibration lacks a kind, or has a constant that makes no sense."""
    for name, value, accepted in (
        ("device", calibration.device, _DEVICES),
        ("dtype", calibration.dtype, _MODEL_DTYPES),
    ):
        if value not in accepted:
            raise ConfigError(f"{origin}: {name} must be one of {', '.join(accepted)}, not {value!r}")
    if calibration.few_rows < 1:
        raise ConfigError(f"{origin}: few_rows must be a number of rows, 1 or above, not {calibration.few_rows}")
    if (calibration.device == "cpu") != bool(calibration.shares):
        raise ConfigError(
            f"{origin}: shares are the constants of a CPU, by ranks; it is of device {calibration.device}"
        )
    fp8 = calibration.device == "cuda" and calibration.gpu.fp8_tflops is not None
    required = {kind for kind in (*KINDS, FUSED_NORM) if fp8 or not kind.endswith("fp8")}
    if calibration.device == "cpu":
        required = set(CPU_KINDS)
    rates = {f"link {name}": getattr(calibration.link, name) for name in ("bw_gbps", "local_gbps")}
    costs = {f"link {name}": getattr(calibration.link, name) for name in ("fixed_us", "step_us")}
    costs["link residual"] = calibration.link_residual
    own = {"": Share(calibration.kinds, calibration.host)}
    for ranks, share in (own | {f"{ranks} ranks: ": share for ranks, share in calibration.shares.items()}).items():
        if missing := sorted(required - {kind.partition("@")[0] for kind in share.kinds}):
            raise ConfigError(f"{origin} is no calibration: {ranks}it lacks {', '.join(missing)}")
        for kind, known in share.kinds.items():
            rates |= {f"{ranks}{kind} {name}": getattr(known.cost, name) for name in ("first_rate", "second_rate")}
            costs |= {f"{ranks}{kind} fixed_us": known.cost.fixed_us, f"{ranks}{kind} residual": known.residual}
        costs |= {f"{ranks}host {name}": getattr(share.host, name) for name in _HOST_FIELDS}
    for name, rate in rates.items():
        if not 0 < rate < math.inf:
            raise ConfigError(f"{origin}: {name} must be a number above 0, not {rate:g}")
    for name, cost in costs.items():
        if not 0 <= cost < math.inf:
            raise ConfigError(f"{origin}: {name} must be a number, 0 or above, not {cost:g}")


def calibrate(folder: Path, part: str = "") -> Calibration:
    """Return the calibration of a GPU by the results in ``folder``, which all say that they are of it.

    Args:
        folder: ``linear.json``, ``large_batches.txt`` (in ``exploration``, if it is there), ``decode_attention.json``,
            ``prompt_attention.json``, ``fused_bf16_x4.json``, and ``all_reduce_bf16_x2.json`` and ``_x4.json``.
        part: the GPU, as CUDA names it; "" for the one in the files.

    Raises:
        ConfigError: results are missing, are of several GPUs or of another one, or do not determine a constant.
    """
    if part:
        _known(part, "--part")
    files = _Results(folder)
    points: dict[str, list[KernelPoint]] = {}
    try:
        for kind, point in _points(files):
            points.setdefault(kind, []).append(point)
        collectives = list(_collectives(files, _LINK_ALGORITHMS))
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{folder / files.read[-1]} has a row that is no result to calibrate by: {error!r}"
        ) from error
    for time in (*(point.time_us for each in points.values() for point in each), *(each[1] for each in collectives)):
        if not isinstance(time, int | float) or not 0 < time < math.inf:
            raise ConfigError(f"{folder}: a result takes a number of microseconds above 0, not {time!r}")
    part, gpu = files.device(part)
    kinds: dict[str, KernelFit] = {}
    for kind, measured in sorted(points.items()):  # few rows before many
        start = _start(kind, gpu)
        if few := kinds.get(kind.replace("many_rows", "few_rows")):
            start = KernelCost(start.fixed_us, few.cost.first_rate, start.second_rate)  # the weights are read as fast
        try:
            kinds[kind] = fit_kernel(measured, start)
        except ConfigError as error:
            raise ConfigError(f"{kind}: {error}") from error
    link = fit(collectives)
    wrong = [time_us(work, link) / measured_us - 1 for work, measured_us in collectives]
    residual = math.sqrt(sum(error**2 for error in wrong) / len(wrong))
    return Calibration(part, kinds, link, residual, tuple(files.read), files.kernels)


def _known(part: str, origin: str) -> GpuSpec:
    spec = catalog.find(part)
    if spec is None:
        raise ConfigError(f"{origin}: {part} is not in the catalog of GPUs, so the fit does not know where to begin")
    return spec


class _Results:
    """The files of a folder of results; it remembers which were read, the GPUs and the fingerprints in them."""

    def __init__(self, folder: Path):
        self._folder = folder
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
                raise ConfigError(f"{self._folder / name} does not say which GPU it was measured on")
            for device in devices:
                part, first = part or device, first or name
                if _known(device, str(self._folder / name)) != _known(part, first):
                    raise ConfigError(
                        f"{self._folder / name} was measured on {device}, and {first} says {part}: a calibration is of "
                        "one GPU"
                    )
        return part, _known(part, first)

    def rows(self, name: str) -> list[dict[str, Any]]:
        try:
            value = json.loads((self._folder / name).read_text())
            rows = list(value["rows"])
            kernels = dict(value.get("kernels", {}))
            devices = [str(gpu["name"]) for gpu in value.get("environment", {}).get("gpus", [])]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self._folder / name} has no results to calibrate by: {error}") from error
        self.read.append(name)
        self.kernels |= kernels
        self._devices[name] = devices
        return rows

    def lines(self, name: str) -> list[str]:
        path = self._folder / name
        if not path.is_file():
            return []
        lines = read_text(path, "the results").splitlines()
        self.read.append(name)
        # the first sentences say on what it was measured, by the name that the data sheet has
        opening = " ".join(itertools.takewhile(str.strip, lines))
        found = {spec.name: match[0] for spec in catalog.CATALOG if (match := re.search(spec.pattern, opening))}
        self._devices[name] = list(found.values())
        return lines


def _points(files: _Results) -> Iterator[tuple[str, KernelPoint]]:
    """Yield the kind and a measurement of each kernel."""
    for row in files.rows("linear.json"):
        rows, fp8 = row["rows"], row["model"] == "405b"
        fused = row["name"] != "gate_up"  # the engine's product of gate and up has the activation in it
        if fused and row["contender"] == ("chosen" if rows <= FEW_ROWS else "library"):
            work = product(rows, row["outputs"], row["inputs"], 1 if fp8 else 2)
            yield product_kind(rows, fp8), KernelPoint(work, row["us"])
    yield from _large_batches(files.lines("exploration/large_batches.txt"))
    for row in files.rows("decode_attention.json"):
        work = decode_attention(row["sequences"], row["length"], row["kv_heads"], 128, 2)
        yield "decode_attention", KernelPoint(work, row["own_us"])
    for row in files.rows("prompt_attention.json"):
        if parts := prompt_parts(row["step"]):
            work = prompt_attention(parts, row["heads"], row["head_dim"])
            yield "prompt_attention", KernelPoint(work, row["own_us"])
    fused_us: dict[int, dict[str, float]] = {}
    for row in files.rows("fused_bf16_x4.json"):
        fused_us.setdefault(row["nbytes"], {})[row["algorithm"]] = row["time_us"]
    for nbytes, times in fused_us.items():
        # of the algorithm that is faster at this size
        extra = min(
            (times[plain], times[name] - times[plain])
            for name, plain in (("one_shot", "plain_one_shot"), ("two_shot", "plain_two_shot"))
        )[1]
        yield FUSED_NORM, KernelPoint(rows_pass(nbytes), extra)


def _large_batches(lines: Iterable[str]) -> Iterator[tuple[str, KernelPoint]]:
    """Yield the products of more than 64 rows, and the passes over rows, of ``large_batches.txt``."""
    numbers: list[int] = []
    for line in lines:
        if header := _BATCH_ROWS.match(line):
            numbers = [int(number) for number in re.findall(r"\d+", header[1])]
        elif found := _BATCH_LINE.match(line):
            outputs, inputs = int(found[1]), int(found[2])
            for rows, measured_us in zip(numbers, found[3].split()[::2], strict=True):
                if rows > FEW_ROWS:
                    work = product(rows, outputs, inputs, 2)
                    yield product_kind(rows, False), KernelPoint(work, float(measured_us))
        elif found := _PASS_LINE.match(line):
            heads, kv_heads, tokens = (int(found[number]) for number in (1, 2, 3))
            yield "rows_pass", KernelPoint(rows_pass(rotation_bytes(tokens, heads, kv_heads, 128, 2)), float(found[4]))


def rotation_bytes(tokens: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> float:
    """Return the bytes that turning queries and keys reads and writes, with the entry of keys and values."""
    return float(tokens * (2 * heads + 4 * kv_heads) * head_dim * itemsize)


def prompt_parts(step: str) -> list[tuple[int, int]]:
    """Return the parts of prompts in a step of ``prompt_attention.json``, such as "2048 after 8K"; [] for others."""
    found = _PROMPT_STEP.match(step)
    if found is None:
        return []
    tokens = int(found[2]) * (1024 if found[3] else 1)
    before = int(found[4] or 0) * (1024 if found[5] else 1)
    return [(tokens, before)] * int(found[1] or 1)


def _collectives(files: _Results, algorithms: Iterable[str]) -> Iterator[Measured]:
    for world_size in (2, 4):
        for row in files.rows(f"all_reduce_bf16_x{world_size}.json"):
            if row["algorithm"] in algorithms:
                form = registered()[row["algorithm"]].forms[Op[row["op"].upper()]]
                work = form.work(row["nbytes"], NodeShape(1, row["world_size"]), DTYPES[row["dtype"]])
                yield Measured(work, row["time_us"])


def _start(kind: str, gpu: GpuSpec) -> KernelCost:
    """Return where the fit of a kind begins: the data sheet."""
    if kind.startswith("product"):
        tflops = (gpu.fp8_tflops or gpu.bf16_tflops) if kind.endswith("fp8") else gpu.bf16_tflops
        return KernelCost(2.0, gpu.memory_bw_gbps, tflops * 1e3)
    if kind == "prompt_attention":
        return KernelCost(4.0, gpu.bf16_tflops * 1e3 / 2, _KEYS_RATE)
    if kind == "decode_attention":
        return KernelCost(4.0, gpu.memory_bw_gbps, _KEYS_RATE)
    return KernelCost(1.0, gpu.memory_bw_gbps)


def _file_name(part: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", part.lower()).strip("_")


def _rounded(value: Any) -> Any:
    """Return ``value`` with numbers of five digits, so that a file does not depend on the last bits of a machine."""
    if isinstance(value, Mapping):
        return {name: _rounded(part) for name, part in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value
