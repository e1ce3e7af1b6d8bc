"""The prepared launch, compared with Triton's own launcher: the compiled kernel gets the same."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import triton
from occupancy import Kernel
from product_room import blocks_per_sm, needs_of
from tma_launch import TmaLaunch, descriptor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import cross
from shotcast.device.triton import launch as launch_module
from shotcast.device.triton.launch import Launch, Wide, load_all, unspecialized
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
        self.attributes: list[dict[Any, Any]] = []
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

    __getitem__ = CompiledKernel.__getitem__


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
        for _, kind in cross.flat(self._compiled.src.signature):
            if kind.startswith("tensordesc"):
                kinds += ["u64", "i32", "i32", "i64", "i64"]  # the driver's form, of which 8 bytes count here
            else:
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

    def compile_it(
        kernel: Any,
        key: Any,
        signature: dict[str, Any],
        device: int,
        constants: Any,
        options: Any,
        attributes: Any,
        *_: Any,
    ) -> Compiled:
        made.src.signature = signature
        made.attributes.append({place: found for place, found in attributes.items() if found})
        return made

    monkeypatch.setattr(JITFunction, "_do_compile", compile_it)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", triton.knobs.HookChain())
    monkeypatch.setattr(driver, "_active", Driver())
    for kernel in cross.ALL:
        kernel.device_caches.clear()
    yield made
    for kernel in cross.ALL:
        kernel.device_caches.clear()  # it holds code that no GPU can run


@pytest.fixture
def library(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library(compiled)
    monkeypatch.setattr(cuda_driver, "library", lambda: made)
    return made


KERNELS: dict[str, Any] = {kernel.__name__: kernel for kernel in cross.ALL}
CALLED = ("a", "b", "x", "out", "data", "norm", "spans")
"""Arguments that each call gives."""


def arguments_of(name: str) -> dict[str, Any]:
    """Return arguments of a kernel that differ from each other."""
    kernel = KERNELS[name]
    numbers = itertools.count()

    def value(kind: Any) -> Any:
        if isinstance(kind, tuple):
            values = [value(inner) for inner in kind]
            return type(kind)(*values) if hasattr(kind, "_fields") else tuple(values)
        return 0.5 if kind == "fp32" else (1 << 40) + next(numbers) if kind == "i64" else next(numbers)

    given = {name: value(kind) for name, kind in cross.signature_of(kernel).items() if kind != "constexpr"}
    return given | {"SHAPE": cross.shape_of(kernel, dict.fromkeys(cross.fields_of(kernel), 4))}


def elements(value: Any) -> list[Any]:
    """Return a value, or all elements of a tuple."""
    return [inner for one in value for inner in elements(one)] if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_gets_what_the_public_launcher_gives_it(
    name: str, compiled: Compiled, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, arguments = KERNELS[name], arguments_of(name)
    names = [name for name in CALLED if name in arguments]
    given = [
        1e-5 if kind == "fp32" else (1 << 41) + 16 * place if kind == "i64" else 16 * place
        for place, (_, kind) in enumerate(cross.flat({name: cross.signature_of(kernel)[name] for name in names}))
    ]
    launch = Launch(kernel, 7, arguments, names, OPTIONS)
    launch.load()
    assert compiled.loads == 1
    launch(STREAM, given)
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: None)
    launch(STREAM, given)
    (ours,), (theirs,) = library.launches, compiled.runs
    assert theirs[:6] == (7, 1, 1, STREAM, Compiled.function, Compiled.packed_metadata)
    signature = compiled.src.signature
    assert tuple(signature) == tuple(kernel.arg_names)
    kinds = [kind for value in signature.values() for kind in elements(value)]
    given_there = [value for argument in theirs[9:] for value in elements(argument)]
    values = [value for value, kind in zip(given_there, kinds, strict=True) if kind != "constexpr"]
    wanted = Enqueued((7, 1, 1), (128, 1, 1), 1024, STREAM, {6: 1}, Compiled.function, tuple(map(rounded, values)))
    assert ours._replace(values=tuple(map(rounded, ours.values))) == wanted
    assert {rounded(value) for value in given} <= set(wanted.values)
    # Triton's launcher takes the elements of tuples in this order
    monkeypatch.setattr(Driver, "utils", SimpleNamespace(build_signature_metadata=list), raising=False)
    if hasattr(nvidia, "make_kernel_signature"):  # from Triton 3.7 on
        flat = nvidia.make_kernel_signature(signature.values())
        assert flat == [kind for kind in kinds if kind != "constexpr"]


@pytest.mark.parametrize("name", KERNELS)
def test_hooks_are_told_of_what_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM logs what is compiled while it serves, and Triton writes JSON for it."""
    told: list[dict[str, Any]] = []

    def hook(**facts: Any) -> bool:
        told.append(facts["compile"])
        return True  # there is nothing to compile

    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    kernel = KERNELS[name]
    kernel.device_caches.clear()
    given = {name: unspecialized(value) for name, value in arguments_of(name).items()}
    assert kernel.warmup(**given, **OPTIONS, grid=(1,)) is None
    kernel.device_caches.clear()
    (facts,) = told
    assert repr(given["SHAPE"]) in json.loads(facts["specialization_data"])["constant_vals"]


def rounded(value: float) -> float:
    """Return a float as a kernel gets it; integers as they are."""
    return ctypes.c_float(value).value if isinstance(value, float) else value


@pytest.mark.parametrize("name", KERNELS)
def test_no_element_of_a_tuple_is_compiled_in(name: str, compiled: Compiled, library: Library) -> None:
    """Triton would compile in a rank of 1, and which addresses are multiples of 16."""
    kernel, kinds = KERNELS[name], []
    for number in (0, 1, 16):
        given = {name: small(value, number) for name, value in arguments_of(name).items()}
        Launch(kernel, 1, given, (), OPTIONS).load()
        kinds.append(compiled.src.signature)
    assert kinds[0] == kinds[1] == kinds[2] == cross.signature_of(kernel)
    assert compiled.attributes == [{}] * len(compiled.attributes)


def small(value: Any, number: int) -> Any:
    """Replace all numbers, in tuples too, by others of as many bits, whatever these bits are."""
    if isinstance(value, tuple):
        values = [small(inner, number) for inner in value]
        return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
    if type(value) is not int:
        return value
    return number if value < 1 << 31 else (1 << 40) + number


def test_a_wide_number_is_wide_however_small_it_is(compiled: Compiled, library: Library) -> None:
    given = arguments_of("few_sms") | {"starts": tuple(map(Wide, range(9)))}
    Launch(KERNELS["few_sms"], 1, given, (), OPTIONS)(STREAM, ())
    assert compiled.src.signature["starts"] == ("i64",) * 9
    (launched,) = library.launches
    places = [name for name, _ in cross.flat(compiled.src.signature)]
    assert launched.values[places.index("starts0") :][:9] == tuple(range(9))


def test_a_launch_without_attributes_has_none(compiled: Compiled, library: Library) -> None:
    compiled.metadata.launch_pdl = False
    kernel = KERNELS["barrier"]
    Launch(kernel, 1, arguments_of("barrier"), (), OPTIONS)(STREAM, ())
    compiled.metadata.launch_cooperative_grid = True
    Launch(kernel, 1, arguments_of("barrier"), (), OPTIONS)(STREAM, ())
    assert [launch.attributes for launch in library.launches] == [{}, {2: 1}]


def test_later_calls_change_what_they_give_and_nothing_else(compiled: Compiled, library: Library) -> None:
    kernel = KERNELS["two_shot_all_reduce"]
    launch = Launch(kernel, 7, arguments_of("two_shot_all_reduce"), ("x", "out"), OPTIONS)
    launch(STREAM, (1 << 41, 1 << 42))
    launch(STREAM + 1, (1 << 43, 1 << 42))
    first, second = library.launches
    differing = [place for place, (a, b) in enumerate(zip(first.values, second.values, strict=True)) if a != b]
    assert (first.stream, second.stream) == (STREAM, STREAM + 1)
    names = [name for name, _ in cross.flat(compiled.src.signature)]
    assert differing == [names.index("x")]
    assert first[:3] == second[:3]
    assert compiled.loads == 1


def test_a_profilers_hook_sees_launches(compiled: Compiled, library: Library) -> None:
    kernel = KERNELS["two_shot_all_reduce"]
    launch = Launch(kernel, 7, arguments_of("two_shot_all_reduce"), ("x", "out"), OPTIONS)
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: None)
    launch(STREAM, (1 << 41, 1 << 42))
    assert not library.launches
    (hooked,) = compiled.runs
    assert hooked[7] is triton.knobs.runtime.launch_enter_hook


@pytest.mark.parametrize("stream", [STREAM, STREAM + 1, 0])
def test_a_hooked_launch_goes_to_the_stream_it_is_given(stream: int, compiled: Compiled, library: Library) -> None:
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: None)
    kernel = KERNELS["two_shot_all_reduce"]
    Launch(kernel, 7, arguments_of("two_shot_all_reduce"), ("x", "out"), OPTIONS)(stream, (1 << 41, 1 << 42))
    (hooked,) = compiled.runs
    assert hooked[3] == stream


def launches_of(*blocks: int, num_warps: int = 1) -> list[Launch]:
    """Return launches of one kernel with tiles of so many words."""
    values = {"DTYPE": cross.DTYPES["float32"], "UNIT": 16, "WORLD": 2, "WARPS": 1, "PDL": True, "REDUCTION": 0}
    values |= {"CLEAR_AFTER_READ": False, "SCATTER": False, "CELLS": False}
    kernel, given = KERNELS["one_shot_reduce"], arguments_of("one_shot_reduce")
    shapes = [cross.shape_of(kernel, values | {"BLOCK": block}) for block in blocks]
    return [Launch(kernel, 7, given | {"SHAPE": shape}, (), {"num_warps": num_warps}) for shape in shapes]


class Gpu:
    """Stands in for a GPU that kernels are compiled for, and loaded on in name."""

    def __init__(self) -> None:
        self.loaded: list[Launch] = []
        self.entered: list[int] = []

    @contextlib.contextmanager
    def current(self, device: int) -> Iterator[None]:
        self.entered.append(device)
        yield


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(Driver, "get_current_device", lambda _: 3)
    monkeypatch.setattr(torch.cuda, "device", made.current)
    monkeypatch.setattr(Launch, "load", lambda launch: made.loaded.append(launch))
    monkeypatch.setattr(launch_module, "available_cores", lambda: 8)
    yield made
    KERNELS["one_shot_reduce"].device_caches.clear()  # it holds code that no GPU can run


@pytest.mark.parametrize(("rank", "share"), [(0, [128, 256]), (1, [512, 1024])])
@pytest.mark.parametrize("cores", [1, 2, 64])
def test_ranks_of_a_host_compile_their_shares_first(
    cores: int, rank: int, share: list[int], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "available_cores", lambda: cores)
    compiled: list[int] = []
    monkeypatch.setattr(Launch, "_compile", lambda launch: compiled.append(launch.arguments["SHAPE"].BLOCK))
    launches = launches_of(128, 256, 128, 512, 1024)
    load_all(launches, rank, 2)
    assert sorted(compiled[:2]) == share
    assert sorted(compiled) == [128, 256, 512, 1024]
    assert gpu.entered == [3] * 4, "each thread begins on device 0, which may be another rank's"
    assert gpu.loaded == launches


def test_kernels_are_compiled_at_the_same_time(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    all_four = threading.Barrier(4, timeout=20)
    met: list[int] = []
    monkeypatch.setattr(Launch, "_compile", lambda _: met.append(all_four.wait()))
    load_all([*launches_of(128, 256, 512), *launches_of(512, num_warps=4)], 0, 1)
    assert sorted(met) == [0, 1, 2, 3]


def test_what_a_thread_fails_to_compile_is_loaded_all_the_same(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading compiles it again, or says what is wrong with it."""

    def failing(_: Launch) -> None:
        raise SystemError("AST constructor recursion depth mismatch")

    monkeypatch.setattr(Launch, "_compile", failing)
    launches = launches_of(128, 256)
    load_all(launches, 0, 1)
    assert gpu.loaded == launches


def test_threads_compile_what_one_would(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A thread may fail, seldom and with Python 3.11 alone; most kernels are on disk nevertheless."""
    made: dict[str, list[str]] = {}
    for name in ("threads", "one"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / name))
        KERNELS["one_shot_reduce"].device_caches.clear()
        launches = launches_of(128, 256, 512)
        if name == "threads":
            load_all(launches, 0, 1)
            assert [*(tmp_path / name).glob("*/*.cubin")]
        made[name] = [launch._compile().asm["ptx"] for launch in launches]
    assert made["threads"] == made["one"]
    assert len(set(made["one"])) == 3


def test_the_interpreter_compiles_and_loads_nothing(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "INTERPRETED", True)
    load_all(launches_of(128), 0, 1)
    assert (gpu.entered, gpu.loaded) == ([], [])


def test_an_error_of_the_driver_is_told(library: Library) -> None:
    kernel = KERNELS["two_shot_all_reduce"]
    launch = Launch(kernel, 7, arguments_of("two_shot_all_reduce"), ("x", "out"), OPTIONS)
    library.error = 700
    with pytest.raises(RuntimeError, match=r"launching a kernel failed: out of order \(CUDA error 700\)"):
        launch(STREAM, (1 << 41, 1 << 42))


@pytest.mark.parametrize("asks", [{"global_scratch_size": 8}, {"profile_scratch_size": 8}, {"num_ctas": 2}])
def test_a_kernel_that_needs_more_than_is_given_is_refused(
    asks: dict[str, int], compiled: Compiled, library: Library
) -> None:
    vars(compiled.metadata).update(asks)
    kernel = KERNELS["two_shot_all_reduce"]
    with pytest.raises(RuntimeError, match="needs scratch memory or clusters"):
        Launch(kernel, 7, arguments_of("two_shot_all_reduce"), ("x", "out"), OPTIONS).load()


@pytest.mark.parametrize("hooked", [False, True])
def test_a_module_gets_the_state_of_nvshmem_once(
    compiled: Compiled, library: Library, monkeypatch: pytest.MonkeyPatch, hooked: bool
) -> None:
    joined: list[int] = []
    monkeypatch.setattr(nvshmem_library, "library", lambda: SimpleNamespace(initialise_module=joined.append))
    compiled.module = 0xBEEF
    kernel = KERNELS["two_shot_all_reduce"]
    plain = Launch(kernel, 7, arguments_of("two_shot_all_reduce"), ("x", "out"), OPTIONS)
    plain(STREAM, (1 << 41, 1 << 42))
    assert not joined, "NVSHMEM refuses a module without its functions"
    if hooked:
        triton.knobs.runtime.launch_enter_hook.add(lambda metadata: None)
    for _ in range(2):
        options = OPTIONS | {"extern_libs": {nvshmem_library.EXTERN_LIBRARY: __file__}}
        launch = Launch(kernel, 7, arguments_of("two_shot_all_reduce"), ("x", "out"), options)
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


def tile_launch(compiled: Compiled, padding_bytes: int | None = None) -> TmaLaunch:
    add_tiles.device_caches.clear()
    compiled.metadata.tensordesc_meta = [{"swizzle": 3, "block_size": [8, 16]}, {"swizzle": 2, "block_size": [8, 32]}]
    given = {
        "x": descriptor(torch.bfloat16, (100, 48), (56, 1), (8, 32)),
        "y": descriptor(torch.float16, (100, 40), (40, 1), (8, 32)),
        "count": 3,
    }
    return TmaLaunch(add_tiles, 7, given, ("y", "x"), {"num_warps": 4}, padding_bytes)


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
    assert needs_of(launch) == Kernel(155, 128, shared + 96)
    assert blocks_per_sm(launch) == 128_000_000 + shared
