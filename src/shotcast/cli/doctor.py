"""``shotcast doctor``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Show the hardware and software of this machine, what they mean for ranks, and which extras and programs work."""
    from shotcast.hardware.advice import Level, findings
    from shotcast.hardware.detect import detect
    from shotcast.integrations.status import integrations

    facts = detect()
    if as_json:
        typer.echo(json.dumps(_for_programs(facts), indent=2))
        return
    console = Console()
    console.print(_listed([*_doctor_rows(facts), *_held_rows()], "bold"))
    console.print()
    marks = {Level.GOOD: "[green]ok[/]", Level.NOTE: "[yellow]note[/]", Level.PROBLEM: "[red]problem[/]"}
    states = [
        ("[yellow]missing[/]" if lacks else "[green]ready[/]", name, escape(lacks or use))
        for name, use, lacks in _parts(facts)
    ]
    states += [
        ("[green]active[/]" if one.active else "[yellow]off[/]", one.name, escape(one.unsupported_reason or one.use))
        for one in integrations()
    ]
    console.print(_listed(states, "", "bold"))
    console.print()
    advice = [(marks[finding.level], finding.text) for finding in findings(facts)]
    console.print(_listed([*advice, *((marks[Level.NOTE], text) for text in _packaged_tables(facts))], ""))


def _listed(rows: Iterable[tuple[str, ...]], *styles: str) -> Table:
    """Lay out rows without a frame; all columns but the last have these styles."""
    view = Table(box=None, show_header=False, pad_edge=False)
    for style in styles:
        view.add_column(style=style, no_wrap=True)
    view.add_column()
    for row in rows:
        view.add_row(*row)
    return view


_USES = (
    ("engine", "LLM, generate, chat, serve", False),
    ("server", "serve", False),
    ("plots", "pictures (--plot)", False),
    ("ray", "actors", False),
    ("triton", "kernels of GPUs", True),
)
"""The extras, the purpose of each, and whether it is only for GPUs."""


def _parts(facts: Any) -> list[tuple[str, str, str]]:
    """Return the optional parts: name, purpose, and how to install it if missing."""
    from shotcast import extras

    return [
        (extra, use, extras.install_line(extra) if extras.missing(extra) else "")
        for extra, use, on_gpus in _USES
        if facts.gpus or not on_gpus
    ]


def _for_programs(facts: Any) -> dict[str, Any]:
    """Return everything as JSON values."""
    from shotcast.hardware.advice import Level, findings
    from shotcast.integrations.status import integrations
    from shotcast.memory.holdings import of_all_processes

    told = [(one.level, one.text) for one in findings(facts)]
    told += [(Level.NOTE, text) for text in _packaged_tables(facts)]
    held = {
        process: {
            device: {"bytes": one.blocks, "used": one.leased, "shared": one.shared, "exclusive": one.exclusive}
            for device, one in devices.items()
        }
        for process, devices in of_all_processes().items()
    }
    return {
        "host": facts.as_json(),
        "processes": held,
        "extras": {name: {"ready": not lacks, "install": lacks} for name, _, lacks in _parts(facts)},
        "integrations": [one.as_json() for one in integrations()],
        "findings": [{"level": level.value, "text": text} for level, text in told],
    }


def _packaged_tables(facts: Any) -> list[str]:
    """Return a line for each packaged table for this host's GPUs that was measured with other kernels."""
    from shotcast.collectives import fingerprints, registry
    from shotcast.collectives.choice.table import all_packaged
    from shotcast.transport.registry import usual

    algorithms = registry.registered()
    lines = []
    for table in all_packaged(algorithms):
        if table.part in {gpu.name for gpu in facts.gpus}:
            notes = (fingerprints.of_table(table, key, algorithms, usual("cuda")) for key in table.rows)
            if made_by := next((note for note in notes if note), ""):
                lines.append(f"packaged table {table.name}: {made_by}; `shotcast tune` makes one for SHOTCAST_TABLE")
    return lines


def _held_rows() -> list[tuple[str, str]]:
    """Return a row for each process that holds memory for communication."""
    from shotcast.memory.holdings import of_all_processes
    from shotcast.units import about_size

    rows = []
    for process, devices in of_all_processes().items():
        parts = []
        for device, held in devices.items():
            free = f", {about_size(held.blocks - held.leased)} of it free" if held.blocks > held.leased else ""
            kinds = [f"{n} {kind}" for n, kind in ((held.shared, "shared"), (held.exclusive, "exclusive")) if n]
            users = f" ({' and '.join(kinds)} communicators)" if kinds else ""
            parts.append(f"{about_size(held.blocks)} of {device}{free}{users}")
        rows.append((f"process {process}", f"holds for communication {'; '.join(parts)}"))
    return rows


def _doctor_rows(facts: Any) -> list[tuple[str, str]]:
    gib = 1 << 30
    rows = [
        ("processor", f"{facts.cpu_model}, {facts.cores} of {facts.cores_installed} cores usable"),
        ("memory", f"{facts.memory_available_bytes / gib:.1f} of {facts.memory_bytes / gib:.1f} GiB available"),
        (facts.shm_dir, f"{facts.shm_free_bytes / gib:.1f} of {facts.shm_bytes / gib:.1f} GiB free"),
        ("versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items())),
    ]
    if facts.cuda_driver or facts.cuda_runtime:
        driver, runtime = facts.cuda_driver or "none", facts.cuda_runtime or "none"
        rows.append(("CUDA", f"driver {driver}, PyTorch built for {runtime}"))
    for gpu in facts.gpus:
        major, minor = gpu.compute_capability
        peers = [str(j) for j, reached in enumerate(facts.peer_access[gpu.index]) if reached and j != gpu.index]
        rows.append(
            (
                f"GPU {gpu.index}",
                f"{gpu.name}, sm_{major}{minor}, {gpu.sm_count} SMs, {gpu.memory_bytes / gib:.0f} GiB, "
                f"reaches {', '.join(peers) or 'no other'}, "
                f"multicast {'unknown' if gpu.multicast is None else 'yes' if gpu.multicast else 'no'}",
            )
        )
    return rows
