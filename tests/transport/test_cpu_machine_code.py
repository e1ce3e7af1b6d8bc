"""The machine code of the host code, here and on aarch64: vectors, ordered loads and stores, no contraction."""

from __future__ import annotations

import re

import llvmlite.binding as llvm
import pytest

from shotcast import wire
from shotcast.device.cpu import floats, reductions
from shotcast.device.cpu.compilation import Arithmetic, CompiledSchedule, compile_function
from shotcast.transport.cpu import copies, fused, norm, one_shot, ring, send_recv, two_shot
from shotcast.wire import Norm

TRIPLES = {"aarch64-unknown-linux-gnu": "neoverse-n1", "x86_64-unknown-linux-gnu": "skylake-avx512"}
CALLS = {
    "one_shot": one_shot.ALL_REDUCE,
    "two_shot": two_shot.ALL_REDUCE,
    "ring": ring.ALL_REDUCE,
    "broadcast": copies.BROADCAST,
    "recv": send_recv.RECV,
    "fused": fused.TWO_SHOT,
}


def assembly(text: str, triple: str) -> str:
    """Compile LLVM ``text`` to the machine code of another machine."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=TRIPLES[triple], opt=3)
    text = re.sub(r"target triple = .*", f'target triple = "{triple}"', text)
    text = re.sub(r"target datalayout = .*", f'target datalayout = "{machine.target_data}"', text)
    text = re.sub(r"attributes #(\d+) = \{[^}]*\}", r"attributes #\1 = { nounwind }", text)
    if triple.startswith("aarch64"):
        text = text.replace("call void @llvm.x86.sse2.pause()", "call void @llvm.aarch64.hint(i32 1)")
        text = text.replace("declare void @llvm.x86.sse2.pause()", "declare void @llvm.aarch64.hint(i32)")
    module = llvm.parse_assembly(text)
    module.verify()
    return machine.emit_assembly(module)


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def text_of(schedule: CompiledSchedule) -> str:
    return str(compile_function(schedule._function, "schedule").library.get_llvm_str())


@pytest.mark.every(7)
@pytest.mark.parametrize("name", CALLS)
def test_words_are_acquired_and_released(name):
    text = text_of(CALLS[name].schedule)
    assert count("load atomic i64.* acquire", text) >= 3
    assert count("store atomic i64.* release", text) >= 1
    code = assembly(text, "aarch64-unknown-linux-gnu")
    assert count(r"\bld(ar|apr)\b", code) >= 3
    assert count(r"\bstlr\b", code) >= 1


def code_of(arithmetic: Arithmetic, triple: str) -> str:
    text = compile_function(arithmetic._function, "arithmetic").library.get_llvm_str()
    assert count(r"f(add|sub|mul|div) (?!<)(?!float)\w+ ", text) == 0, "fast-math flags"
    code = assembly(text, triple)
    assert count(r"\bfmla\b|\bfmls\b|\bfn?m(add|sub)\b|\bvfn?m(add|sub)", code) == 0
    return code


@pytest.mark.parametrize("triple", TRIPLES)
@pytest.mark.parametrize("dtype", reductions.SUMS)
def test_sums_are_vectors_and_nothing_is_fused(dtype, triple):
    code = code_of(reductions.SUMS[dtype], triple)
    if triple.startswith("aarch64"):
        assert count(r"fadd\s+v\d+\.4s", code) >= 8
        assert dtype != "float16" or count(r"\bfcvtn", code) > 0
    else:
        assert count(r"vaddps\s.*[yz]mm", code) >= 2
        assert dtype != "float16" or not floats.machine_has_half() or count("vcvtps2ph", code) > 0


@pytest.mark.parametrize("triple", TRIPLES)
@pytest.mark.parametrize("dtype", wire.REDUCIBLE)
def test_rows_are_vectors_and_nothing_is_fused(dtype, triple):
    adds, norms = (code_of(part, triple) for part in norm.arithmetic_of(dtype, Norm(64)))
    if triple.startswith("aarch64"):
        vectors = {kind: rf"f{kind}\s+v\d+\.4s" for kind in ("add", "mul")}
        narrowed = r"\bxtn|\buzp1"
    else:
        vectors = {kind: rf"v{kind}ps\s.*[yz]mm" for kind in ("add", "mul")}
        narrowed = r"\bvpmov\w*[dw]b|\bvpackus"
    # The sum, the residual, the squares; twice for each the factor, the weight and the inverse of the scale.
    assert count(vectors["add"], adds) >= 6
    assert count(vectors["mul"], adds) >= 2
    assert count(vectors["mul"], norms) >= 10
    assert count(narrowed, norms) >= 2, "bytes are not packed from vectors"
