"""Benchmarks on several hosts, simulated on this machine, which takes root::

    python research/bench_hosts.py collective --hosts 8 --delay-us 1000 all-reduce -b 4K -e 16M --json FILE
    python research/bench_hosts.py engine --hosts 2 --ranks-per-host 2 --delay-us 1000 --layouts 4x1,2x2 --json FILE

``collective`` runs a command of ``shotcast bench`` on every rank, as torchrun would, and adds the delay and what was
measured of the network to its file. ``engine`` times the engine, each layout on all ranks; with the algorithm ``gloo``,
Gloo serves all calls, and nothing of ours is added to one. Hosts share the cores of this machine: the figures show what
the network between them costs, and not how computation scales.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from dataclasses import replace
from typing import Annotated

import typer
from simulated_hosts.facts import HostsConfig, run_on_hosts, simulated

from shotcast import cli
from shotcast.bench import engine_bench, engine_report, kernels
from shotcast.bench.engine_report import EngineRow
from shotcast.cli.options import JsonFile, names_in, new_console, numbers_in, ready_to_write, with_groups
from shotcast.collectives.algorithm import LIBRARY
from shotcast.engine.config import parse_layout
from shotcast.errors import ConfigError
from shotcast.hardware.detect import detect
from shotcast.planner.step import Layout

app = typer.Typer(pretty_exceptions_enable=False)
GLOO = "gloo"
ALL_BY_GLOO = {"SHOTCAST_ALGORITHM": LIBRARY, "SHOTCAST_CHECK_VENDOR": "0"}


def _command() -> str:
    return shlex.join(["research/bench_hosts.py", *sys.argv[1:]])


def _required(hosts: HostsConfig | None) -> HostsConfig:
    if hosts is None:
        raise ConfigError("say how many --hosts")
    return hosts


def run_command(words: list[str]) -> None:
    """Run a command of ``shotcast bench`` on a rank."""
    if code := cli.app(["bench", *words], prog_name="shotcast", standalone_mode=False):
        sys.exit(code)


@app.command("collective", context_settings={"ignore_unknown_options": True})
@with_groups(simulated)
def collective(
    *,
    words: Annotated[list[str], typer.Argument(help="A command of shotcast bench, with its options.")],
    simulated: HostsConfig | None,
    json_file: JsonFile = None,
) -> None:
    """Time a collective."""
    ready_to_write(json_file)
    stored = [] if json_file is None else ["--json", str(json_file)]
    _, network = run_on_hosts(_required(simulated), run_command, [*words, "--device", "cpu", *stored])
    print(network)
    if json_file is not None:
        document = json.loads(json_file.read_text()) | {"command": _command(), "network": network.as_json()}
        for row in document["rows"]:
            row["delay_us"] = network.config.delay_us
        json_file.write_text(json.dumps(document, indent=1) + "\n")


def rows_of_rank(
    config: engine_bench.EngineBenchConfig, layout: Layout, name: str, algorithm: str, bandwidth: float
) -> list[EngineRow]:
    """Measure the batches of a layout as rank 0 of a job; other ranks serve it, and return nothing."""
    try:
        llm = engine_bench.open_engine(config, layout, algorithm, "auto")
    except SystemExit as end:  # of another rank, when rank 0 is done
        if end.code:
            raise
        return []
    with llm:
        return [engine_bench.point(config, layout, name, batch, llm, bandwidth) for batch in config.batches]


@app.command("engine")
@with_groups(simulated)
def engine(
    *,
    model: Annotated[str, typer.Option("-m", "--model")] = "smollm2",
    layouts: Annotated[str, typer.Option("--layouts", help="TxP, each of all ranks.")],
    batches: Annotated[str, typer.Option("--batches")] = "1,4,16",
    algorithms: Annotated[str, typer.Option("--algorithms", help="Of the all-reduces; gloo for all calls.")] = "auto",
    prompt: Annotated[int, typer.Option("--prompt")] = 128,
    output: Annotated[int, typer.Option("--output")] = 32,
    rounds: Annotated[int, typer.Option("--rounds")] = 3,
    simulated: HostsConfig | None,
    json_file: JsonFile = None,
) -> None:
    """Time the engine."""
    hosts = _required(simulated)
    names = {name: "auto" if name == GLOO else name for name in names_in(algorithms)}
    config = engine_bench.EngineBenchConfig(
        model,
        tuple(Layout(*parse_layout(name)) for name in names_in(layouts)),
        tuple(numbers_in(batches, "--batches")),
        tuple(names.values()),
        *(prompt, output, rounds, "cpu"),
    )
    if other := [layout for layout in config.layouts if layout.ranks != hosts.world_size]:
        raise ConfigError(f"{hosts.world_size} ranks are divided by a layout; {other[0]} has {other[0].ranks}")
    ready_to_write(json_file)
    environment = detect().as_json()
    rows: list[EngineRow] = []
    with hosts.network() as network:
        bandwidth = min(network.run(engine_bench.read_bandwidth_gbps, hosts.ranks_per_host, config.device))
        for layout, (name, algorithm) in itertools.product(config.layouts, names.items()):
            arguments = config, layout, name, algorithm, bandwidth
            settings = ALL_BY_GLOO if name == GLOO else {}
            found = network.run(rows_of_rank, hosts.ranks_per_host, *arguments, env=settings)[0]
            network.check()
            rows += [replace(row, hosts=hosts.hosts, delay_us=hosts.delay_us) for row in found]
            if json_file is not None:
                document = engine_report.document(rows, environment, _command(), kernels.of_engine(rows))
                json_file.write_text(document)
    new_console().print(engine_report.table(rows))


if __name__ == "__main__":
    app()
