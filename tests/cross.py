"""Cross-compilation of kernels for GPUs that are not here."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from shotcast.device.triton import tiles
from shotcast.device.triton.launch import unspecialized
from shotcast.hardware.nodes import folded
from shotcast.kernels.triton.norm import NormAddresses, norm_rows
from shotcast.kernels.triton.paged_attention import Parts, Scoring, Sequences
from shotcast.kernels.triton.rope import Cache, Rotation
from shotcast.kernels.triton.sampling import SamplingMetadata
from shotcast.kernels.triton.skinny_gemm import Matrix
from shotcast.memory import nvshmem_library
from shotcast.transport.triton.barrier import barrier, gate
from shotcast.transport.triton.binding import dtype_of, reduction_of
from shotcast.transport.triton.copies import BROADCAST, EXCHANGE, GATHER, copy
from shotcast.transport.triton.copy_engines import meeting, nan_if_stopped, sum_of_copies
from shotcast.transport.triton.exchanges import DOUBLING, HALVING, PAIRS, PAIRS_16BIT, TWO_SHOT_16BIT
from shotcast.transport.triton.few_sms import few_sms, mapped_block
from shotcast.transport.triton.fused_nvrar import nvrar_norm
from shotcast.transport.triton.fused_one_shot import one_shot_norm
from shotcast.transport.triton.fused_tiles import RowCells
from shotcast.transport.triton.fused_two_shot import two_shot_norm
from shotcast.transport.triton.multimem import multimem_all_reduce
from shotcast.transport.triton.nvrar import nvrar_all_reduce
from shotcast.transport.triton.one_shot import one_shot_reduce
from shotcast.transport.triton.ring import ring
from shotcast.transport.triton.rooted import rooted_copy
from shotcast.transport.triton.send_recv import send_recv
from shotcast.transport.triton.sync import Blocks, Entry, EntryWithPuts, Places
from shotcast.transport.triton.two_shot import two_shot_all_reduce
from shotcast.transport.triton.two_shot_fp8 import compile_options, two_shot_fp8_all_reduce
from shotcast.transport.triton.uneven import Spans, exchange_parts
from shotcast.wire import NORM_KINDS, QUANTIZATIONS, REDUCED, REDUCIBLE, REDUCTIONS, RMS

NORM = NormAddresses(*["i64"] * 7, "fp32")
KINDS: dict[str, Any] = {
    **dict.fromkeys(("x", "out", "came", "data", "arrivals"), "i64"),
    "places": Places("i64", "i64"),
    "blocks": Blocks("i32", "i64"),
    **NORM._asdict(),
    "norm": NORM,
    "cells": RowCells("i64", "i64", "i64", "i32"),
    "spans": Spans(("i64",) * 7, ("i64",) * 7, *["i64"] * 3, ("i64",) * 9, "i64", "i64", "i32"),
}
"""The kinds of arguments that are not 32-bit integers, as Triton writes them; see also :func:`signature_of`."""
DTYPES = {name: dtype_of(name) for name in REDUCED}
MULTICASTS = ("two_shot_multicast", "multimem", "gather_multicast", "broadcast_multicast")
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one_shot": (one_shot_reduce, {"CLEAR_AFTER_READ": False, "SCATTER": False}),
    "one_shot_scatter": (one_shot_reduce, {"CLEAR_AFTER_READ": False, "SCATTER": True}),
    "two_shot": (two_shot_all_reduce, {"CLEAR_AFTER_READ": False, "MULTICAST": False}),
    "two_shot_multicast": (two_shot_all_reduce, {"CLEAR_AFTER_READ": False, "MULTICAST": True}),
    "one_shot_scatter_clears": (one_shot_reduce, {"CLEAR_AFTER_READ": True, "SCATTER": True}),
    "two_shot_clears": (two_shot_all_reduce, {"CLEAR_AFTER_READ": True, "MULTICAST": False}),
    "gather_clears": (copy, {"CLEAR_AFTER_READ": True, "KIND": GATHER.value, "CELLS": False, "MULTICAST": False}),
    "multimem": (multimem_all_reduce, {}),
    "two_shot_fp8": (two_shot_fp8_all_reduce, {"CLEAR_AFTER_READ": False}),
    "two_shot_fp8_clears": (two_shot_fp8_all_reduce, {"CLEAR_AFTER_READ": True}),
    "ring": (ring, {"REDUCE": True, "GATHER": True}),
    "ring_scatter": (ring, {"REDUCE": True, "GATHER": False}),
    "ring_gather": (ring, {"REDUCE": False, "GATHER": True}),
    "gather": (copy, {"CLEAR_AFTER_READ": False, "KIND": GATHER.value, "CELLS": False, "MULTICAST": False}),
    "gather_multicast": (copy, {"CLEAR_AFTER_READ": False, "KIND": GATHER.value, "CELLS": False, "MULTICAST": True}),
    "gather_cells": (copy, {"CLEAR_AFTER_READ": False, "KIND": GATHER.value, "CELLS": True, "MULTICAST": False}),
    "exchange": (copy, {"CLEAR_AFTER_READ": False, "KIND": EXCHANGE.value, "CELLS": False, "MULTICAST": False}),
    "exchange_cells": (copy, {"CLEAR_AFTER_READ": False, "KIND": EXCHANGE.value, "CELLS": True, "MULTICAST": False}),
    "broadcast": (copy, {"CLEAR_AFTER_READ": False, "KIND": BROADCAST.value, "CELLS": False, "MULTICAST": False}),
    "broadcast_multicast": (
        copy,
        {"CLEAR_AFTER_READ": False, "KIND": BROADCAST.value, "CELLS": False, "MULTICAST": True},
    ),
    "broadcast_cells": (copy, {"CLEAR_AFTER_READ": False, "KIND": BROADCAST.value, "CELLS": True, "MULTICAST": False}),
    "to_root": (rooted_copy, {"CLEAR_AFTER_READ": False, "SCATTER": False, "CELLS": False}),
    "to_root_cells": (rooted_copy, {"CLEAR_AFTER_READ": False, "SCATTER": False, "CELLS": True}),
    "from_root_clears": (rooted_copy, {"CLEAR_AFTER_READ": True, "SCATTER": True, "CELLS": False}),
    "barrier": (barrier, {"PUTS": False}),
    "send": (send_recv, {"SENDING": True}),
    "recv": (send_recv, {"SENDING": False}),
}
FP8 = ("two_shot_fp8", "two_shot_fp8_clears")
"""Kernels that send FP8."""
FUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "norm": (norm_rows, {}),
    "fused_one_shot": (one_shot_norm, {}),
    "fused_two_shot": (two_shot_norm, {"CLEAR_AFTER_READ": False}),
    "fused_two_shot_clears": (two_shot_norm, {"CLEAR_AFTER_READ": True}),
}


ALL = (
    *dict.fromkeys(kernel for kernel, _ in (KERNELS | FUSED).values()),
    *(gate, few_sms, exchange_parts, nvrar_all_reduce, nvrar_norm),
    *(meeting, sum_of_copies, nan_if_stopped),
)
"""All kernels with a SHAPE that are launched by addresses."""
SIZES = ("part_nbytes", "starts", *Spans._fields)
"""Arguments of 64 bits that are sizes."""


def signature_of(kernel: Any) -> dict[str, Any]:
    """Return the kinds of a kernel's arguments where it is launched."""
    puts = "PUTS" in fields_of(kernel)
    kinds = KINDS | {
        "entry": EntryWithPuts("i64", "i64", "i64", "i32", "i64", "i64")
        if puts
        else Entry("i64", "i64", "i32", "i64", "i64"),
        "starts": ("i64" if kernel is few_sms else "i32",) * 9,
        "SHAPE": "constexpr",
    }
    declared = {name: "i64" for name, kind in kernel.fn.__annotations__.items() if kind == "tl.int64"}
    return {name: (kinds | declared).get(name, "i32") for name in kernel.arg_names}


def fields_of(kernel: Any) -> list[str]:
    """Return the names of what a kernel is compiled for."""
    return [one.name for one in dataclasses.fields(kernel.shape)]


def shape_of(kernel: Any, values: dict[str, Any]) -> Any:
    """Return the argument SHAPE of a kernel, of those of the values that it has."""
    return kernel.shape(**{name: values[name] for name in fields_of(kernel)})


@functools.lru_cache(maxsize=256)
def compiled(
    name: str,
    dtype: str = "bfloat16",
    unit: int = 16,
    world_size: int = 4,
    block: int = 128,
    warps: int = 1,
    capability: int = 90,
    reduction: str = "sum",
) -> Any:
    """Return the compiled kernel; its ``.asm`` has ``ttir``, ``ptx`` and ``cubin``."""
    kernel, fixed = KERNELS[name]
    values = {
        "CELLS": dtype not in REDUCIBLE,
        "REDUCTION": reduction_of(dtype, reduction),
        **fixed,
        "DTYPE": DTYPES[dtype],
        "UNIT": unit,
        "WORLD": world_size,
        "BLOCK": block,
        "WARPS": warps,
        "PDL": capability >= 90,
        "NATIVE": capability >= 89,
    }
    options = compile_options(world_size, capability >= 89) if kernel is two_shot_fp8_all_reduce else None
    return build_shape(kernel, values, warps, capability, options)


EXCHANGES = {
    "doubling": DOUBLING.value,
    "pairs": PAIRS.value,
    "halving": HALVING.value,
    "pairs_16bit": PAIRS_16BIT.value,
    "two_shot_16bit": TWO_SHOT_16BIT.value,
}


@functools.lru_cache(maxsize=256)
def compiled_nodes(
    exchange: str,
    nodes: int,
    local: int,
    dtype: str = "bfloat16",
    unit: int = 16,
    block: int = 128,
    warps: int = 1,
    clears: bool = False,
    capability: int = 90,
    hidden: int = 0,
    puts: bool = False,
    weight: str = "",
    kind: str = RMS,
) -> Any:
    """Return the compiled kernel of an all-reduce over nodes; with ``hidden``, of one that norms rows of so many.

    With ``puts``, nodes put to each other by NVSHMEM.
    """
    kernel = nvrar_norm if hidden else nvrar_all_reduce
    values = {
        "PUTS": puts,
        "EXCHANGE": EXCHANGES[exchange],
        "NODES": nodes,
        "LOCAL": local,
        "PARTS": 1 if dtype == "float32" else 2,
        "FOLDED": folded(nodes),
        "DOUBLINGS": nodes.bit_length() - 1,
        "CLEAR_AFTER_READ": clears,
        "HIDDEN": hidden,
        "QUANTIZE": QUANTIZATIONS.index("dynamic"),
        "KEEPS_NORMED": True,
        "WEIGHT": DTYPES[weight or dtype],
        "KIND": NORM_KINDS.index(kind),
        "DTYPE": DTYPES[dtype],
        "UNIT": unit,
        "WORLD": nodes * local,
        "BLOCK": block,
        "ROW_TILES": -(-hidden * (4 if dtype == "float32" else 2) // (4 * block)),
        "WARPS": warps,
        "PDL": capability >= 90,
    }
    options = {"extern_libs": nvshmem_library.extern_libs()} if puts else None
    return build_shape(kernel, values, warps, capability, options)


@functools.lru_cache(maxsize=256)
def compiled_few_sms(
    kind: int,
    dtype: str,
    unit: int,
    world_size: int,
    block: int,
    warps: int,
    capability: int = 90,
    registers: int = 0,
    reduction: int = 0,
) -> Any:
    """Return the compiled kernel of calls that keep to a number of SMs; ``kind`` is the operation's.

    Its threads have at most ``registers``; 0 for as many as they need. ``reduction`` is a code.
    """
    whole = reduction in (0, REDUCTIONS.index("avg")) and dtype in (*REDUCIBLE, "int32")
    values = {
        "KIND": kind,
        "REDUCTION": reduction,
        "DTYPE": DTYPES[dtype],
        "UNIT": unit,
        "WORLD": world_size,
        "BLOCK": block,
        "MAPPED_BLOCK": mapped_block(block, warps, world_size, unit if whole else 1),
        "WARPS": warps,
        "PDL": capability >= 90,
    }
    return build_shape(few_sms, values, warps, capability, {"maxnreg": registers} if registers else None)


def compiled_of_copies(
    kernel: Any,
    dtype: str,
    unit: int,
    world_size: int,
    block: int,
    warps: int,
    capability: int,
    reduction: str = "sum",
    options: dict[str, Any] | None = None,
) -> Any:
    """Return a compiled kernel of calls by copy engines."""
    values = {
        "DTYPE": DTYPES[dtype],
        "UNIT": unit,
        "WORLD": world_size,
        "BLOCK": block,
        "WARPS": warps,
        "PDL": False,
        "REDUCTION": reduction_of(dtype, reduction),
    }
    return build_shape(kernel, values, warps, capability, options)


@functools.lru_cache(maxsize=256)
def compiled_uneven(dtype: str, unit: int, world_size: int, block: int, warps: int, capability: int = 90) -> Any:
    """Return the compiled kernel of an all_to_all of parts of any sizes."""
    values = {
        "DTYPE": DTYPES[dtype],
        "UNIT": unit,
        "WORLD": world_size,
        "HEAD_BLOCK": 32 * warps,
        "BLOCK": block,
        "WARPS": warps,
        "PDL": capability >= 90,
    }
    return build_shape(exchange_parts, values, warps, capability)


@functools.lru_cache(maxsize=256)
def compiled_fused(
    name: str,
    dtype: str = "bfloat16",
    hidden: int = 8192,
    quantize: str = "",
    keeps_normed: bool = True,
    world_size: int = 4,
    capability: int = 90,
    multicast: bool = False,
    weight: str = "",
    kind: str = RMS,
    tile_words: int = 128,
) -> Any:
    """Return a compiled kernel that norms rows, as the executor launches it."""
    kernel, fixed = FUSED[name]
    words = hidden * (4 if dtype == "float32" else 2) // 4
    block, warps = tiles.row_tile(words)
    if "ROW_TILES" in fields_of(kernel):
        warps = 1  # a program has a tile, not a row
    values = {
        **fixed,
        "HIDDEN": hidden,
        "QUANTIZE": QUANTIZATIONS.index(quantize),
        "KEEPS_NORMED": keeps_normed,
        "WEIGHT": DTYPES[weight or dtype],
        "KIND": NORM_KINDS.index(kind),
        "MULTICAST": multicast,
        "DTYPE": DTYPES[dtype],
        "UNIT": 16,
        "WORLD": world_size,
        "BLOCK": tile_words * warps,
        "ROW_BLOCK": block,
        "ROW_TILES": -(-words // tile_words),
        "WARPS": warps,
        "PDL": capability >= 90,
    }
    return build_shape(kernel, values, warps, capability)


def build_shape(
    kernel: Any, values: dict[str, Any], warps: int, capability: int, options: dict[str, Any] | None = None
) -> Any:
    """Compile a kernel of the transport for what it takes of ``values``."""
    return build(kernel, signature_of(kernel), {"SHAPE": shape_of(kernel, values)}, warps, capability, options)


def build(
    kernel: Any,
    signature: dict[str, Any],
    constants: dict[str, Any],
    warps: int,
    capability: int,
    options: dict[str, Any] | None = None,
    aligned: Collection[str] = (),
) -> Any:
    """Compile a kernel. ``aligned`` names arguments that are multiples of 16, as Triton finds out when it launches.

    Elements of tuples have the names of their fields.
    """
    known = {}
    for place, name in enumerate(kernel.arg_names):
        if name in aligned:
            known[place,] = [["tt.divisibility", 16]]
        for inner, field in enumerate(getattr(signature.get(name), "_fields", ())):
            if field in aligned:
                known[place, inner] = [["tt.divisibility", 16]]
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return triton.compile(
        source(kernel, signature=signature, constexprs=constants, attrs=known),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "enable_fp_fusion": False, "launch_pdl": capability >= 90, **(options or {})},
    )


TUPLES: dict[str, Any] = {
    "rotation": Rotation,
    "cache": Cache,
    "sequences": Sequences,
    "parts": Parts,
    "scoring": Scoring,
    "matrix": Matrix,
    "metadata": SamplingMetadata,
}
"""Tuples that kernels of models take, by the names of the arguments."""


def build_of_kinds(
    kernel: Any,
    kinds: dict[str, str],
    shape: Any,
    warps: int,
    capability: int,
    options: dict[str, Any] | None = None,
    aligned: Collection[str] = (),
) -> Any:
    """Compile a kernel of models for a SHAPE; arguments, and fields of tuples, without a kind are None."""
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {"SHAPE": shape}
    for place, name in enumerate(kernel.arg_names):
        if name in TUPLES:
            fields = TUPLES[name]._fields
            signature[name] = TUPLES[name](*(kinds.get(field, "constexpr") for field in fields))
            constants |= {(place, inner): None for inner, field in enumerate(fields) if field not in kinds}
        else:
            signature[name] = kinds.get(name, "constexpr")
            if name not in kinds and name != "SHAPE":
                constants[name] = None
    return build(kernel, signature, constants, warps, capability, options, aligned)


def instructions(ptx: str) -> Counter[str]:
    """Count the PTX instructions, inline assembly included."""
    return Counter(re.findall(r"^\s*(?:@!?%?p\d* )?([a-z][\w.:]*)", ptx, re.M))


def machine_instructions(text: str) -> Counter[str]:
    """Count the instructions of disassembled machine code."""
    return Counter(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", text, re.M))


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def sass(kernel: Any, folder: Path) -> str:
    """Return the disassembled machine code."""
    return _run("nvdisasm", kernel, folder)


def resources(kernel: Any, folder: Path) -> dict[str, int]:
    """Return registers, stack and local memory, as the assembler reports them."""
    text = _run("cuobjdump", kernel, folder, "--dump-resource-usage")
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}


_SAID: dict[tuple[str, ...], str] = {}
"""The outputs of the tools, by tool, options and kernel."""


def _run(tool: str, kernel: Any, folder: Path, *options: str) -> str:
    asked = (tool, *options, kernel.hash)
    if asked not in _SAID:
        file = folder / f"{kernel.hash}.cubin"
        file.write_bytes(kernel.asm["cubin"])
        command = [_tool(tool), *options, str(file)]
        _SAID[asked] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return _SAID[asked]


def flat(signature: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the kind of each parameter of a compiled kernel; elements of tuples have names of their own.

    Those are the names of fields, or that of the tuple with a number.
    """
    for name, kind in signature.items():
        if isinstance(kind, tuple):
            names = getattr(kind, "_fields", [f"{name}{place}" for place in range(len(kind))])
            yield from flat(dict(zip(names, kind, strict=True)))
        elif kind != "constexpr":
            yield name, kind


def kinds_where_launched(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the kinds of all arguments where :class:`Launch` compiles a kernel, which must not be specialized."""
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    _, specialization, _ = binder(**{name: unspecialized(value) for name, value in arguments.items()})[:3]
    kinds = dict(zip(kernel.arg_names, (kind for kind, _ in specialization), strict=False))
    for name, (_, special) in zip(kernel.arg_names, specialization, strict=False):
        assert kinds[name] == "constexpr" or not re.search("D|1", str(special)), f"{name} is specialized: {special}"
    return kinds


def touched(ptx: str, signature: dict[str, Any], addresses: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return which argument each access to global memory goes to: (instruction, argument).

    Registers are followed from the parameters they come from, which are pointers and ``addresses``. A value that was
    loaded from memory comes from none.
    """
    arguments = list(flat(signature))
    origins: dict[str, frozenset[str]] = {}
    found = []
    for line in ptx.splitlines():
        text = line.strip().rstrip(";")
        text = text.partition(" ")[2].strip() if text.startswith("@") else text
        name, _, operands = text.partition(" ")
        registers = re.findall(r"%\w+", operands)
        if name.startswith("ld.param") and (parameter := re.search(r"_param_(\d+)\]", operands)):
            of = [
                name for name, kind in arguments[int(parameter[1]) :][:1] if kind.startswith("*") or name in addresses
            ]
            origins[registers[0]] = frozenset(of)
        elif re.match(r"(ld|st|atom|red|cp)\..*global", name):
            address = re.search(r"\[\s*(%\w+)", operands)
            assert address is not None, line
            (target,) = origins[address[1]]
            found.append((name, target))
            if name.startswith("ld"):
                origins.update(dict.fromkeys(re.findall(r"%\w+", operands.partition("[")[0]), frozenset()))
        elif registers and not name.startswith("//"):
            sources = [origins.get(register, frozenset()) for register in registers[1:]]
            origins[registers[0]] = frozenset().union(*sources)
    return found


def read_before_waiting(kernel: Any) -> list[tuple[str, str]]:
    """Return what a kernel does, beyond arithmetic, before the kernel before it has ended.

    Accesses are as :func:`touched` returns them; branches and atomics are (instruction, "").
    """
    before = kernel.asm["ptx"].partition("griddepcontrol.wait")[0]
    others = [(key, "") for key in instructions(before) if key.startswith(("atom", "red", "bra", "ret"))]
    return touched(before, kernel.src.signature, ("peers",)) + others
