"""NVSHMEM device functions for Triton kernels. Importable only where Triton compiles; the interpreter has none.

A kernel that calls one is compiled with the option ``extern_libs`` of
:func:`shotcast.memory.nvshmem_library.extern_libs`; :class:`.launch.Launch` then gives its module NVSHMEM's state. A
function called with scalars runs in every thread of a program. The functions here operate on a whole block and expect
that: they begin and end with a barrier of the block, so stores by all its threads precede what they send.

The bitcode was compiled without GPU-initiated InfiniBand (IBGDA), so puts to memory that is not mapped go through
NVSHMEM's proxy thread on the host. Arguments are 64-bit addresses and sizes and a 32-bit PE. Their types must match the
C signature, because Triton finds the function by name only.
"""

from __future__ import annotations

from typing import Any

from triton.language import core


@core.extern
def put_nbi_block(target: Any, source: Any, nbytes: Any, pe: Any, _semantic: Any = None) -> Any:
    """Copy ``nbytes`` from ``source``, an address in this PE's NVSHMEM memory, to PE ``pe``, without waiting.

    ``target`` is the address that the bytes would have in this PE's memory. All threads of the program must make the
    same call. Words of 4 bytes at multiples of 4 arrive whole, exactly once and in any order
    (docs/reference/protocols.md explains what guarantees that). The source may be reused once the other PE is known to
    have the bytes.
    """
    return core.extern_elementwise(
        "",
        "",
        [target, source, nbytes, pe],
        {(core.int64, core.int64, core.int64, core.int32): ("nvshmemx_putmem_nbi_block", core.int32)},
        is_pure=False,
        _semantic=_semantic,
    )
