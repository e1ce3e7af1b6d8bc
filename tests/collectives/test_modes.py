"""Captured and eager calls: each mode has its own choice, and a call in one mode prepares the other."""

from __future__ import annotations

import mode_targets as targets

import shotcast


def test_each_mode_has_its_own_choice() -> None:
    expected = ["two_shot", "one_shot", "two_shot", "one_shot"]
    assert shotcast.spawn(targets.each_mode_has_its_own_choice, 3, timeout_s=300) == [expected] * 3


def test_eager_call_compiles_the_captured_one() -> None:
    for before, after in shotcast.spawn(targets.eager_call_compiles_the_captured_one, 2, timeout_s=300):
        assert sorted(before) == ["one_shot", "two_shot"]
        assert after == ["ring"], "nothing is compiled in a capture; a named algorithm has no twin"


def test_capture_without_a_call_before_is_refused() -> None:
    for message in shotcast.spawn(targets.capture_without_a_call_before, 2, timeout_s=300):
        assert "shotcast.all_reduce one_shot float32 32 B would be compiled inside a graph capture" in message


def test_explain() -> None:
    graph, eager = ("graph", "one_shot", "user table"), ("eager", "two_shot", "user table")
    assert shotcast.spawn(targets.explained, 2, timeout_s=300)[0] == [eager, graph, eager, graph, eager]


def test_explain_on_cpu_ranks() -> None:
    shotcast.spawn(targets.modes_of_cpu_ranks, 2, timeout_s=300)


def test_explicit_launches_bypass_the_choice() -> None:
    shotcast.spawn(targets.explicit_launches, 3, timeout_s=300)


def test_single_rank_orders_nothing() -> None:
    assert shotcast.spawn(targets.single_rank_orders_nothing, 1, timeout_s=300) == [0]


def test_packaged_table_of_other_kernels_is_skipped_and_named() -> None:
    for by_model, named, logged in shotcast.spawn(targets.packaged_table_of_other_kernels, 2, timeout_s=300):
        assert by_model.endswith("; table x.json was made for revision 0 of the kernels")
        assert named == "named in the call"
        assert logged == ["table x.json was made for revision 0 of the kernels"]
