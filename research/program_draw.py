"""Random programs of torch.distributed: program N of a seed is drawn from both numbers alone, on whatever rank."""

from __future__ import annotations

import math
import random
from typing import Any

from program_steps import (
    COALESCED,
    REDUCING,
    REDUCTIONS,
    ROOTED,
    SMALL,
    STREAMS,
    WIDTH,
    Capture,
    Collective,
    Fill,
    Group,
    HostSleep,
    IllegalError,
    Messages,
    Product,
    Program,
    Replay,
    Rules,
    Shorten,
    Slot,
    Step,
    StreamSleep,
    Wait,
    every_step,
)

LARGEST = 64 << 20
"""The most bytes of a slot."""
DTYPES = {
    "cpu": ("float32", "bfloat16", "int32", "float64", "int64", "float16", "uint8"),
    "cuda": ("float32", "bfloat16", "int32"),
}
"""Few on GPUs, where each takes kernels of its own."""
PRODUCTS = {"cpu": (16, 64, 128), "cuda": (256, 1024, 2048, 4096)}
SIZES = {
    "cpu": ((0.92, 4, 1 << 15), (0.995, 1 << 15, 1 << 20), (1.0, 1 << 20, LARGEST)),
    "cuda": ((0.8, 4, 1 << 16), (0.95, 1 << 16, 4 << 20), (1.0, 4 << 20, LARGEST)),
}
"""The share of programs that have a largest slot of at least and at most so many bytes."""
CALLS = {
    "all_reduce": 8,
    "all_gather": 4,
    "reduce_scatter": 4,
    "all_to_all": 3,
    "all_to_all_uneven": 2,
    "broadcast": 3,
    "reduce": 2,
    "gather": 1,
    "scatter": 1,
    "all_gather_list": 1,
    "all_reduce_coalesced": 1,
    "all_gather_coalesced": 1,
    "reduce_scatter_coalesced": 1,
    "barrier": 1,
}
KINDS = {"call": 50, "messages": 14, "wait": 24, "fill": 4, "shorten": 4, "product": 6, "host_sleep": 4}
GPU_KINDS = KINDS | {"stream_sleep": 8, "capture": 4, "replay": 40}
CAPTURED_KINDS = {"call": 10, "messages": 2, "wait": 6, "shorten": 1, "product": 2, "stream_sleep": 1}
MOST_STEPS = 24


def draw(seed: int, number: int, device: str, world_size: int) -> Program:
    """Return program ``number`` of a seed."""
    return _Draw(random.Random(f"{seed} {number} {device} {world_size}"), device, world_size).program()


class _Draw:
    def __init__(self, rng: random.Random, device: str, world_size: int):
        self.rng, self.device, self.world_size = rng, device, world_size
        self.steps: list[Step] = []
        self.label = 0

    def program(self) -> Program:
        groups, slots = self._groups(), self._slots()
        self.rules = Rules(self.device, self.world_size, groups, slots)
        kinds = KINDS if self.device == "cpu" else GPU_KINDS
        for _ in range(self.rng.randint(4, MOST_STEPS)):
            self._add(kinds)
        for label in self.rng.sample(sorted(self.rules.under_way), len(self.rules.under_way)):
            self._accept(Wait(label, stream=self._stream(), keep=self.rng.random() < 0.5))
        return Program(self.device, self.world_size, groups, slots, tuple(self.steps))

    def _groups(self) -> tuple[Group, ...]:
        everyone = tuple(range(self.world_size))
        found = [Group(everyone)]
        for _ in range(self.rng.choice((0, 1, 1, 2, 3))):
            if self.world_size > 2 and self.rng.random() < 0.7:
                few = self.rng.sample(everyone, self.rng.randint(2, self.world_size - 1))
            else:
                few = list(everyone) if self.rng.random() < 0.9 else [self.rng.choice(everyone)]
            copy = self.rng.randint(1, 2) if len(few) == self.world_size else 0
            group = Group(tuple(sorted(few)), copy)
            if group not in found:
                found.append(group)
        return tuple(found)

    def _slots(self) -> tuple[Slot, ...]:
        dtypes = DTYPES[self.device]
        common, mixed = self.rng.choice(dtypes), self.rng.random() < 0.3
        share = self.rng.random()
        least, most = next((least, most) for part, least, most in SIZES[self.device] if share <= part)
        part = self._between(*(max(1, nbytes // 4 // self.world_size) for nbytes in (least, most)))
        sizes = [part, part * self.world_size]
        for _ in range(self.rng.randint(0, 1) if most == LARGEST else self.rng.randint(1, 4)):
            sizes.append(self.rng.choice((part, part * self.world_size, self._between(1, part * self.world_size))))
        found = []
        for elements in sizes:
            dtype = self.rng.choice(dtypes) if mixed and len(found) > 1 else common
            found.append(Slot(max(1, elements * 4 // max(4, WIDTH[dtype])), dtype))
        return tuple(found)

    def _between(self, low: int, high: int) -> int:
        """Return a number whose logarithm is spread evenly."""
        return min(high, max(low, round(math.exp(self.rng.uniform(math.log(low), math.log(high + 1))))))

    def _of(self, weights: dict[str, int]) -> str:
        return self.rng.choices(list(weights), list(weights.values()))[0]

    def _stream(self) -> int:
        if self.device == "cpu" or self.rules.captures:
            return 0
        return self.rng.choice((0, *range(STREAMS)))

    def _add(self, kinds: dict[str, int]) -> None:
        """Add a legal step, and fills and waits that make it so."""
        for _ in range(20):
            step = getattr(self, f"_{self._of(kinds)}")()
            if step is not None and self._accept(step, helps=3):
                return

    def _accept(self, step: Step, helps: int = 0) -> bool:
        rules = self.rules.copy()
        try:
            rules.apply(step)
        except IllegalError as error:
            if not helps or (self.rules.captures and error.slot is None and not error.label):
                return False
            if error.label and error.label in self.rules.under_way:
                help_: Step = Wait(error.label, stream=self._stream(), keep=self._keeps())
            elif error.slot is not None:
                help_ = self._change(error.slot)
            else:
                return False
            return self._accept(help_, helps - 1) and self._accept(step, helps - 1)
        self.rules = rules
        self.steps.append(step)
        return True

    def _change(self, slot: int) -> Step:
        if self.rules.contents[slot].ranks == self.rules.all and self.rng.random() < 0.5:
            return Shorten(slot, self._stream())
        return Fill(slot, self.rng.randrange(SMALL), self._stream())

    def _keeps(self) -> bool:
        return not self.rules.captures and self.rng.random() < 0.5

    def _how(self, started: float = 0.5) -> dict[str, Any]:
        """Return whether a call is asynchronous, its stream, and whether its result is kept."""
        if self.rng.random() < started:
            self.label += 1
            return {"label": self.label, "stream": self._stream()}
        return {"stream": self._stream(), "keep": self._keeps()}

    # -- steps of each kind; None if there is none now ----------------------------------------------------------------

    def _call(self) -> Step | None:
        op, number = self._of(CALLS), self.rng.randrange(len(self.rules.groups))
        if op == "barrier":
            return Collective(op, number)
        size = len(self.rules.groups[number].ranks)
        root = self.rng.randrange(size) if op in ROOTED else 0
        reduction = self._reduction() if op in REDUCING else ""
        slots = self.rules.slots
        if op in ("all_reduce", "all_reduce_coalesced", "broadcast", "reduce"):
            picked = [self.rng.randrange(len(slots))]
            if op == "all_reduce_coalesced":
                like = [s for s in range(len(slots)) if slots[s].dtype == slots[picked[0]].dtype]
                picked = self.rng.sample(like, self.rng.randint(1, min(3, len(like))))
            most = min(slots[slot].elements for slot in picked)
            return Collective(op, number, tuple(picked), self._part(most), reduction, root, **self._how())
        pairs = [self._pair() for _ in range(self.rng.randint(1, 2) if op in COALESCED else 1)]
        if None in pairs:
            return None
        both = tuple(slot for pair in pairs if pair is not None for slot in pair)
        sources, targets = both[::2], both[1::2]
        if op == "all_to_all_uneven":
            most = min(slots[slot].elements for slot in both) // size
            sizes = tuple(tuple(self._uneven(most) for _ in range(size)) for _ in range(size))
            return Collective(op, number, both, sizes=sizes, **self._how())
        most_in = min(slots[slot].elements for slot in sources)
        most_out = min(slots[slot].elements for slot in targets)
        if op in ("reduce_scatter", "reduce_scatter_coalesced", "scatter"):
            most = min(most_in // size, most_out)
        else:
            most = min(most_in // (size if op == "all_to_all" else 1), most_out // size)
        if most < 1:
            return None
        return Collective(op, number, both, self._part(most), reduction, root, **self._how())

    def _pair(self) -> tuple[int, int] | None:
        slots = self.rules.slots
        source = self.rng.randrange(len(slots))
        like = [s for s in range(len(slots)) if s != source and slots[s].dtype == slots[source].dtype]
        return (source, self.rng.choice(like)) if like else None

    def _part(self, most: int) -> int:
        return most if self.rng.random() < 0.7 else self._between(1, most)

    def _uneven(self, most: int) -> int:
        return 0 if most < 1 or self.rng.random() < 0.2 else self.rng.randint(0, most)

    def _reduction(self) -> str:
        return self.rng.choice((*REDUCTIONS[self.device], "sum", "sum", "sum"))

    def _messages(self) -> Step | None:
        number = self.rng.randrange(len(self.rules.groups))
        size, slots = len(self.rules.groups[number].ranks), self._pair()
        if size < 2 or slots is None:
            return None
        most = min(self.rules.slots[slot].elements for slot in slots) // size
        if most < 1:
            return None
        every = [(a, b) for a in range(size) for b in range(size) if a != b]
        form = self.rng.choice(("alone", "batch"))
        pairs = tuple(self.rng.sample(every, 1 if form == "alone" else self.rng.randint(1, len(every))))
        return Messages(form, pairs, number, slots, self._part(most), **self._how())

    def _wait(self) -> Step | None:
        if not self.rules.under_way:
            return None
        label = self.rng.choice(sorted(self.rules.under_way))
        missing = sorted(self.rules.under_way[label][0])
        one = len(missing) > 1 and not self.rules.captures and self.rng.random() < 0.4
        return Wait(label, self.rng.choice(missing) if one else -1, self._stream(), self._keeps())

    def _fill(self) -> Step:
        return Fill(self.rng.randrange(len(self.rules.slots)), self.rng.randrange(SMALL), self._stream())

    def _shorten(self) -> Step:
        return Shorten(self.rng.randrange(len(self.rules.slots)), self._stream())

    def _product(self) -> Step:
        return Product(self.rng.choice(PRODUCTS[self.device]), self._stream())

    def _host_sleep(self) -> Step:
        return HostSleep(self.rng.randrange(self.world_size), round(0.1 * 200 ** self.rng.random(), 1))

    def _stream_sleep(self) -> Step:
        cycles = self._between(100_000, 40_000_000)
        return StreamSleep(self.rng.randrange(self.world_size), cycles, self._stream())

    def _capture(self) -> Step | None:
        if len(self.rules.graphs) == 2:
            return None
        outside, steps, self.steps = self.rules, self.steps, []
        self.rules = outside.copy()
        self.rules.captures = True
        before = set(self.rules.under_way)
        for _ in range(self.rng.randint(1, 5)):
            self._add(CAPTURED_KINDS)
        for label in self.rng.sample(
            sorted(set(self.rules.under_way) - before), len(set(self.rules.under_way) - before)
        ):
            self._accept(Wait(label))
        captured, self.steps, self.rules = tuple(self.steps), steps, outside
        if not any(isinstance(one, Collective | Messages) for one in captured):
            return None
        return Capture(len(outside.graphs) + 1, captured)

    def _replay(self) -> Step | None:
        if not self.rules.graphs:
            return None
        return Replay(self.rng.choice(sorted(self.rules.graphs)), self._stream(), self._keeps())


def census(program: Program) -> dict[str, int]:
    """Return how many steps of each kind a program has."""
    found: dict[str, int] = {}
    for step in every_step(program.steps):
        name = step.op if isinstance(step, Collective) else type(step).__name__.lower()
        if isinstance(step, Messages):
            name = f"messages {step.form}"
        found[name] = found.get(name, 0) + 1
        if isinstance(step, Collective | Messages) and step.label:
            found["asynchronous"] = found.get("asynchronous", 0) + 1
    return found
