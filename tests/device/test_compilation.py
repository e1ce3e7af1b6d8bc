"""One process of a machine compiles host code, and others load it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from shotcast.device.cpu import compilation
from shotcast.device.cpu.compilation import CompiledSchedule, compile_function
from shotcast.transport.cpu import layout, norm_rows, one_shot
from shotcast.transport.cpu.waiting import ABORTED

PROGRAM = """
import sys
from shotcast.device.cpu.compilation import Schedule
from shotcast.transport.cpu.norm_rows import rows

print("imported", flush=True)
sys.stdin.readline()
Schedule(rows).get()
print(int("numba" not in sys.modules), flush=True)
"""


@pytest.mark.full
def test_one_of_several_processes_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", PROGRAM], **pipes) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout.readline() == "imported\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        assert sorted(int(process.stdout.readline()) for process in processes) == [0, 1]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


FIRST_CALL = """
import json, os, sys, time
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
import torch, torch.distributed as dist, torch._dynamo.guards
import shotcast.collectives.communicator

begun = time.process_time()
from shotcast.device.cpu.reductions import SUMS
from shotcast.transport.cpu import executor, one_shot
SUMS["float32"].address()
one_shot.ALL_REDUCE.schedule.get()
print(json.dumps([time.process_time() - begun, [name for name in sys.modules if name.partition(".")[0] == "numba"]]))
"""


def first_call() -> tuple[float, list[str]]:
    """Return the seconds of processor time to get ready for an all-reduce, and the modules of numba that are loaded."""
    run = subprocess.run([sys.executable, "-c", FIRST_CALL], stdout=subprocess.PIPE, text=True, check=True)
    cpu_s, modules = json.loads(run.stdout)
    return cpu_s, modules


@pytest.mark.full
def test_loading_does_not_import_numba(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert first_call()[1], "nothing was compiled"
    assert first_call()[1] == []


@pytest.mark.full
@pytest.mark.timing
def test_loading_takes_little_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    first_call()
    assert min(first_call()[0] for _ in range(3)) < 0.3


def done(_context: int, _plan: int, _x: int, _out: int) -> int:
    return 0


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of functions that are compiled in this process from here on, not loaded; with an empty cache."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    names: list[str] = []
    machine_code = compilation._machine_code

    def counted(function: Callable[..., int], kind: str) -> bytes:
        names.append(function.__name__)
        return machine_code(function, kind)

    monkeypatch.setattr(compilation, "_machine_code", counted)
    compilation._machine.cache_clear()
    yield names
    monkeypatch.undo()
    compilation._machine.cache_clear()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_sources_digest", lambda: "another"),
        ("metadata.version", lambda package: "another"),
        ("binding.get_host_cpu_name", lambda: "another"),
        ("binding.get_host_cpu_features", lambda: compilation.binding.FeatureMap()),
        ("binding.get_process_triple", lambda: "another-linux-gnu"),
        ("_SETTINGS", [("NUMBA_CPU_NAME", "generic")]),
        ("sys.version", "another"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kept_code_belongs_to_its_sources_versions_and_machine(
    name: str, value: object, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_or_load() -> None:
        assert CompiledSchedule(done).get()(0, 0, 0, 0) == 0

    compile_or_load()
    compile_or_load()
    assert compiled == ["done"]
    with monkeypatch.context() as patch:
        patch.setattr(f"shotcast.device.cpu.compilation.{name}", value)
        compilation._machine.cache_clear()
        file = compilation._file_of(done, "schedule")
    compilation._machine.cache_clear()
    assert file not in (None, compilation._file_of(done, "schedule"))


def test_kinds_and_values_in_a_closure_are_kept_apart(compiled: list[str]) -> None:
    def returning(number: int) -> Callable[[int, int, int, int], int]:
        def function(_context: int, _plan: int, _x: int, _out: int) -> int:
            return number

        return function

    assert [CompiledSchedule(returning(number)).get()(0, 0, 0, 0) for number in (3, 4, 3)] == [3, 4, 3]
    assert compiled == ["function", "function"]
    files = {compilation._file_of(returning(3), kind) for kind in ("schedule", "arithmetic")}
    assert len(files) == 2


def test_a_file_of_a_user_is_compiled_again_when_it_changes(compiled: list[str], tmp_path: Path) -> None:
    file = tmp_path / "written_by_a_user.py"

    def result() -> int:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return CompiledSchedule(module.function).get()(0, 0, 0, 0)

    text = "NUMBER = {}\n\ndef function(context, plan, x, out):\n    return NUMBER\n"
    file.write_text(text.format(11))
    assert [result(), result()] == [11, 11]

    file.write_text(text.format(222))
    assert result() == 222
    assert compiled == ["function", "function"]


def test_a_damaged_file_is_replaced(compiled: list[str], tmp_path: Path) -> None:
    CompiledSchedule(done).get()
    (file,) = (tmp_path / "cache").glob("*.code")
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], b""):
        file.write_bytes(damaged)
        assert CompiledSchedule(done).get()(0, 0, 0, 0) == 0
        assert compilation._read(file) is not None
    assert compiled == ["done"] * 4


def test_an_entry_refuses_other_arguments(compiled: list[str]) -> None:
    function = CompiledSchedule(done).get()
    assert isinstance(function, types.BuiltinFunctionType), "no function of C"
    with pytest.raises(TypeError):
        function(0, 0, 0)
    with pytest.raises(TypeError):
        function(0, 0, 0, None)
    with pytest.raises(OverflowError):
        function(0, 0, 0, 1 << 64)


@pytest.mark.full
def test_loaded_code_does_as_compiled_code(compiled: list[str]) -> None:
    """A stopped communicator answers at once, so the schedule of an all-reduce runs here without other ranks."""
    region, context, plan = array("q", [0] * 512), array("q", [0] * 80), array("q", [0] * layout.PLAN_WORDS)
    region[layout.ABORT // 8], context[layout.REGIONS // 8] = 1, region.buffer_info()[0]
    for _ in range(2):
        status = CompiledSchedule(one_shot.all_reduce).get()(context.buffer_info()[0], plan.buffer_info()[0], 0, 0)
        assert status == ABORTED
    assert compiled == ["all_reduce"]


def test_machine_code_asks_nothing_of_numba() -> None:
    """Code that is loaded without numba finds only symbols of the interpreter and of the C library."""
    for function, kind in ((one_shot.all_reduce, "schedule"), (norm_rows.rows, "schedule")):
        text = str(compile_function(function, kind).library.get_llvm_str())
        declared = [line for line in text.splitlines() if line.startswith("declare")]
        assert declared
        assert not [line for line in declared if "@numba_" in line or "@NRT_" in line]
