"""Ranks in Triton's interpreter, without work whose result nobody sees: more than half of what it does for our kernels.

Triton decides at import whether it interprets, so the functions that such ranks run stand in modules of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import shared_ranks
import shotcast

GPU_COLLECTIVES = {"SHOTCAST_CPU_KERNELS": "interpreter"}
"""An ``env`` for :func:`interpret` with which collectives also use the kernels of GPUs, over shared memory."""

COMPUTING_S = 500.0
"""A timeout for ranks that mostly compute: they share few cores with other processes, and give way to them."""

_PAUSE_S = 0.0005


def interpret(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = COMPUTING_S,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(*args)`` in ranks for which kernels of GPUs are interpreted.

    Args:
        fresh: start ranks for this call alone, by ``shotcast.spawn`` with ``kwargs``; without it, tests share them.
    """
    env = {"TRITON_INTERPRET": "1", **(env or {})}
    start = shotcast.spawn if fresh else shared_ranks.run
    return start(quietly, world_size, fn, *args, timeout_s=timeout_s, env=env, **kwargs)


def quietly(fn: Callable[..., Any], *args: Any) -> Any:
    """Run ``fn(*args)`` in a quick interpreter, with no warning of overflow and NaN, which are among the data."""
    _quicken()
    _yield_cores()
    np.seterr(all="ignore")
    return fn(*args)


@functools.cache
def _quicken() -> None:
    """Make the interpreter of this process faster, once.

    Raises:
        AttributeError: this Triton does not have the functions that are replaced.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    # Checks of overflow end in a device_assert, which does nothing where debug is off.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    # It makes a table of all types whenever it looks up one.
    number = functools.cache(interpreter._get_np_dtype)
    pointer = interpreter._get_np_dtype(tl.pointer_type(tl.int8))
    interpreter._get_np_dtype = lambda kind: pointer if kind.scalar.is_ptr() else number(kind.scalar)

    # Every result is given a shape of its own, of objects of the language with types of their own.
    original = tl.core.block_type.__init__

    @functools.cache
    def shape_of_block(sizes: tuple[int, ...]) -> tuple[Any, int]:
        block = object.__new__(tl.core.block_type)
        original(block, tl.int8, list(sizes))
        return block.shape, block.numel

    @functools.cache
    def shape_of_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])

    def begin_block(block: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.value if isinstance(shape, tl.constexpr) else shape
        block.sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in sizes])
        block.element_ty = element_ty
        block.shape, block.numel = shape_of_block(block.sizes)
        block.name = f"<{block.sizes}, {element_ty}>"

    def begin_tensor(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.numel, tensor.shape = shape_of_tensor(kind.sizes if kind.is_block() else ())

    tl.core.block_type.__init__ = begin_block
    tl.core.tensor.__init__ = begin_tensor

    # Each call within a kernel looks through the whole language for functions to replace, which were replaced when the
    # kernel began; those of tl.core, which Triton's own library calls, when that was called first.
    patch = interpreter._patch_lang

    @functools.cache
    def languages(fn: Any) -> list[Any]:
        seen = {id(value) for value in fn.__globals__.values()}
        return [module for module in (tl, tl.core) if id(module) in seen]

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if any(tl.core.is_builtin(module.load) for module in languages(function.fn)):
            patch(function.fn)
        try:
            return function.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call


def _yield_cores() -> None:
    """Let ranks that wait leave the cores, which are fewer, to the rank that they wait for."""
    from shotcast.transport.triton import send_recv, sync, two_shot_fp8

    for module in (send_recv, sync, two_shot_fp8):
        module.yield_core = lambda: time.sleep(_PAUSE_S)
