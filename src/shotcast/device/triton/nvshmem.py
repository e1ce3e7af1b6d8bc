"""Device functions of NVSHMEM for Triton kernels. Importable only where Triton compiles; the interpreter has none.

A kernel that calls one is compiled with the option ``extern_libs`` of
:func:`shotcast.memory.nvshmem_library.extern_libs`; :class:`.launch.Launch` then gives its module the state of NVSHMEM.
Every thread of a program runs a function that is called with scalars. Those here are functions of a whole block, which
expect that: they begin and end with a barrier of the block, so stores of all its threads precede what they send.

The bitcode was compiled without GPU-initiated InfiniBand (IBGDA), so puts to memory that is not mapped go through
NVSHMEM's proxy thread on the host. Arguments are 64-bit addresses and sizes and a 32-bit PE. Types have to be those of
the C signature: Triton finds the function by name alone.
"""

from __future__ import annotations

from typing import Any

from triton.language import core


@core.extern
def put_nbi_block(target: Any, source: Any, nbytes: Any, pe: Any, _semantic: Any = None) -> Any:
    """Copy bytes from this GPU's memory of NVSHMEM to that of another PE; the program does not wait for their end.

    All threads of the program make the same call. Words of 4 bytes at multiples of 4 arrive whole, in any order, and
    each once (docs/reference/protocols.md says by what guarantee). The source may be used again once the other PE is
    known to have the bytes.

    Args:
        target: the address that the bytes would have in this PE's own memory.
        source: an address in this PE's memory of NVSHMEM.
        nbytes: how many.
        pe: the other PE.
    """
    return core.extern_elementwise(
        "",
        "",
        [target, source, nbytes, pe],
        {(core.int64, core.int64, core.int64, core.int32): ("nvshmemx_putmem_nbi_block", core.int32)},
        is_pure=False,
        _semantic=_semantic,
    )
