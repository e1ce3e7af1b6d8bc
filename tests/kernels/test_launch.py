"""The short way to launch a kernel, held against Triton's own: what reaches the compiled kernel is the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cross
import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from shotcast.kernels.launch import Launch

STREAM = 0x5EED
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False, "launch_pdl": True}


class Driver:
    """As much of a GPU's driver as a launch asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiled:
    """A compiled kernel that notes how it was run."""

    function, packed_metadata = 0xF00D, (4, 1, 1024)

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []
        self.loads = 0

    def _init_handles(self) -> None:
        self.loads += 1

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any) -> None:
        self.runs.append(args)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    made = Compiled()
    monkeypatch.setattr(JITFunction, "_do_compile", lambda self, *args, **kwargs: made)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", triton.knobs.HookChain())
    monkeypatch.setattr(driver, "_active", Driver())
    for kernel, _ in cross.KERNELS.values():
        kernel.device_caches.clear()
    yield made
    for kernel, _ in cross.KERNELS.values():
        kernel.device_caches.clear()  # it holds what no GPU can run


def arguments_of(name: str) -> dict[str, Any]:
    kernel, fixed = cross.KERNELS[name]
    given = {}
    for number, param in enumerate(kernel.params):
        if param.name in fixed:
            given[param.name] = fixed[param.name]
        elif param.is_constexpr:
            given[param.name] = {"DTYPE": triton.language.bfloat16}.get(param.name, 4)
        else:
            given[param.name] = (1 << 40) + number if param.name in cross.ADDRESSES else number
    return given


@pytest.mark.parametrize("name", ["one_shot", "two_shot", "ring", "gather", "send", "barrier"])
def test_the_kernel_gets_what_the_public_launcher_gives_it(name: str, compiled: Compiled) -> None:
    kernel, _ = cross.KERNELS[name]
    arguments = arguments_of(name)
    names = [name for name in ("x", "out", "data") if name in arguments]
    given = [(1 << 41) + 16 * place for place, _ in enumerate(names)]
    launch = Launch(kernel, 7, arguments, names, OPTIONS)
    launch.load()
    assert compiled.loads == 1
    launch(STREAM, given)
    kernel[(7,)](**(arguments | dict(zip(names, given, strict=True))), **OPTIONS)
    ours, theirs = compiled.runs
    metadata, hooks = slice(6, 7), slice(7, 9)
    assert ours[:6] == theirs[:6] == (7, 1, 1, STREAM, Compiled.function, Compiled.packed_metadata)
    assert ours[metadata] == theirs[metadata] == (None,)
    assert ours[hooks] == (None, None)
    assert ours[9:] == theirs[9:]
    assert set(given) <= set(ours[9:])


def test_later_calls_change_what_they_give_and_nothing_else(compiled: Compiled) -> None:
    kernel, _ = cross.KERNELS["two_shot"]
    launch = Launch(kernel, 7, arguments_of("two_shot"), ("x", "out"), OPTIONS)
    launch(STREAM, (1 << 41, 1 << 42))
    launch(STREAM + 1, (1 << 43, 1 << 42))
    first, second = compiled.runs
    differing = [place for place, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    assert differing == [3, 9 + kernel.arg_names.index("x")]
    assert compiled.loads == 1


def test_a_profilers_hook_sees_launches(compiled: Compiled) -> None:
    kernel, _ = cross.KERNELS["two_shot"]
    launch = Launch(kernel, 7, arguments_of("two_shot"), ("x", "out"), OPTIONS)
    launch(STREAM, (1 << 41, 1 << 42))
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: None)
    launch(STREAM, (1 << 41, 1 << 42))
    quietly, hooked = compiled.runs
    assert hooked[9:] == quietly[9:]
    assert hooked[7] is triton.knobs.runtime.launch_enter_hook
