"""Fit the constants of a GPU's kernels, host and collectives, and write them for ``shotcast plan``.

    python research/calibrate_gpu.py FOLDER [--measure] [--world-size 2] [--output here.json] [--cluster here.yaml]

They are fitted to the results in a folder. With ``--measure``, a GPU of this machine is measured into it first; that
takes four minutes, while nothing else may run. The packaged calibrations in ``src/shotcast/planner/calibrations`` were
made this way.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from gpu_calibration import measurement
from gpu_calibration.fit import OF_STAND_IN, calibrate
from rich.table import Table

from shotcast.bench.machine_load import require_quiet
from shotcast.cli.options import new_console, ready_to_write
from shotcast.errors import ConfigError


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the folder with the results of a GPU; where --measure puts them")
    parser.add_argument("--part", default="", help="the GPU, as CUDA names it; by default that of the results")
    parser.add_argument("--output", type=Path, default=Path("calibration.json"), help="the file to write")
    parser.add_argument("--measure", action="store_true", help="measure a GPU of this machine")
    parser.add_argument("--world-size", type=int, default=1, help="GPUs to measure, with their link")
    parser.add_argument("--cluster", type=Path, default=Path("cluster.yaml"), help="what --measure says of the machine")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    return parser


def measure_gpus(folder: Path, gpus: int, output: Path, cluster: Path, force: bool) -> None:
    """Measure this machine's GPUs into a folder, and describe the machine."""
    measurement.require_gpus(gpus)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror or error}") from error
    ready_to_write(output, cluster, folder / measurement.KERNELS_FILE)
    screen = new_console()
    command = shlex.join(["python", "research/calibrate_gpu.py", *sys.argv[1:]])
    require_quiet(gpus, force)
    files = measurement.measure(folder, gpus, command, shown=True)
    for file in files:
        screen.print(f"wrote {file}", soft_wrap=True, highlight=False)
    cluster.write_text(measurement.cluster_text())
    screen.print(f"described this machine in {cluster}, for --cluster", soft_wrap=True, highlight=False)


def fit_gpu(folder: Path, part: str, output: Path) -> None:
    """Fit a calibration to a folder of results, write it and show it."""
    ready_to_write(output)
    found = calibrate(folder, part)
    output.write_text(found.as_json() + "\n")
    table = Table("kernel", "points", "fixed us", "rate", "second rate", "error", "worst", title=found.part)
    for kind, known in sorted(found.kinds.items()):
        cost = known.cost
        numbers = [f"{cost.fixed_us:.2f}", f"{cost.first_rate:.4g}", f"{cost.second_rate:.4g}"]
        table.add_row(kind, str(known.points), *numbers, f"{known.residual:.0%}", f"{known.worst:.0%}")
    host, link = found.host, found.link
    lines = [
        f"host: {host.fixed_us:.0f} us a step, {host.per_sequence_us:.1f} a sequence, {host.per_row_us:.2f} a token, "
        f"{host.per_request_us:.0f} a request that begins, {host.per_layer_us:.0f} a layer without graphs",
        f"sums: {link.fixed_us:.2f} us a call, {link.step_us:.2f} a step, {link.bw_gbps:.0f} GB/s sent, "
        f"{link.local_gbps:.0f} GB/s taken in, error {found.link_residual:.0%}",
    ]
    for kind, norm in found.fused_norms.items():
        beyond_us, fixed_us, rate = norm.cost.beyond_us, norm.cost.fixed_us, norm.cost.rate
        lines.append(
            f"{kind}: {beyond_us:.2f} us more than the sum, at least {fixed_us:.2f} us + size / {rate:.0f} GB/s; "
            f"{norm.points} points, error {norm.residual:.0%}, worst {norm.worst:.0%}"
        )
    for source in found.sources:
        if OF_STAND_IN in source:
            lines.append(f"{folder} has no results for all constants. Taken besides: {source}.")
    screen = new_console()
    screen.print(table)
    for line in [*lines, f"wrote {output}; to use it: shotcast plan MODEL --calibration {output}"]:
        screen.print(line, soft_wrap=True, highlight=False)


def main() -> None:
    given = options().parse_args()
    if given.measure:
        if given.part:
            raise ConfigError("--measure measures this machine; leave out --part")
        measure_gpus(given.results, given.world_size, given.output, given.cluster, given.force)
    fit_gpu(given.results, given.part, given.output)


if __name__ == "__main__":
    main()
