"""Two versions of the sources, measured in turn by the same command of ``shotcast bench``::

    sh research/earlier_sources.sh 87a944a
    python research/compare_sources.py --before earlier/87a944a/src --json FILE -- \
        all-reduce --device cuda -b 8K -e 8K --algorithms one_shot,two_shot --world-size 2

Rounds begin with one version and the other alternately, so that neither has the warmer machine. The result has the
times of each round, and for each algorithm and size the median of the rounds and its growth. With ``--host``, which
earlier versions of ``shotcast bench`` had, ``research/bench_modes.py`` measures the sources of now.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shotcast.hardware.detect import detect

NOW = Path(__file__).parents[1] / "src"
MODES = Path(__file__).parent / "bench_modes.py"


def measured(source: Path, command: Sequence[str], file: Path) -> dict[str, float]:
    """Return the times of one run with the sources in a folder: by algorithm and size, microseconds of a call.

    Raises:
        subprocess.CalledProcessError: the run failed.
        ArithmeticError: a result was wrong, and has no time.
    """
    environment = os.environ | {"PYTHONPATH": str(source.resolve())}
    program = [str(MODES)] if source == NOW and "--host" in command else ["-m", "shotcast", "bench"]
    run = [sys.executable, *program, *command, "--json", str(file)]
    subprocess.run(run, env=environment, check=True, cwd=file.parent, stdout=subprocess.DEVNULL)
    rows = json.loads(file.read_text())["rows"]
    if wrong := [row["algorithm"] for row in rows if row["time_us"] is None]:
        raise ArithmeticError(f"wrong results with {source}: {', '.join(wrong)}")
    return {f"{row['algorithm']}/{row['nbytes']}": row["time_us"] for row in rows}


def compared(rounds: Sequence[dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """Return, for each algorithm and size that both versions have, the median times and the growth in percent."""
    rows = []
    for name in rounds[0]["now"]:
        if name in rounds[0]["before"]:
            before, now = (statistics.median(one[version][name] for one in rounds) for version in ("before", "now"))
            growth = 100 * (now / before - 1)
            rows.append({"name": name, "before_us": before, "now_us": now, "growth_percent": round(growth, 2)})
    return rows


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the folder of the earlier package, such as .../src")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=float, help="fail if a time has grown by more than so many percent")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("command", nargs="+", help="options of shotcast bench, after --")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options()
    asked = parser.parse_args(arguments)
    if not (asked.before / "shotcast").is_dir():
        parser.error(f"there is no package in {asked.before}; research/earlier_sources.sh makes one")
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(asked.rounds):
            order = [("before", asked.before), ("now", NOW)]
            times = {}
            for version, source in order if number % 2 == 0 else reversed(order):
                times[version] = measured(source, asked.command, Path(folder) / f"{version}_{number}.json")
            rounds.append(times)
    rows = compared(rounds)
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ["shotcast", "bench", *asked.command],
        "before": str(asked.before),
        "environment": detect().as_json(),
        "compared": rows,
        "rounds": rounds,
    }
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(f"{row['name']}: {row['before_us']:.2f} us, now {row['now_us']:.2f} us, {row['growth_percent']:+.2f}%")
    return 1 if asked.most is not None and max(row["growth_percent"] for row in rows) > asked.most else 0


if __name__ == "__main__":
    sys.exit(main())
