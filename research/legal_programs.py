"""Random legal programs of torch.distributed, run by a backend; each result is compared with plain PyTorch.

Groups, streams, synchronous and asynchronous calls, messages, graphs and their replays, products and late ranks are
drawn from a seed (``program_draw.py``; ``program_steps.py`` says what is legal). A program that hangs, raises or gives
a wrong result is run again alone, shrunk while it still fails, printed, and tried with Gloo or NCCL. The run is added
to a file of runs::

    python research/legal_programs.py --device cpu --world-size 3 --programs 1000 --json runs.json

Program 1234 of seed 7 again: ``--seed 7 --first 1234 --programs 1``. One that was printed: ``--program FILE``.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import dataclasses
import datetime
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from program_draw import census, draw
from program_ranks import PLACE, Orders, serve
from program_shrink import shrink
from program_steps import Capture, Program, check, read
from rich.console import Console

from shotcast.bench import kernels
from shotcast.errors import RankFailed
from shotcast.hardware.detect import detect
from shotcast.launcher.spawn import RankGroup

LIBRARY = {"cpu": "gloo", "cuda": "nccl"}
TIMEOUT_S = {"cpu": 40.0, "cuda": 30.0}
START_S = 180.0
GRACE_S = 1.0
"""The time that ranks may go on when one of them has failed."""
HANG_S = 5.0
"""The time beyond its deadline after which a step hangs."""
BATCH = 20
MOST_FAILURES = 20
"""A run ends after so many failures."""
REPEATS = 3
"""The runs of a program before it counts as one that does not fail."""
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "SHOTCAST_MULTICAST": "0"}


@dataclass(frozen=True)
class Failure:
    """A program that failed.

    Attributes:
        number: of the program.
        kind: ``wrong``, ``error``, ``died`` or ``hang``.
        text: what the ranks say, and where they were.
        is_over: all ranks have ended the program, and may run another one.
    """

    number: int
    kind: str
    text: str
    is_over: bool = False


class RankSet:
    """Ranks that run programs until one fails."""

    def __init__(self, world_size: int, orders: Orders):
        self.world_size, self.orders = world_size, orders
        self._folder = tempfile.TemporaryDirectory(prefix="programs-")
        self._places = Path(self._folder.name) / "places"
        self._places.write_bytes(bytes(PLACE.size * world_size))
        env = {name: os.environ.get(name, value) for name, value in NO_MULTICAST.items()}
        with Listener(os.path.join(self._folder.name, "socket"), "AF_UNIX", backlog=world_size) as listener:
            self._job = RankGroup.start(serve, world_size, orders, listener.address, str(self._places), env=env)
            atexit.register(self.end)
            listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]
            connections: dict[int, Connection] = {}
            for _ in range(world_size):
                connection = listener.accept()
                connections[connection.recv()] = connection
        self._ranks = {connections[rank]: rank for rank in range(world_size)}
        for connection in self._ranks:
            if not connection.poll(START_S) or connection.recv() != "ready":
                raise TimeoutError(f"the ranks did not start within {START_S:g} s")

    def run(self, seed: int, numbers: Sequence[int], given: Program | None = None) -> Failure | None:
        """Run programs of a seed, or a given one as often as there are numbers. Return how one failed, if one did."""
        since = time.monotonic()
        for connection in self._ranks:
            connection.send((seed, numbers, given))
        missing, said = dict(self._ranks), dict[int, tuple[int, str, str]]()
        failed_at = float("inf")
        while missing and time.monotonic() < failed_at + GRACE_S:
            for connection in wait(list(missing), 0.1):
                assert isinstance(connection, Connection)
                rank = missing.pop(connection)
                try:
                    word = connection.recv()
                except (EOFError, OSError):
                    word = (self._place(rank)[0], "died", "its process ended")
                if word != "done":
                    said[rank] = word
                    failed_at = min(failed_at, time.monotonic())
            oldest = min((max(since, self._place(rank)[3]) for rank in missing.values()), default=float("inf"))
            if failed_at == float("inf") and time.monotonic() > oldest + self.orders.timeout_s + HANG_S:
                break
        if not missing and not said:
            return None
        number = min([word[0] for word in said.values()] or [self._place(rank)[0] for rank in missing.values()])
        kinds = {word[1] for word in said.values()}
        kind = next((one for one in ("wrong", "error", "died") if one in kinds), "hang")
        program = given or draw(seed, number, self.orders.device, self.world_size)
        stacks = self._stacks(set(missing.values())) if kind == "hang" else {}
        lines = []
        for rank in range(self.world_size):
            state = said[rank][2] if rank in said else "no word from it" if rank in missing.values() else "ended all"
            lines.append(f"rank {rank}, {self._where(rank, program)}: {state}")
            if rank in stacks:
                lines.append(stacks[rank])
        return Failure(number, kind, "\n".join(lines), not missing and kinds == {"wrong"} and len(numbers) == 1)

    def _place(self, rank: int) -> tuple[int, int, int, float]:
        found: tuple[int, int, int, float] = PLACE.unpack_from(self._places.read_bytes(), rank * PLACE.size)
        return found

    def _where(self, rank: int, program: Program) -> str:
        number, index, inner, _ = self._place(rank)
        if index < 0:
            return f"program {number}, before the first step"
        if index >= len(program.steps):
            return f"program {number}, behind the last step"
        step = program.steps[index]
        if inner >= 0 and isinstance(step, Capture):
            return f"program {number}, step {index}.{inner}, {step.steps[inner]!r}"
        return f"program {number}, step {index}, {step!r}"

    def _stacks(self, ranks: set[int]) -> dict[int, str]:
        """End the ranks, and return what those that said nothing were doing."""
        found = self._job.results(0.0, return_exceptions=True)
        return {rank: str(found[rank]) for rank in ranks}

    def finish(self) -> None:
        """Let ranks that wait for orders destroy their groups and end. Raises RankFailed if one does not."""
        for connection in self._ranks:
            connection.send(None)
        self._job.results(self.orders.timeout_s + HANG_S)

    def end(self) -> None:
        atexit.unregister(self.end)
        self._job.kill()
        self._job.end()
        for connection in self._ranks:
            connection.close()
        self._folder.cleanup()


class Runner:
    """Runs programs in ranks that are started anew after a failure."""

    def __init__(self, world_size: int, orders: Orders):
        self.world_size, self.orders = world_size, orders
        self._set: RankSet | None = None

    def run(self, seed: int, numbers: Sequence[int], given: Program | None = None) -> Failure | None:
        if self._set is None:
            self._set = RankSet(self.world_size, self.orders)
        failure = self._set.run(seed, numbers, given)
        if failure is not None and not failure.is_over:
            self.end()
        return failure

    def repeat(self, seed: int, number: int, given: Program) -> Failure | None:
        """Run a program until it fails, a few times at most."""
        runs = (self.run(seed, [number], given) for _ in range(REPEATS))
        return next((failure for failure in runs if failure is not None), None)

    def finish(self) -> str:
        """Let the ranks end in order. Return what went wrong."""
        try:
            if self._set is not None:
                self._set.finish()
        except RankFailed as error:
            return str(error)
        finally:
            self.end()
        return ""

    def end(self) -> None:
        if self._set is not None:
            self._set.end()
        self._set = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()


@dataclass
class Campaign:
    """Programs of a seed, and what became of them.

    Attributes:
        shrink_s: how long a program that fails is shrunk.
        say: takes what there is to print.
    """

    world_size: int
    orders: Orders
    seed: int
    shrink_s: float
    say: Callable[[str], None]
    done: int = 0
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def run(self, first: int, programs: int, seconds: float) -> None:
        """Run programs from the first number on."""
        number, until = first, time.monotonic() + seconds
        with Runner(self.world_size, self.orders) as runner:
            while number < first + programs and time.monotonic() < until and len(self.failures) < MOST_FAILURES:
                numbers = range(number, min(number + BATCH, first + programs))
                failure = runner.run(self.seed, numbers)
                number = numbers.stop if failure is None else failure.number + 1
                for one in range(numbers.start, number):
                    self.kinds.update(census(draw(self.seed, one, self.orders.device, self.world_size)))
                self.done += number - numbers.start
                if failure is not None:
                    self.examine(failure, draw(self.seed, failure.number, self.orders.device, self.world_size))
            self.note_end(runner.finish(), number - 1)

    def given(self, program: Program) -> None:
        """Run one program a few times."""
        check(program)
        with Runner(self.world_size, self.orders) as runner:
            failure = runner.repeat(self.seed, 0, program)
            self.note_end(runner.finish(), 0)
        self.done += 1
        self.kinds.update(census(program))
        if failure is not None:
            self.examine(failure, program)

    def note_end(self, text: str, number: int) -> None:
        """Note that groups could not be destroyed after a program."""
        if text:
            self.say(f"the groups were not destroyed: {text}")
            self.failures.append({"number": number, "kind": "end", "text": text})

    def examine(self, failure: Failure, program: Program) -> None:
        """Shrink a program that failed, and print it."""
        self.say(f"program {failure.number} of seed {self.seed}: {failure.kind}\n{failure.text}")
        small, alone = program, False
        if self.shrink_s > 0:
            quick = dataclasses.replace(self.orders, timeout_s=self.orders.timeout_s / 4)
            with Runner(self.world_size, quick) as runner:

                def fails(candidate: Program) -> bool:
                    nonlocal failure
                    found = runner.repeat(self.seed, failure.number, candidate)
                    if found is not None:
                        failure = found
                    return found is not None

                alone = fails(program)
                if alone:
                    small = shrink(program, fails, self.shrink_s)
        library, by_library = LIBRARY[self.orders.device], ""
        if self.shrink_s > 0 and self.orders.backend != library:
            with Runner(self.world_size, dataclasses.replace(self.orders, backend=library, plant=None)) as runner:
                found = runner.repeat(self.seed, failure.number, small)
            by_library = f"{library} ends it" if found is None else f"{library}: {found.kind}\n{found.text}"
        if alone:
            self.say(f"shrunk from {len(program.steps)} to {len(small.steps)} steps ({by_library}):\n{small.text()}")
            self.say(f"{failure.kind}\n{failure.text}")
        elif self.shrink_s > 0:
            self.say(f"alone it did not fail again ({by_library}); it was\n{program.text()}")
        self.failures.append(
            {
                "number": failure.number,
                "kind": failure.kind,
                "text": failure.text,
                "fails_alone": alone,
                "by_library": by_library,
                "program": small.text(),
            }
        )


def add(file: Path, record: dict[str, Any]) -> None:
    """Add a run to a file of runs."""
    runs = json.loads(file.read_text())["runs"] if file.exists() else []
    runs.append(record)
    totals: dict[str, dict[str, int]] = {}
    for run in runs:
        name = f"{run['backend']} on {run['device']} x{run['world_size']}"
        total = totals.setdefault(name, dict.fromkeys(("runs", "programs", "steps", "failed"), 0))
        total["runs"] += 1
        total["programs"] += run["programs"]
        total["steps"] += run["steps"]
        total["failed"] += len(run["failures"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"totals": dict(sorted(totals.items())), "runs": runs}, indent=1) + "\n")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--backend", default="shotcast", help="shotcast, gloo or nccl")
    parser.add_argument("--programs", type=int, default=1000, help="the most programs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no program after that time")
    parser.add_argument("--seed", type=int, help="a random one if it is not given")
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--program", type=Path, help="run the program of a file, as it was printed")
    parser.add_argument("--timeout", type=float, help="seconds after which a step hangs")
    parser.add_argument(
        "--shrink", type=float, default=60.0, help="seconds that a program is shrunk; 0 leaves that out"
    )
    parser.add_argument("--json", type=Path, help="the file that the run is added to")
    return parser


def main(arguments: Sequence[str] | None = None, plant: Callable[[], None] | None = None) -> int:
    """Run the command. A test's ``plant`` is called on each rank before its first program."""
    asked = options().parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 31) if asked.seed is None else asked.seed
    screen = Console(soft_wrap=True, markup=False, highlight=False)
    orders = Orders(asked.device, asked.backend, asked.timeout or TIMEOUT_S[asked.device], plant)
    campaign = Campaign(asked.world_size, orders, seed, asked.shrink, screen.print)
    date, begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), time.monotonic()
    if asked.program is not None:
        campaign.given(read(asked.program.read_text()))
    else:
        campaign.run(asked.first, asked.programs, asked.seconds)
    record = {
        "date": date,
        "device": asked.device,
        "world_size": asked.world_size,
        "backend": asked.backend,
        "seed": seed,
        "first": asked.first,
        "programs": campaign.done,
        "steps": sum(count for kind, count in campaign.kinds.items() if kind != "asynchronous"),
        "seconds": round(time.monotonic() - begun, 1),
        "kinds": dict(sorted(campaign.kinds.items())),
        "failures": campaign.failures,
        "environment": detect().as_json(),
        "kernels": kernels.of_collectives(asked.device),
    }
    screen.print(
        f"{asked.backend} on {asked.device} x{asked.world_size}, seed {seed}: {record['programs']} programs "
        f"({record['steps']} steps) in {record['seconds']} s, {len(campaign.failures)} failed"
    )
    if asked.json is not None:
        add(asked.json, record)
    return 1 if campaign.failures else 0


if __name__ == "__main__":
    sys.exit(main())
