"""Kernels with one line changed do something else than the models: the replay of their traces must say so."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from .kernel_replay import ReplayError
from .kernel_traces import Change, Circumstances
from .test_kernel_traces import (
    TracedCall,
    message_plans,
    replay,
    replay_messages,
    run,
    sequences,
    switch_sums,
    switched,
)

TIMEOUT_S = 2.0


class Case(NamedTuple):
    """A change, and calls in which the replay must find it: a name of ``sequences``, "multicast" or "multimem".

    With "messages", they are messages; with "clearing ", the calls clear as they read.
    """

    calls: str
    module: str
    old: str
    new: str


def without(calls: str, module: str, line: str) -> Case:
    return Case(calls, module, line, "")


CASES = {
    # the epoch and the generation
    "program 0 waits for its own count": Case(
        "one_shot",
        "sync",
        "if tl.sum(counts.to(tl.int32), axis=0) == tl.num_programs(0) - 1:",
        "if tl.sum(counts.to(tl.int32), axis=0) == tl.num_programs(0):",
    ),
    "a program counts itself in before it reads the epoch": Case(
        "one_shot",
        "sync",
        "    epoch, word = load_pair(copy_to_read(own))\n",
        '    tl.atomic_add(copy_to_read(own) + READERS_WORD, 0, sem="relaxed", scope="gpu")\n'
        "    epoch, word = load_pair(copy_to_read(own))\n",
    ),
    "the epoch counts by two": Case(
        "one_shot", "sync", "tl.store(copies, call.epoch + 1)", "tl.store(copies, call.epoch + 2)"
    ),
    "the count of readers stays": without("one_shot", "sync", "    tl.store(copies + READERS_WORD, call.epoch * 0)\n"),
    "a program counts itself in another copy": Case(
        "fused_one_shot",
        "sync",
        "tl.atomic_add(copy_to_read(call.own) + READERS_WORD, 1,",
        "tl.atomic_add(call.own + EPOCH + READERS_WORD, 1,",
    ),
    "counts of one copy are looked at": Case(
        "one_shot", "sync", "tl.load(readers, mask=threads < COPIES,", "tl.load(readers, mask=threads < 1,"
    ),
    "program 0 records another extent": Case(
        "ring",
        "ring",
        "call, quads * HOPS, True, WORLD, SHAPE.WARPS",
        "call, quads * HOPS - 1, True, WORLD, SHAPE.WARPS",
    ),
    "a program waits before it counts itself in": Case(
        "one_shot",
        "one_shot",
        "        sync.leave_epoch(call, extent, not CELLS)\n",
        "        masks = sync.arrival_masks(call, offs, span, 0, span, WORLD, True)\n"
        "        sync.await_words(call, slots, stride, offs, masks, 0, CELLS, WORLD, WORLD)\n"
        "        sync.leave_epoch(call, extent, not CELLS)\n",
    ),
    "a copy keeps its epoch": Case(
        "one_shot",
        "sync",
        "tl.store(copies, call.epoch + 1)",
        "tl.store(copies, call.epoch + 1, mask=tl.arange(0, COPIES) > 0)",
    ),
    "no barrier before the count": Case(
        "one_shot", "sync", "    tl.debug_barrier()\n    tl.atomic_add(copy", "    tl.atomic_add(copy"
    ),
    "the epoch may be cached": Case(
        "one_shot",
        "sync",
        "load_pair(copy_to_read(own))\n",
        "tl.load(copy_to_read(own)), tl.load(copy_to_read(own) + 1, volatile=True)\n",
    ),
    "the prior kernel is not awaited": without("ring", "sync", "    await_prior_kernel(PDL)\n"),
    "the generation does not advance": Case(
        "two_shot",
        "sync",
        "((call.generation + 1) % GENERATIONS).to(tl.int64)",
        "(call.generation % GENERATIONS).to(tl.int64)",
    ),
    "a call without slots advances the generation": Case(
        "mixed",
        "barrier",
        "False, SHAPE.WORLD, SHAPE.WARPS, SHAPE.PDL, entry.puts, SHAPE.PUTS)\n",
        "True, SHAPE.WORLD, SHAPE.WARPS, SHAPE.PDL, entry.puts, SHAPE.PUTS)\n",
    ),
    "a larger extent is recorded": Case("one_shot", "one_shot", "else quads * SLOTS\n", "else quads * SLOTS + 1\n"),
    # clears
    "nothing is cleared": Case(
        "one_shot",
        "sync",
        "range(worker * BLOCK, dirty, workers * BLOCK)",
        "range(worker * BLOCK, 0, workers * BLOCK)",
    ),
    "the last quad is not cleared": Case(
        "one_shot", "sync", "mask=start + offs < dirty)", "mask=start + offs < dirty - 4)"
    ),
    "another generation is cleared": Case(
        "one_shot", "sync", "return (call.generation + 2) % GENERATIONS", "return (call.generation + 1) % GENERATIONS"
    ),
    "a call that clears as it reads records an extent": Case(
        "clearing one_shot", "one_shot", "0 if SHAPE.CLEAR_AFTER_READ else quads * SLOTS", "quads * SLOTS"
    ),
    "slots are not cleared as they are read": without(
        "clearing reduce_scatter",
        "one_shot",
        "            if SHAPE.CLEAR_AFTER_READ:\n"
        "                sync.clear_parts(call, slots, stride, offs, masks, WORLD)\n",
    ),
    "the second shot is not cleared": without(
        "clearing two_shot",
        "two_shot",
        "                if SHAPE.CLEAR_AFTER_READ:\n"
        "                    sync.clear_parts(call, second_shot, slice_quads, offs, masks, WORLD)\n",
    ),
    "the first shot is not cleared": without(
        "clearing two_shot",
        "two_shot",
        "                if SHAPE.CLEAR_AFTER_READ:\n"
        "                    sync.clear_parts(call, first_shot, slice_quads, offs, masks, WORLD)\n",
    ),
    "slots are cleared before they are read": Case(
        "clearing all_gather",
        "copies",
        "            parts, call = sync.await_words(call, buffer,",
        "            sync.clear_parts(call, buffer, stride, offs, masks, senders)\n"
        "            parts, call = sync.await_words(call, buffer,",
    ),
    "scales are not cleared": Case(
        "clearing fp8",
        "two_shot_fp8",
        "        mask = offs < groups_of(message_quads, DTYPE) * GROUP_SCALES\n",
        "        mask = offs < 0\n",
    ),
    "fused sums are not cleared": Case(
        "clearing fused_two_shot",
        "fused_two_shot",
        "            sync.clear_parts(call, slots, stride, offs, masks, WORLD)\n        sums = insert_own(",
        "            pass\n        sums = insert_own(",
    ),
    # words
    "words go to the wrong generation": Case(
        "one_shot", "sync", "slots_at + generation * slots_quads", "slots_at + (generation + 1) % 3 * slots_quads"
    ),
    "the words of the last rank are not awaited": Case(
        "one_shot",
        "sync",
        "for r in tl.static_range(1, COUNT):\n            largest",
        "for r in tl.static_range(1, COUNT - 1):\n            largest",
    ),
    "another word is polled": Case(
        "reduce_scatter",
        "sync",
        "base = words_at(call.own.to(tl.int64), quads + r * stride)\n            part",
        "base = words_at(call.own.to(tl.int64), quads + r * stride + 1)\n            part",
    ),
    "a poll may be cached": Case(
        "all_to_all",
        "sync",
        "quads + r * stride)\n            part = tl.load(base + offs, mask=masks[r], other=0, volatile=True)",
        "quads + r * stride)\n            part = tl.load(base + offs, mask=masks[r], other=0)",
    ),
    "a rank waits for what it sends to itself": Case(
        "all_gather", "copies", "if not SHAPE.MULTICAST:", "if SHAPE.MULTICAST:"
    ),
    "all ranks send a broadcast": Case("broadcast", "copies", "tl.where(rank == root, part_nbytes, 0)", "part_nbytes"),
    "sums go to the slots of the first shot": Case(
        "two_shot", "two_shot", "sums = second_shot + rank * stride", "sums = first_shot + rank * stride"
    ),
    "reduced cells lie as close as slots": Case(
        "reduced_cells", "two_shot", "            stride = slice_quads * 2\n", "            stride = slice_quads\n"
    ),
    "reduced words go as cells of the epoch before": Case(
        "reduced_cells", "sync", "0xFFFFFFFF) | (call.epoch << 32)", "0xFFFFFFFF) | ((call.epoch - 1) << 32)"
    ),
    "sums are sent before all words have come": Case(
        "two_shot",
        "two_shot",
        "                parts, call = sync.await_words(call, first_shot,",
        "                sync.store_to_all(\n"
        "                    call, addresses, sums, offs, own_words, offs < own_span, False, False, WORLD - 1\n"
        "                )\n"
        "                parts, call = sync.await_words(call, first_shot,",
    ),
    "a hop goes to the slot of the one before": Case(
        "ring", "ring", "slots + (hop + 1) * quads", "slots + hop * quads"
    ),
    "a hop is not awaited": Case("half_ring", "ring", "call, slots + hop * quads, 0,", "call, slots, 0,"),
    "scales are not awaited": Case(
        "fp8",
        "two_shot_fp8",
        "largest = tl.maximum(largest, part[block].to(tl.uint32, bitcast=True))",
        "largest = largest",
    ),
    "FP8 sums go to the slots of the first shot": Case(
        "fp8",
        "two_shot_fp8",
        "                        second_shot + own_rank * stride,",
        "                        first_shot + own_rank * stride,",
    ),
    "tiles of a row share a slot": Case(
        "fused_one_shot", "fused_one_shot", "slots + rank * stride + tile * TILE", "slots + rank * stride"
    ),
    "fused sums are not awaited": Case(
        "fused_two_shot",
        "fused_two_shot",
        "        parts, call = sync.await_words(call, slots, stride, offs, masks, 0, False, WORLD, WORLD, True)\n",
        "",
    ),
    # headers
    "one header cell for both parities": Case(
        "one_shot", "sync", "row = HEADERS + (call.epoch % 2) *", "row = HEADERS + (call.epoch * 0) *"
    ),
    "a word of the header has another epoch": Case(
        "mixed",
        "sync",
        "((call.epoch & 0xFFFF) << 48) | tl.where(",
        "(((call.epoch + number) & 0xFFFF) << 48) | tl.where(",
    ),
    "only one word of a header is awaited": Case(
        "mixed",
        "sync",
        "tl.max((cells != mine).to(tl.int32), axis=0)",
        "tl.max(((cells != mine) & (words == 0)).to(tl.int32), axis=0)",
    ),
    "any header is compared": Case(
        "mixed", "sync", "came = ((cells >> 48) & 0xFFFF == call.epoch & 0xFFFF) & (cells != 0)", "came = cells != 0"
    ),
    "headers are not awaited": Case(
        "mixed", "sync", "    waiting = call.live\n    started", "    waiting = call.live * 0\n    started"
    ),
    # flag cells
    "one generation of flag cells": Case(
        "cells", "sync", "(epoch % 2).to(tl.int32) * cells_quads", "(epoch * 0).to(tl.int32) * cells_quads"
    ),
    "a flag is that of the next call": Case(
        "cells", "sync", "& 0xFFFFFFFF) | (call.epoch << 32)", "& 0xFFFFFFFF) | ((call.epoch + 1) << 32)"
    ),
    "any flag will do": Case(
        "cells", "sync", "hit = (part >> 32).to(tl.int32) != epoch.to(tl.int32)", "hit = (part >> 32) == 0"
    ),
    # sums in the switch, and multicast
    "flags are not awaited": Case(
        "multimem", "multimem", "call = sync.await_flags(call, flags, WORLD, SHAPE.WARPS)", "pass"
    ),
    "owners of nothing wait for flags": Case(
        "multimem", "multimem", "if worker * BLOCK < own_span:", "if worker * BLOCK < slice_words:"
    ),
    "a flag is raised without release": Case(
        "multimem",
        "sync",
        "store_release(flags, call.epoch + threads * 0,",
        "tl.store(flags, call.epoch + threads * 0, mask=",
    ),
    "a flag is raised without a barrier": Case(
        "multimem",
        "sync",
        'needs separate flags.\n    """\n    tl.debug_barrier()\n',
        'needs separate flags.\n    """\n',
    ),
    "flags are awaited without a fence": without("multimem", "sync", "    fence_acquire()\n"),
    "any flag that was raised will do": Case(
        "multimem",
        "sync",
        "        late = ranks & (flags != call.epoch)\n        waiting",
        "        late = ranks & (flags == 0)\n        waiting",
    ),
    "staging lies in the second shot": Case(
        "multimem",
        "multimem",
        "call.own.to(tl.int64), staging + r * slice_quads",
        "call.own.to(tl.int64), second_shot + r * slice_quads",
    ),
    "a multicast is not awaited by its sender": Case(
        "multicast",
        "two_shot",
        "slice_words, slice_words, total, WORLD, not SHAPE.MULTICAST)",
        "slice_words, slice_words, total, WORLD, True)",
    ),
    # messages
    "credit is given before the copy": Case(
        "messages",
        "send_recv",
        "                words, call = await_chunk(",
        "                tl.store(peer_region + CREDITS + call.rank * CHANNELS + channel, count + 1)\n"
        "                words, call = await_chunk(",
    ),
    "credit is given before all threads have their words": without(
        "messages",
        "send_recv",
        "                tl.debug_barrier()  # every thread has its cells before the sender may overwrite them\n",
    ),
    "credit is for a chunk more": Case(
        "messages",
        "send_recv",
        "CREDITS + call.rank * CHANNELS + channel, count + 1)",
        "CREDITS + call.rank * CHANNELS + channel, count + 2)",
    ),
    "a sender runs a chunk ahead": Case(
        "messages", "send_recv", "channel, count - 1, peer", "channel, count - 2, peer"
    ),
    "a send stores to the other slot": Case(
        "messages", "send_recv", "(count % 2) * CHUNK_WORDS", "((count + 1) % 2) * CHUNK_WORDS"
    ),
    "the last word of a chunk is not awaited": Case(
        "messages",
        "send_recv",
        "waiting = tl.max((((cells >> 32).to(tl.int32) != flag) & mask).to(tl.int32), axis=0)\n        polls",
        "waiting = tl.max((((cells >> 32).to(tl.int32) != flag) & mask & (offs < 511)).to(tl.int32), axis=0)\n"
        "        polls",
    ),
    "a chunk has the number of the one before": Case(
        "messages", "send_recv", "| ((count + 1) << 32)", "| (count << 32)"
    ),
    "one word of a message's header is awaited": Case(
        "messages",
        "send_recv",
        "        waiting = tl.max((received_header != own_header).to(tl.int32), axis=0)\n        came",
        "        waiting = tl.max(((received_header != own_header) & (words == 0)).to(tl.int32), axis=0)\n        came",
    ),
    "a message begins unsaid": without(
        "messages", "send_recv", "        tl.store(peer_region + RECEIVES_BEGUN + call.rank, call.epoch + 1)\n"
    )._replace(new="        pass\n"),
    "a message's header lies in another cell": Case(
        "messages",
        "send_recv",
        "cells = MESSAGE_HEADERS + (call.rank * MESSAGE_SLOTS + call.epoch % MESSAGE_SLOTS)",
        "cells = MESSAGE_HEADERS + (call.rank * MESSAGE_SLOTS + (call.epoch + 1) % MESSAGE_SLOTS)",
    ),
}

OFTEN = (
    "nothing is cleared",
    "the words of the last rank are not awaited",
    "the first reader advances the epoch",
    "only one word of a header is awaited",
    "any flag will do",
    "credit is given before the copy",
)
"""The changes that the default run tries."""


@pytest.mark.every(5)
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_a_changed_kernel_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, module, old, new = CASES[name]
    change = Change(module, old, new)
    if kind == "messages":
        traces = run(2, message_plans(), Circumstances(change, timeout_s=TIMEOUT_S))
        with pytest.raises(ReplayError):
            replay_messages(traces, monkeypatch)
        return
    ranks = 3 if "ring" in kind else 2
    calls: list[TracedCall] = {"multicast": switched, "multimem": switch_sums}.get(
        kind, lambda ranks: sequences(ranks)[kind.removeprefix("clearing ")]
    )(ranks)
    clears_from = 100 if kind.startswith("clearing") else None
    circumstances = Circumstances(change, clears_from, kind in ("multicast", "multimem"), timeout_s=TIMEOUT_S)
    traces = run(ranks, [[each.plan for each in calls]] * ranks, circumstances)
    with pytest.raises(ReplayError):
        replay(ranks, calls, traces, monkeypatch, clears_from, circumstances.multicast)
