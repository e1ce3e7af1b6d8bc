"""The layout of an engine started with ``layout="auto"``: the runnable layout that the planner ranks best.

A layout is a candidate if the engine would accept it: each stage and each rank gets a part of the model, native kernels
serve the ranks of a stage, and by the engine's memory estimate the fullest rank has room for weights, the largest step
and one sequence of ``max_model_len`` tokens. The planner prices the candidates for one engine on all ranks. Without
measurements of the ranks, as on most CPUs, nothing is priced, and a stage has as many ranks as a host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shotcast import env
from shotcast.engine.config import EngineConfig, max_model_len_of, parse_workload
from shotcast.engine.memory import KnownMemory, MemoryBudget, require_one_sequence
from shotcast.errors import ConfigError
from shotcast.hardware import catalog, detect
from shotcast.hardware.detect import GpuFacts
from shotcast.models.config import ModelConfig
from shotcast.models.memory_estimate import available_bytes, require_division
from shotcast.planner import machine as planned_machine
from shotcast.planner import report
from shotcast.planner.calibration import Calibration
from shotcast.planner.plan import Limits, Plan, Query, Target, fullest_rank, plan
from shotcast.planner.step import Layout
from shotcast.units import about_size
from shotcast.wire import DTYPES, MAX_WORLD_SIZE

PROMPT, OUTPUT = 2048, 128
"""Default prompt and output tokens to plan for, if ``workload`` is not given; the same as in ``shotcast plan``."""
_CACHE_ITEM_CPU = 4
"""Bytes per key or value element on CPU ranks, for any dtype of the weights."""
_MOST_HELPFUL_RANKS = 64
"""The most ranks that an error recommends if a model does not fit."""


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The layout chosen for an engine."""

    layout: Layout  # its ranks of a stage, and its stages
    reason: str  # why, with the next best layout, in a few sentences
    refused: Mapping[str, str]  # the layouts that the engine would not run, and why
    plan: Plan | None = None  # the predictions of all others; None where nothing was priced

    def __str__(self) -> str:
        return f"layout {self.layout}: {self.reason}"


@dataclass(frozen=True, slots=True)
class _Machine:
    """The ranks available to an engine."""

    gpus: tuple[GpuFacts, ...]  # the GPUs of this host that they run on; none for CPU ranks
    counts: tuple[int, ...]  # the numbers of ranks to plan for
    hosts: int  # how many hosts have them, equally many each
    memory: KnownMemory  # of a GPU, or what is free of this machine
    calibration: Calibration | None = None  # of these CPU ranks; None where nothing was measured of them, and for GPUs
    unmeasured: str = ""  # why there is none

    def sharers(self, ranks: int) -> int:
        """Return how many of ``ranks`` ranks share a memory."""
        local = ranks // self.hosts
        if not self.gpus:
            return local
        return -(-local // len(self.gpus)) if env.share_gpus() else 1

    def words(self, ranks: int) -> str:
        """Describe ``ranks`` ranks in words."""
        kind = self.gpus[0].name if self.gpus else "CPU ranks" if ranks > 1 else "CPU rank"
        return f"{ranks} {kind}" + (f" on {self.hosts} hosts" if self.hosts > 1 else "")


@dataclass(frozen=True, slots=True)
class _Offer:
    layout: Layout  # the ranks of a stage, and stages
    usable: int  # bytes of the fullest rank, in the planner's accounts
    sequences: int  # those of the workload that its cache holds, at most ``max_num_seqs``


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A layout that the engine cannot run: the reason, and the fullest rank's bytes if memory is the reason."""

    layout: Layout
    why: str
    needed: int | None = None


def choose_layout(config: EngineConfig, model: ModelConfig) -> LayoutChoice:
    """Choose the best layout for a configuration's target, among the ones that the engine can run. Raises ConfigError
    if no layout fits (with what is missing and what would help), none meets the bounds of the target, or there are no
    measurements for the GPUs.
    """
    target, workload = Target.parse(config.target), _workload(config, model)
    machine = _find_machine(config)
    offers, refusals = _offers(config, model, machine, sum(workload))
    if not offers:
        raise ConfigError(_nothing_fits(config, model, machine, refusals))
    refused = {str(one.layout): one.why for one in refusals}
    if not machine.gpus and machine.calibration is None:
        return _unpriced(machine, offers, refused, target)
    if len(offers) == 1 and machine.gpus and catalog.find(machine.gpus[0].name) is None:
        words = machine.words(offers[0].layout.ranks)
        return LayoutChoice(offers[0].layout, f"the only one for {words}, of which plans know nothing", refused)
    result = _priced(config, model, machine, offers, workload, target)
    if result.best is None:
        raise ConfigError(f"{report.reason(result)} Give that layout by hand, or another target")
    reason = f"for {target} of {workload[0]}+{workload[1]} tokens on {machine.words(result.best.layout.ranks)}. "
    reason += report.reason(result)
    if not result.calibrated:
        gpu = result.query.cluster.gpu
        reason += f" Rates are scaled by the data sheets, as nothing was measured on the {gpu.name}."
    return LayoutChoice(result.best.layout, reason, refused, result)


def _workload(config: EngineConfig, model: ModelConfig) -> tuple[int, int]:
    """Return the prompt and output tokens to plan for."""
    most = max_model_len_of(config, model)
    given = parse_workload(config.workload)
    if given is None:
        output = max(2, min(OUTPUT, most * OUTPUT // (PROMPT + OUTPUT)))
        return max(1, min(PROMPT, most - output)), output
    if sum(given) > most:
        raise ConfigError(f"workload {config.workload} takes {sum(given)} tokens, and max_model_len is {most}")
    return given


def _find_machine(config: EngineConfig) -> _Machine:
    """Return the ranks available to the engine: those of the job, the requested number, or all."""
    job, asked = env.job(), config.asked_ranks
    hosts, local = 1, None
    if job is not None:
        if asked not in (None, job.world_size):
            raise ConfigError(f"layout {config.layout} is of {asked} ranks, and the job has {job.world_size}")
        local = env.local_world_size()
        if job.world_size % local:
            raise ConfigError(
                f"hosts have different numbers of ranks ({local} of {job.world_size} are here), which plans do not "
                "describe; give a layout by hand"
            )
        asked, hosts = job.world_size, job.world_size // local
    if config.device == "cuda":
        gpus = detect.visible_gpus()
        ranks = asked or len(gpus)
        gpus = gpus[: local or ranks]
        return _Machine(gpus, (ranks,), hosts, KnownMemory(min(gpu.memory_bytes for gpu in gpus)))
    free = KnownMemory(available_bytes())
    calibration = planned_machine.own_calibration()
    unmeasured = _unmeasured(config, calibration, asked, hosts)
    if unmeasured or calibration is None:
        return _Machine((), (asked or 1,), hosts, free, None, unmeasured)
    return _Machine((), (asked,) if asked else tuple(sorted(calibration.shares)), hosts, free, calibration)


def _unmeasured(config: EngineConfig, calibration: Calibration | None, asked: int | None, hosts: int) -> str:
    """Return why a calibration does not price this machine's CPU ranks; "" if it does."""
    if calibration is None:
        return "nothing was measured of this machine (shotcast calibrate, SHOTCAST_CALIBRATION)"
    if calibration.device != "cpu" or calibration.part != detect.cpu_model():
        return f"SHOTCAST_CALIBRATION is of {calibration.part}, and this machine's ranks are of {detect.cpu_model()}"
    if calibration.dtype != config.dtype_name:
        return f"SHOTCAST_CALIBRATION is of {calibration.dtype}, and weights are {config.dtype_name}"
    if hosts > 1:
        return "nothing was measured of the network between hosts"
    if config.algorithm != "auto":
        return f"SHOTCAST_CALIBRATION says nothing of sums by {config.algorithm}"
    if asked is not None and asked not in calibration.shares:
        known = " or ".join(map(str, sorted(calibration.shares)))
        return f"SHOTCAST_CALIBRATION is of {known} ranks (shotcast calibrate --world-size {asked})"
    return ""


def _offers(
    config: EngineConfig, model: ModelConfig, machine: _Machine, tokens: int
) -> tuple[list[_Offer], list[_Refusal]]:
    """Return the layouts of all ranks that the engine can run, and the ones it cannot.

    Args:
        tokens: tokens of a sequence of the workload.
    """
    offers: list[_Offer] = []
    refusals: list[_Refusal] = []
    for ranks in machine.counts:
        for tensor in (number for number in range(1, ranks + 1) if ranks % number == 0):
            found = _offer(config, model, machine, Layout(tensor, ranks // tensor), tokens)
            if isinstance(found, _Offer):
                offers.append(found)
            else:
                refusals.append(found)
    return offers, refusals


def _offer(
    config: EngineConfig, model: ModelConfig, machine: _Machine, layout: Layout, tokens: int
) -> _Offer | _Refusal:
    """Offer a layout if the model can be divided by it and fits in memory by the engine's estimate."""
    tensor, local, needed = layout.tensor_parallel, layout.ranks // machine.hosts, None
    try:
        require_division(model, *layout)
        if tensor > MAX_WORLD_SIZE:
            raise ConfigError(f"native kernels serve up to {MAX_WORLD_SIZE} ranks of a stage, not {tensor}")
        if local % tensor:
            raise ConfigError(
                f"a stage of {tensor} ranks does not lie within a host of {local}; sums between hosts are for "
                "layouts given by hand"
            )
        item, limit = DTYPES[config.dtype_name], max_model_len_of(config, model)
        step_tokens = config.divided(str(layout)).max_step_tokens
        memory = fullest_rank(model, config.quantization, layout, 0, step_tokens, item, _cache_item(config, model))
        steps = memory.steps(config.max_num_seqs) if machine.gpus else 0  # of CPUs, the cache leaves as much as that
        block = memory.per_token * config.block_size
        needed = memory.weights + steps + (config.kv_cache_bytes or -(-limit // config.block_size) * block)
        dtype = config.quantization or config.dtype_name
        budget = MemoryBudget.find(config, machine.memory, machine.sharers(layout.ranks), memory.weights, dtype)
        if machine.gpus:
            room = config.kv_cache_bytes or budget.limit - memory.weights - steps - block  # a runner has a spare block
            if needed > budget.limit and config.kv_cache_bytes:
                raise ConfigError(
                    f"weights take {about_size(memory.weights)}, steps about {about_size(steps)} and kv_cache_bytes "
                    f"{about_size(config.kv_cache_bytes)}, together {about_size(needed)}; {budget.limit_text}"
                )
        else:
            room = budget.estimated_room(config.kv_cache_bytes)
        blocks = room // block
        require_one_sequence(blocks, config.block_size, block, limit, budget, room)
    except ConfigError as error:
        return _Refusal(layout, str(error), needed)
    sequences = min(config.max_num_seqs, blocks * config.block_size // tokens)
    return _Offer(layout, memory.weights + memory.steps(sequences) + room, sequences)


def _cache_item(config: EngineConfig, model: ModelConfig) -> float:
    """Return the bytes per key or value element; in FP8, each head of a token has a float32 scale."""
    if config.device == "cpu":
        return _CACHE_ITEM_CPU
    return 1 + 4 / model.head_dim if config.kv_cache_dtype else DTYPES[config.dtype_name]


def _unpriced(machine: _Machine, offers: list[_Offer], refused: Mapping[str, str], target: Target) -> LayoutChoice:
    """Return the layout for CPU ranks without measurements: the one with the most ranks per stage."""
    if target != Target(target.kind):
        raise ConfigError(f"whether a layout has {target} is not known: {machine.unmeasured}")
    layout = max((offer.layout for offer in offers), key=lambda layout: layout.tensor_parallel)
    many = f"as many of {machine.words(layout.ranks)} a stage as a host has"
    why = "one CPU rank" if layout.ranks == 1 else many
    return LayoutChoice(layout, f"{why}, since {machine.unmeasured}", refused)


def _priced(
    config: EngineConfig,
    model: ModelConfig,
    machine: _Machine,
    offers: list[_Offer],
    workload: tuple[int, int],
    target: Target,
) -> Plan:
    plans = []
    for offer in offers:
        ranks = offer.layout.ranks
        if machine.calibration is not None:
            calibration, cluster = (
                machine.calibration,
                planned_machine.cluster_of_cpu(machine.calibration, ranks, machine.memory.total),
            )
        else:
            names = [gpu.name for gpu in machine.gpus]
            cluster = planned_machine.cluster_of_gpus(names, ranks // machine.hosts, machine.hosts)
            calibration = _of_dtype(planned_machine.calibration_of(cluster.gpu), config.dtype_name)
        # each layout has its own memory, which is what the engine's accounts say, to the byte
        utilization = (offer.usable + 0.5) / cluster.gpu.memory_bytes
        cache_item = _cache_item(config, model)
        limits = Limits(offer.sequences, config.max_num_batched_tokens, utilization, config.algorithm, cache_item)
        query = Query(model, config.model, config.quantization, cluster, ranks, *workload, target, limits)
        found = plan(query, calibration, [(offer.layout, 1)])
        if found.refused:
            why = next(iter(found.refused.values()))
            raise ConfigError(f"layout {offer.layout} cannot be priced: {why}; give a layout by hand")
        plans.append(found)
    together = replace(plans[0], points=tuple(point for found in plans for point in found.points))
    best = together.best_of_each_layout()[0] if any(found.best for found in plans) else None
    return replace(together, best=best)


def _of_dtype(calibration: Calibration, dtype: str) -> Calibration:
    """Return the GPU constants for another dtype of the same size, assuming equally fast arithmetic."""
    if DTYPES[dtype] != calibration.itemsize:
        raise ConfigError(
            f"plans of GPUs are of {calibration.dtype} and types of as many bytes, not of {dtype}; give a layout by "
            "hand"
        )
    return replace(calibration, dtype=dtype)


def _nothing_fits(config: EngineConfig, model: ModelConfig, machine: _Machine, refusals: list[_Refusal]) -> str:
    short = [(one.needed, one) for one in refusals if one.needed is not None]
    words = machine.words(machine.counts[-1])
    if not short:
        return f"no layout of {words} is possible. " + "; ".join(f"{one.layout}: {one.why}" for one in refusals)
    nearest = min(short, key=lambda pair: pair[0])[1]
    text = f"{config.model} does not fit on {words}. {nearest.layout}, which needs least: {nearest.why}"
    helps = []
    if machine.gpus:
        per_host = machine.counts[0] // machine.hosts
        step = per_host if machine.hosts > 1 else 1
        for ranks in range(machine.counts[0] + step, _MOST_HELPFUL_RANKS + 1, step):
            more = replace(machine, counts=(ranks,), hosts=ranks // per_host if machine.hosts > 1 else 1)
            if _offers(config, model, more, 1)[0]:
                helps.append(more.words(ranks))
                break
        major_minor = min(gpu.compute_capability for gpu in machine.gpus)
        if not config.quantization and config.dtype in ("", "bfloat16") and major_minor >= (8, 9):
            smaller = replace(config, quantization="fp8")
            helps += ["quantization fp8 on these"] if _offers(smaller, model, machine, 1)[0] else []
    return text + (f". It would fit with {' or '.join(helps)}" if helps else "")
