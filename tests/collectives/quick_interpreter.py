"""Triton's interpreter without work whose result nobody sees: more than half of what it does for our kernels."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

_PAUSE_S = 0.0005
_POLLS_PER_LOOK = 16


def quicken() -> None:
    """In this process. Raises AttributeError with a Triton where it is done otherwise."""
    import triton.language as tl
    from triton.runtime import interpreter

    # Checks of overflow end in a device_assert, which does nothing where debug is off.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

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

    # Ranks that wait leave the cores, which are fewer, to the rank that they wait for. They see that a deadline has
    # passed within a second: as many polls as a GPU makes from one look to the next take longer.
    from shotcast.kernels import mail, sync, two_shot_fp8

    for module in (mail, sync, two_shot_fp8):
        module.relax = lambda: time.sleep(_PAUSE_S)
        module.POLLS_PER_LOOK = tl.constexpr(_POLLS_PER_LOOK)
