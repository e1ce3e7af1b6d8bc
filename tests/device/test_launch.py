"""The prepared launch, compared with Triton's own launcher: the compiled kernel gets the same."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import cross
from shotcast.device.triton.launch import KernelResources, Launch, descriptor
from shotcast.memory import driver as cuda_driver
from shotcast.memory import nvshmem_library

STREAM = 0x5EED
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False, "launch_pdl": True}


class Driver:
    """The part of a GPU's driver that a launch needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiled:
    """A compiled kernel that records how Triton ran it."""

    function, packed_metadata, name = 0xF00D, (4, 1, 1024), "kernel"
    module = 0

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []
        self.loads = 0
        self.src = SimpleNamespace(signature={})
        self.metadata = SimpleNamespace(
            num_warps=4,
            num_ctas=1,
            shared=1024,
            launch_pdl=True,
            launch_cooperative_grid=False,
            global_scratch_size=0,
            profile_scratch_size=0,
            tensordesc_meta=[],
        )

    def _init_handles(self) -> None:
        self.loads += 1

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any) -> None:
        self.runs.append(args)


class Enqueued(NamedTuple):
    """The launch that the driver was asked for; ``values`` without Triton's two scratch addresses, which are null."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    attributes: dict[int, int]
    function: int
    values: tuple[Any, ...]


class Library:
    """The CUDA driver, which reads its arguments as ``cuda.h`` lays them out."""

    KINDS: ClassVar = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "u64": ctypes.c_uint64, "fp32": ctypes.c_float}

    def __init__(self, compiled: Compiled):
        self._compiled = compiled
        self.launches: list[Enqueued] = []
        self.error = 0
        self.encoded: list[Any] = []
        self.attributes = {1: 96, 4: 155, 8: 49152, 9: -1}

    def cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: Any) -> int:  # noqa: N802
        at = ctypes.cast(config, ctypes.c_void_p).value
        raw = ctypes.string_at(at, 56)
        *sizes, shared = struct.unpack_from("<7I", raw)
        stream, attributes, count = struct.unpack_from("<QQI", raw, 32)
        pairs = [struct.unpack_from("<I4xI", ctypes.string_at(attributes + 72 * place, 72)) for place in range(count)]
        kinds: list[str] = []
        for kind in self._compiled.src.signature.values():
            if kind.startswith("tensordesc"):
                kinds += ["u64", "i32", "i32", "i64", "i64"]  # the driver's form, of which 8 bytes count here
            elif kind != "constexpr":
                kinds.append(kind)
        values = [ctypes.cast(params[place], ctypes.POINTER(self.KINDS[kind]))[0] for place, kind in enumerate(kinds)]
        assert [ctypes.cast(params[len(kinds) + place], ctypes.POINTER(ctypes.c_uint64))[0] for place in (0, 1)] == [
            0,
            0,
        ]
        assert extra is None
        self.launches.append(
            Enqueued(tuple(sizes[:3]), tuple(sizes[3:]), shared, stream, dict(pairs), function.value, tuple(values))
        )
        return self.error

    def cuTensorMapEncodeTiled(self, target: Any, dtype: int, rank: Any, address: Any, *given: Any) -> int:  # noqa: N802
        at = ctypes.addressof(target._obj)
        assert at % 64 == 0
        ctypes.c_uint64.from_address(at).value = address.value
        shape, strides, box, steps = (list(values) for values in given[:4])
        self.encoded.append((dtype, rank.value, shape, strides[:-1], box, steps, *given[4:]))
        return self.error

    def cuTensorMapReplaceAddress(self, target: Any, address: Any) -> int:  # noqa: N802
        ctypes.c_uint64.from_address(ctypes.addressof(target._obj)).value = address.value
        return self.error

    def cuFuncGetAttribute(self, value: Any, attribute: int, function: Any) -> int:  # noqa: N802
        assert function.value == Compiled.function
        value._obj.value = self.attributes[attribute]
        return self.error

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: Any) -> int:  # noqa: N802
        assert function.value == Compiled.function
        self.attributes[attribute] = value.value
        return self.error

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(  # noqa: N802
        self, blocks: Any, function: Any, threads: Any, shared_bytes: Any
    ) -> int:
        assert function.value == Compiled.function
        blocks._obj.value = threads.value * 1_000_000 + shared_bytes.value
        return self.error

    def cuGetErrorString(self, error: int, text: Any) -> None:  # noqa: N802
        text._obj.value = b"out of order"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    made = Compiled()

    def compile_it(kernel: Any, key: Any, signature: dict[str, str], *args: Any, **kwargs: Any) -> Compiled:
        made.src.signature = signature
        return made

    monkeypatch.setattr(JITFunction, "_do_compile", compile_it)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", triton.knobs.HookChain())
    monkeypatch.setattr(driver, "_active", Driver())
    for kernel, _ in cross.KERNELS.values():
        kernel.device_caches.clear()
    yield made
    for kernel, _ in cross.KERNELS.values():
        kernel.device_caches.clear()  # it holds code that no GPU can run


@pytest.fixture
def library(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library(compiled)
    monkeypatch.setattr(cuda_driver, "library", lambda: made)
    return made


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
def test_the_kernel_gets_what_the_public_launcher_gives_it(name: str, compiled: Compiled, library: Library) -> None:
    kernel, _ = cross.KERNELS[name]
    arguments = arguments_of(name)
    names = [name for name in ("x", "out", "data") if name in arguments]
    given = [(1 << 41) + 16 * place for place, _ in enumerate(names)]
    launch = Launch(kernel, 7, arguments, names, OPTIONS)
    launch.load()
    assert compiled.loads == 1
    launch(STREAM, given)
    kernel[(7,)](**(arguments | dict(zip(names, given, strict=True))), **OPTIONS)
    (ours,), (theirs,) = library.launches, compiled.runs
    assert theirs[:6] == (7, 1, 1, STREAM, Compiled.function, Compiled.packed_metadata)
    kinds = compiled.src.signature
    values = [value for value, kind in zip(theirs[9:], kinds.values(), strict=True) if kind != "constexpr"]
    pdl = {6: 1}
    assert ours == Enqueued((7, 1, 1), (128, 1, 1), 1024, STREAM, pdl, Compiled.function, tuple(values))
    assert set(given) <= set(ours.values)


def test_a_launch_without_attributes_has_none(compiled: Compiled, library: Library) -> None:
    compiled.metadata.launch_pdl = False
    kernel, _ = cross.KERNELS["barrier"]
    Launch(kernel, 1, arguments_of("barrier"), (), OPTIONS)(STREAM, ())
    compiled.metadata.launch_cooperative_grid = True
    Launch(kernel, 1, arguments_of("barrier"), (), OPTIONS)(STREAM, ())
    assert [launch.attributes for launch in library.launches] == [{}, {2: 1}]


def test_later_calls_change_what_they_give_and_nothing_else(compiled: Compiled, library: Library) -> None:
    kernel, _ = cross.KERNELS["two_shot"]
    launch = Launch(kernel, 7, arguments_of("two_shot"), ("x", "out"), OPTIONS)
    launch(STREAM, (1 << 41, 1 << 42))
    launch(STREAM + 1, (1 << 43, 1 << 42))
    first, second = library.launches
    differing = [place for place, (a, b) in enumerate(zip(first.values, second.values, strict=True)) if a != b]
    assert (first.stream, second.stream) == (STREAM, STREAM + 1)
    names = [name for name, kind in compiled.src.signature.items() if kind != "constexpr"]
    assert differing == [names.index("x")]
    assert first[:3] == second[:3]
    assert compiled.loads == 1


def test_a_profilers_hook_sees_launches(compiled: Compiled, library: Library) -> None:
    kernel, _ = cross.KERNELS["two_shot"]
    launch = Launch(kernel, 7, arguments_of("two_shot"), ("x", "out"), OPTIONS)
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: None)
    launch(STREAM, (1 << 41, 1 << 42))
    assert not library.launches
    (hooked,) = compiled.runs
    assert hooked[7] is triton.knobs.runtime.launch_enter_hook


@pytest.mark.parametrize("stream", [STREAM, STREAM + 1, 0])
def test_a_hooked_launch_goes_to_the_stream_it_is_given(
    stream: int, compiled: Compiled, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [STREAM]

    @contextlib.contextmanager
    def on(handle: int) -> Iterator[None]:
        current.append(handle)
        yield
        current.pop()

    monkeypatch.setattr(Driver, "get_current_stream", lambda self, device: current[-1])
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle: handle or "one of a pool")
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", on)
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: None)
    kernel, _ = cross.KERNELS["two_shot"]
    Launch(kernel, 7, arguments_of("two_shot"), ("x", "out"), OPTIONS)(stream, (1 << 41, 1 << 42))
    (hooked,) = compiled.runs
    assert hooked[3] == stream
    assert current == [STREAM]


def test_an_error_of_the_driver_is_told(library: Library) -> None:
    kernel, _ = cross.KERNELS["two_shot"]
    launch = Launch(kernel, 7, arguments_of("two_shot"), ("x", "out"), OPTIONS)
    library.error = 700
    with pytest.raises(RuntimeError, match=r"launching a kernel failed: out of order \(CUDA error 700\)"):
        launch(STREAM, (1 << 41, 1 << 42))


@pytest.mark.parametrize("asks", [{"global_scratch_size": 8}, {"profile_scratch_size": 8}, {"num_ctas": 2}])
def test_a_kernel_that_needs_more_than_is_given_is_refused(
    asks: dict[str, int], compiled: Compiled, library: Library
) -> None:
    vars(compiled.metadata).update(asks)
    kernel, _ = cross.KERNELS["two_shot"]
    with pytest.raises(RuntimeError, match="needs scratch memory or clusters"):
        Launch(kernel, 7, arguments_of("two_shot"), ("x", "out"), OPTIONS).load()


@pytest.mark.parametrize("hooked", [False, True])
def test_a_module_gets_the_state_of_nvshmem_once(
    compiled: Compiled, library: Library, monkeypatch: pytest.MonkeyPatch, hooked: bool
) -> None:
    joined: list[int] = []
    monkeypatch.setattr(nvshmem_library, "library", lambda: SimpleNamespace(initialise_module=joined.append))
    compiled.module = 0xBEEF
    kernel, _ = cross.KERNELS["two_shot"]
    plain = Launch(kernel, 7, arguments_of("two_shot"), ("x", "out"), OPTIONS)
    plain(STREAM, (1 << 41, 1 << 42))
    assert not joined, "NVSHMEM refuses a module without its functions"
    if hooked:
        triton.knobs.runtime.launch_enter_hook.add(lambda metadata: None)
    for _ in range(2):
        options = OPTIONS | {"extern_libs": {nvshmem_library.EXTERN_LIBRARY: __file__}}
        launch = Launch(kernel, 7, arguments_of("two_shot"), ("x", "out"), options)
        launch(STREAM, (1 << 41, 1 << 42))
        launch(STREAM, (1 << 41, 1 << 42))
    assert joined == [0xBEEF]


@triton.jit(do_not_specialize=["count"])
def add_tiles(x, y, count):
    for tile in range(count):
        y.store([tile, 0], x.load([tile, 0]))


class Tensor(NamedTuple):
    """A tensor at an address."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def tile_launch(compiled: Compiled, padding_bytes: int | None = None) -> Launch:
    add_tiles.device_caches.clear()
    compiled.metadata.tensordesc_meta = [{"swizzle": 3, "block_size": [8, 16]}, {"swizzle": 2, "block_size": [8, 32]}]
    given = {
        "x": descriptor(torch.bfloat16, (100, 48), (56, 1), (8, 32)),
        "y": descriptor(torch.float16, (100, 40), (40, 1), (8, 32)),
        "count": 3,
    }
    return Launch(add_tiles, 7, given, ("y", "x"), {"num_warps": 4}, padding_bytes)


def test_tensors_are_described_to_the_copy_engine(compiled: Compiled, library: Library) -> None:
    """Check the order of the kernel's arguments, and the driver's, who counts from the innermost dimension."""
    launch = tile_launch(compiled)
    for number in (1, 2):
        launch(STREAM, (Tensor(number << 41, torch.float16), Tensor(number << 40, torch.bfloat16)))
    assert sorted(library.encoded) == [
        (6, 2, [40, 100], [80], [32, 8], [1, 1], 0, 2, 2, 0),
        (9, 2, [48, 100], [112], [16, 8], [1, 1], 0, 3, 2, 0),
    ]
    assert [launch.values for launch in library.launches] == [
        (number << 40, 100, 48, 56, 1, number << 41, 100, 40, 40, 1, 3) for number in (1, 2)
    ]
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: None)
    launch(STREAM, (Tensor(1 << 41, torch.float16), Tensor(1 << 40, torch.bfloat16)))
    (hooked,) = compiled.runs
    assert [one.base.data_ptr() for one in hooked[9:11]] == [1 << 40, 1 << 41]
    assert [(one.shape, one.strides) for one in hooked[9:11]] == [([100, 48], [56, 1]), ([100, 40], [40, 1])]


def test_a_tensor_that_the_copy_engine_cannot_take_is_told(compiled: Compiled, library: Library) -> None:
    launch = tile_launch(compiled)
    launch.load()
    library.error = 1
    with pytest.raises(RuntimeError, match=r"describing a tensor of shape \(100, 40\) and strides \(40, 1\) failed"):
        launch(STREAM, (Tensor(1 << 41, torch.float16), Tensor(1 << 40, torch.bfloat16)))


@pytest.mark.parametrize(
    ("padding", "shared", "most", "carveout"),
    [(None, 1024, 49152, -1), (0, 1024, 49152, 100), (48128, 49152, 49152, 100), (100_000, 101_024, 101_024, 100)],
)
def test_padding_is_asked_for(
    padding: int | None, shared: int, most: int, carveout: int, compiled: Compiled, library: Library
) -> None:
    launch = tile_launch(compiled, padding)
    launch(STREAM, (Tensor(1 << 41, torch.float16), Tensor(1 << 40, torch.bfloat16)))
    assert library.launches[0].shared == shared
    assert (library.attributes[8], library.attributes[9]) == (most, carveout)
    assert launch.resources() == KernelResources(155, 128, shared + 96)
    assert launch.blocks_per_sm() == 128_000_000 + shared
