"""Calibrations: constants of kernels and collectives on a GPU, fitted to measurements, with residuals.

Only isolated measurements of kernels, collectives and host time are fitted, never an engine run with a model to be
predicted, so that measured engine runs show the prediction error. The packaged calibrations are in
``planner/calibrations``, created by ``research/calibrate_gpu.py``; ``shotcast calibrate`` creates one for a CPU.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from shotcast.cost.collective import LinkCost
from shotcast.cost.inference import CPU_KINDS, FEW_ROWS, FP8, KINDS, NO_HOST, FusedNormCost, HostCost, KernelCost
from shotcast.errors import ConfigError
from shotcast.hardware import catalog
from shotcast.hardware.catalog import GpuSpec
from shotcast.hardware.cluster import read_text
from shotcast.wire import DTYPES

FUSED_NORM = "fused_norm"
"""The kind of an all-reduce with fused residual and norm."""
FUSED_NORMS = (FUSED_NORM, f"{FUSED_NORM}{FP8}")
"""These kinds, with 16-bit and FP8 results."""
LINK = "link"
"""The name of the residual for collectives."""


Cost = TypeVar("Cost", KernelCost, FusedNormCost)


class Fit(NamedTuple, Generic[Cost]):
    """The constants of a kind of kernel, or of all-reduces with residual and norm."""

    cost: Cost  # the constants
    residual: float  # the root mean square of the relative errors of the measurements: the error bar of a prediction
    worst: float  # the largest of them
    points: int  # the number of measurements


class Share(NamedTuple):
    """The constants of one rank when several ranks share a machine's cores and memory."""

    kinds: Mapping[str, Fit[KernelCost]]
    host: HostCost


@dataclass(frozen=True, slots=True)
class Calibration:
    """The constants of one GPU, or of a rank of one CPU machine."""

    part: str  # the GPU as CUDA names it, or the processor
    # by kind of kernel, its constants and their residual (:data:`shotcast.cost.inference.KINDS`)
    kinds: Mapping[str, Fit[KernelCost]]
    link: LinkCost  # the constants of collectives within a node
    link_residual: float  # the root mean square of the relative errors of the measured collectives
    sources: tuple[str, ...]  # the files that it was fitted to
    kernels: Mapping[str, str]  # fingerprints of the kernels in these files
    device: str = "cuda"  # ``cuda`` or ``cpu``
    dtype: str = "bfloat16"  # of activations, and of weights that are not in FP8
    few_rows: int = FEW_ROWS  # the most rows of a product that the engine's native kernels compute
    host: HostCost = NO_HOST  # of an engine on this machine
    # on a CPU, by the number of ranks that share the machine, what ``kinds`` and ``host`` are then; those of the
    # calibration itself are of the most ranks. Empty for GPUs, which are each rank's own
    shares: Mapping[int, Share] = field(default_factory=dict)
    # by kind (:data:`FUSED_NORMS`), the constants of all-reduces with residual and norm and their residual; empty for a
    # CPU
    fused_norms: Mapping[str, Fit[FusedNormCost]] = field(default_factory=dict)

    @property
    def itemsize(self) -> int:
        """The bytes of an activation, and of a weight that is not FP8."""
        return DTYPES[self.dtype]

    def of_ranks(self, ranks: int) -> Calibration:
        """Return the constants if this many ranks share the machine: a CPU's depend on that, a GPU's do not. Raises
        ConfigError if this number was not measured.
        """
        if not self.shares:
            return self
        share = self.shares.get(ranks)
        if share is None:
            known = " or ".join(map(str, sorted(self.shares))) + (" ranks" if max(self.shares) > 1 else " rank")
            raise ConfigError(
                f"the calibration of {self.part} is of {known}, and {ranks} are asked for; measure them by "
                f"shotcast calibrate --world-size {ranks}"
            )
        return replace(self, kinds=share.kinds, host=share.host)

    @property
    def gpu(self) -> GpuSpec:
        spec = catalog.find(self.part)
        if spec is None:
            raise ConfigError(f"{self.part} is not in the catalog of GPUs")
        return spec

    def time_us(self, kind: str, work: Any) -> float:
        return self.kinds[kind].cost.time_us(work)

    def residual(self, kind: str) -> float:
        """Return the relative error bar of a kind of kernel, or of :data:`LINK`."""
        return self.link_residual if kind == LINK else self.kinds[kind].residual

    def scaled_to(self, gpu: GpuSpec) -> Calibration:
        """Scale the constants to another GPU by data-sheet ratios, keeping the efficiency of kernels.

        Fixed costs do not change, nor do the rates at which one program reads keys and a rank normalizes the rows that
        it sums, which were the same on an H100 and an H200. Residuals do not change either, and do not cover the error
        of that assumption.

        Raises ConfigError if the constants belong to a CPU and the other part differs.
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
            if "product" in kind:
                arithmetic = fp8 if kind.endswith(FP8) else bf16
                return KernelCost(cost.fixed_us, cost.first_rate * memory, cost.second_rate * arithmetic)
            return KernelCost(
                cost.fixed_us, cost.first_rate * (bf16 if kind == "prompt_attention" else memory), cost.second_rate
            )

        kinds = {
            kind: known._replace(cost=scaled(kind, known.cost))
            for kind, known in self.kinds.items()
            if fp8 or not kind.endswith(FP8)
        }
        wires = gpu.link.paper_bw_gbps / own.link.paper_bw_gbps
        link = LinkCost(self.link.fixed_us, self.link.step_us, self.link.bw_gbps * wires, self.link.local_gbps * memory)
        fused_norms = {kind: known for kind, known in self.fused_norms.items() if fp8 or not kind.endswith(FP8)}
        return replace(self, part=gpu.name, kinds=kinds, link=link, fused_norms=fused_norms)

    def as_json(self) -> str:
        """Format the calibration as a file, with a line for each kind."""
        content = {
            "part": self.part,
            "device": self.device,
            "dtype": self.dtype,
            "few_rows": self.few_rows,
            "sources": list(self.sources),
            "kernels": self.kernels,
            "kinds": {} if self.shares else _fit_constants(self.kinds),
            **({"fused_norms": _fit_constants(self.fused_norms)} if self.device == "cuda" else {}),
            "link": self._link_constants,
            "host": self._host_constants(self.host),
            "shares": {
                str(ranks): {"kinds": _fit_constants(share.kinds), "host": self._host_constants(share.host)}
                for ranks, share in self.shares.items()
            },
        }
        text = json.dumps(_rounded(content), indent=1)
        return _INNERMOST.sub(lambda found: " ".join(found[0].split()), text)

    @property
    def _link_constants(self) -> dict[str, float]:
        return {name: getattr(self.link, name) for name in _LINK_FIELDS} | {"residual": self.link_residual}

    def _host_constants(self, host: HostCost) -> dict[str, Any]:
        given = asdict(host).items()
        return {name: value for name, value in given if self.device == "cuda" or name not in _HOST_FIELDS_OF_GPUS}


_INNERMOST = re.compile(r"\{[^{}]*\}")
_FIT = ("residual", "worst", "points")
_LINK_FIELDS = ("fixed_us", "step_us", "bw_gbps", "local_gbps")
_HOST_FIELDS = ("fixed_us", "per_sequence_us", "per_row_us")
_HOST_FIELDS_OF_GPUS = ("per_layer_us", "per_request_us", "client_us")
_RATES = ("bw_gbps", "local_gbps", "first_rate", "second_rate", "rate")
_DEVICES, _MODEL_DTYPES = ("cuda", "cpu"), ("bfloat16", "float16", "float32")


def _fit_constants(fits: Mapping[str, Fit[Cost]]) -> dict[str, dict[str, Any]]:
    return {kind: asdict(fit.cost) | {name: getattr(fit, name) for name in _FIT} for kind, fit in fits.items()}


def load(part: str, path: Path | None = None) -> Calibration:
    """Load the calibration in a file, or a GPU's packaged one. Raises ConfigError if there is none."""
    if path is None:
        name = re.sub(r"[^a-z0-9]+", "_", part.lower()).strip("_")
        file = resources.files("shotcast.planner") / "calibrations" / f"{name}.json"
        if not file.is_file():
            raise ConfigError(
                f"there is no calibration of {part}; there is one of {', '.join(calibrated_parts())}. Make one by "
                "research/calibrate_gpu.py"
            )
        return parse(file.read_text(), part)
    return parse(read_text(path, "the calibration"), str(path))


STAND_IN = "NVIDIA H200"
"""The most thoroughly measured GPU: its calibration fills gaps in the others', scaled by data sheets."""


def calibrated_parts() -> tuple[str, ...]:
    folder = resources.files("shotcast.planner") / "calibrations"
    return tuple(sorted(json.loads(file.read_text())["part"] for file in folder.iterdir() if file.name[-5:] == ".json"))


def parse(text: str, origin: str) -> Calibration:
    """Parse a calibration. Raises ConfigError if the text is not one."""
    try:
        value = json.loads(text)
        link = LinkCost(*(float(value["link"][name]) for name in _LINK_FIELDS))
        shares = {
            int(ranks): Share(_fits_of(share["kinds"], KernelCost), _host_of(share["host"]))
            for ranks, share in value["shares"].items()
        }
        kinds = shares[max(shares)].kinds if shares else _fits_of(value["kinds"], KernelCost)
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
            {} if shares else _fits_of(value["fused_norms"], FusedNormCost),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{origin} is no calibration, as shotcast calibrate writes it: {error!r}") from error
    _require_sense(found, origin)
    return found


def _fits_of(value: Any, cost: type[Cost]) -> dict[str, Fit[Cost]]:
    return {
        str(kind): Fit(
            cost(*(float(known[each.name]) for each in fields(cost))),
            float(known["residual"]),
            float(known["worst"]),
            int(known["points"]),
        )
        for kind, known in value.items()
    }


def _host_of(value: Any) -> HostCost:
    if not isinstance(value["hidden"], bool):
        raise ValueError(f"hidden must be true or false, not {value['hidden']!r}")
    times = {name: float(value[name]) for name in _HOST_FIELDS}
    times |= {name: float(value.get(name, 0.0)) for name in _HOST_FIELDS_OF_GPUS}
    return HostCost(**times, hidden=value["hidden"], source=str(value["source"]))


def _require_sense(calibration: Calibration, origin: str) -> None:
    """Raise ConfigError if a calibration lacks a kind, or has an invalid constant."""
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
    required = {kind for kind in KINDS if fp8 or not kind.endswith(FP8)}
    fused = {kind for kind in FUSED_NORMS if fp8 or not kind.endswith(FP8)}
    if calibration.device == "cpu":
        required, fused = set(CPU_KINDS), set()
    if missing := sorted(fused - set(calibration.fused_norms)):
        raise ConfigError(f"{origin} is no calibration: it lacks {', '.join(missing)}")
    constants: dict[str, Any] = {"link": calibration._link_constants, **_fit_constants(calibration.fused_norms)}
    own = {"": Share(calibration.kinds, calibration.host)}
    for ranks, share in (own | {f"{ranks} ranks: ": share for ranks, share in calibration.shares.items()}).items():
        if missing := sorted(required - {kind.partition("@")[0] for kind in share.kinds}):
            raise ConfigError(f"{origin} is no calibration: {ranks}it lacks {', '.join(missing)}")
        constants |= {f"{ranks}{kind}": known for kind, known in _fit_constants(share.kinds).items()}
        constants[f"{ranks}host"] = asdict(share.host)
    for owner, values in constants.items():
        for name, value in values.items():
            if name in _RATES and not 0 < value < math.inf:
                raise ConfigError(f"{origin}: {owner} {name} must be a number above 0, not {value:g}")
            if isinstance(value, float) and not 0 <= value < math.inf:
                raise ConfigError(f"{origin}: {owner} {name} must be a number, 0 or above, not {value:g}")


def rotation_bytes(tokens: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> float:
    """Return the bytes read and written by rotating queries and keys and storing keys and values."""
    return float(tokens * (2 * heads + 4 * kv_heads) * head_dim * itemsize)


def _rounded(value: Any) -> Any:
    """Round ``value`` to five digits, so that a file does not depend on a machine's last bits."""
    if isinstance(value, Mapping):
        return {name: _rounded(part) for name, part in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value
