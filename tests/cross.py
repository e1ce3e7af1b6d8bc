"""Cross-compilation of kernels for GPUs that are not here."""

from __future__ import annotations

import functools
import re
import subprocess
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shotcast.device.triton import tiles
from shotcast.hardware.nodes import folded
from shotcast.kernels.triton.norm import NORM_ADDRESSES, norm_rows
from shotcast.memory import nvshmem_library
from shotcast.transport.triton.barrier import barrier
from shotcast.transport.triton.copies import BROADCAST, EXCHANGE, GATHER, copy
from shotcast.transport.triton.exchanges import DOUBLING, HALVING, PAIRS, PAIRS_16BIT, TWO_SHOT_16BIT
from shotcast.transport.triton.few_sms import few_sms
from shotcast.transport.triton.fused_nvrar import nvrar_norm
from shotcast.transport.triton.fused_one_shot import one_shot_norm
from shotcast.transport.triton.fused_reduce_scatter import COMPILE_OPTIONS, scatter_norm
from shotcast.transport.triton.fused_two_shot import two_shot_norm
from shotcast.transport.triton.multimem import multimem_all_reduce
from shotcast.transport.triton.nvrar import nvrar_all_reduce
from shotcast.transport.triton.one_shot import one_shot_reduce
from shotcast.transport.triton.reductions import dtype_of, reduction_of
from shotcast.transport.triton.ring import ring
from shotcast.transport.triton.rooted import rooted_copy
from shotcast.transport.triton.send_recv import send_recv
from shotcast.transport.triton.two_shot import two_shot_all_reduce
from shotcast.transport.triton.two_shot_fp8 import compile_options, two_shot_fp8_all_reduce
from shotcast.transport.triton.uneven import exchange_parts
from shotcast.wire import NORM_KINDS, QUANTIZATIONS, REDUCED, REDUCIBLE, RMS

ADDRESSES = (
    "x",
    "out",
    "data",
    "own",
    "peers",
    "puts",
    "puts",
    "header_size",
    "header_call",
    "sum_cells",
    "mean_cells",
    "amax_cells",
    "blocks",
    "arrivals",
    *NORM_ADDRESSES[:-1],
)
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
    "fused_scatter": (scatter_norm, {"GATHER": False}),
    "fused_gather": (scatter_norm, {"GATHER": True}),
}


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
    constants = {key: value for key, value in values.items() if key in kernel.arg_names}
    signature = {
        key: "constexpr" if key in constants else "i64" if key in ADDRESSES else "i32" for key in kernel.arg_names
    }
    options = compile_options(world_size, capability >= 89) if kernel is two_shot_fp8_all_reduce else None
    return build(kernel, signature, constants, warps, capability, options=options)


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
    constants = {key: value for key, value in values.items() if key in kernel.arg_names}
    kinds = dict.fromkeys(ADDRESSES, "i64") | dict.fromkeys(constants, "constexpr") | {"eps": "fp32"}
    signature = {key: kinds.get(key, "i32") for key in kernel.arg_names}
    options = {"extern_libs": nvshmem_library.extern_libs()} if puts else None
    return build(kernel, signature, constants, warps, capability, options=options)


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
    announces: bool = False,
) -> Any:
    """Return the compiled kernel of calls that keep to a number of SMs; ``kind`` is the operation's.

    Its threads have at most ``registers``; 0 for as many as they need.
    """
    values = {
        "KIND": kind,
        "ANNOUNCES": announces,
        "DTYPE": DTYPES[dtype],
        "UNIT": unit,
        "WORLD": world_size,
        "BLOCK": block,
        "WARPS": warps,
        "PDL": capability >= 90,
    }
    # as Triton has it where a kernel is launched: sizes are declared as 64 bits wide
    declared = {name: "i64" for name, kind in few_sms.fn.__annotations__.items() if kind == "tl.int64"}
    kinds = dict.fromkeys(ADDRESSES, "i64") | declared | dict.fromkeys(values, "constexpr")
    signature = {key: kinds.get(key, "i32") for key in few_sms.arg_names}
    return build(few_sms, signature, values, warps, capability, {"maxnreg": registers} if registers else None)


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
    declared = {name: "i64" for name, kind in exchange_parts.fn.__annotations__.items() if kind == "tl.int64"}
    kinds = dict.fromkeys(ADDRESSES, "i64") | declared | dict.fromkeys(values, "constexpr")
    signature = {key: kinds.get(key, "i32") for key in exchange_parts.arg_names}
    return build(exchange_parts, signature, values, warps, capability)


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
    each: int = 1,
) -> Any:
    """Return a compiled kernel that norms rows, as the executor launches it."""
    kernel, fixed = FUSED[name]
    words = hidden * (4 if dtype == "float32" else 2) // 4
    block, warps = tiles.row_tile(words)
    if "ROW_TILES" in kernel.arg_names:
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
        "BLOCK": 128 * warps,
        "ROW_BLOCK": block,
        "ROW_TILES": -(-words // 128),
        "EACH": each,
        "GROUP": min(world_size, tiles.slots_at_once(block, warps)),
        "WARPS": warps,
        "PDL": capability >= 90,
    }
    constants = {key: value for key, value in values.items() if key in kernel.arg_names}
    kinds = dict.fromkeys(ADDRESSES, "i64") | dict.fromkeys(constants, "constexpr") | {"eps": "fp32"}
    signature = {key: kinds.get(key, "i32") for key in kernel.arg_names}
    return build(
        kernel, signature, constants, warps, capability, options=COMPILE_OPTIONS if kernel is scatter_norm else {}
    )


def build(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    capability: int,
    options: dict[str, Any] | None = None,
    aligned: Collection[str] = (),
) -> Any:
    """Compile a kernel. ``aligned`` names arguments that are multiples of 16, as Triton finds out when it launches."""
    known = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name in aligned}
    return triton.compile(
        ASTSource(kernel, signature=signature, constexprs=constants, attrs=known),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "enable_fp_fusion": False, "launch_pdl": capability >= 90, **(options or {})},
    )


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


def touched(ptx: str, signature: dict[str, str], addresses: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return which argument each access to global memory goes to: (instruction, argument).

    Registers are followed from the parameters they come from, which are pointers and ``addresses``. A value that was
    loaded from memory comes from none.
    """
    arguments = [(name, kind) for name, kind in signature.items() if kind != "constexpr"]
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
