"""Results of the engine benchmark as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from shotcast.bench.report import stamped
from shotcast.engine.speculative_config import SpeculativeConfig

TRANSFORMERS = "transformers"
"""The algorithm named in rows of ``research/time_transformers.py``."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One measured point. Each time is the mean over the requests of a round, then the median over the rounds."""

    model: str
    device: str
    dtype: str
    layout: str
    algorithm: str
    batch: int
    prompt: int  # tokens of each request
    output: int  # tokens that it gets
    ttft_ms: float
    tpot_ms: float  # it includes the delay caused by the prompts of other requests
    # the median time between neighboring tokens of all requests that different steps gave, which is a step in which all
    # of them decode
    itl_ms: float
    tokens_per_s: float  # output tokens of all requests divided by the time of the round
    # share of the steps' time that rank 0 spent in collectives, including waiting for other ranks; on CUDA, of decoding
    # steps, in a round that is not timed otherwise
    communication: float
    roofline_ms: float  # the least time of a decoding step by memory bandwidth, at the middle of the output
    roofline: float  # ``roofline_ms`` divided by ``itl_ms``
    bandwidth_gbps: float  # the measured memory bandwidth of a rank
    quantization: str = ""  # of the layers' weight matrices
    hosts: int = 1  # the simulated hosts that the ranks were on
    delay_us: float = 0.0  # one way between two hosts
    overlap: str = "auto"  # the way of prompts in halves, as :class:`~shotcast.engine.config.EngineConfig` has it
    speculation: str = ""  # the configuration of speculative decoding, in JSON; empty for none
    accepted: float | None = None  # the share of proposals that were accepted; None if there were none
    period: int = 0  # the number of random tokens that each prompt repeats; 0 for random prompts

    @property
    def speculates(self) -> str:
        """The speculative decoding method and its maximum number of proposals; "-" for none."""
        if not self.speculation:
            return "-"
        config = SpeculativeConfig.read(self.speculation)
        return f"{config.method} {config.num_speculative_tokens}"


def reduces(row: EngineRow) -> bool:
    return not row.layout.startswith("1x")


def columns(rows: Sequence[EngineRow]) -> list[tuple[str, Callable[[EngineRow], str]]]:
    """Return the columns, each as its header and the text of a row in it.

    Simulated hosts, overlap modes and proposals add columns.
    """
    hosts, speculation = any(row.hosts > 1 for row in rows), any(row.speculation for row in rows)
    listed: list[tuple[bool, str, Callable[[EngineRow], str]]] = [
        (hosts, "hosts", lambda row: str(row.hosts)),
        (hosts, "one way us", lambda row: f"{row.delay_us:g}" if row.hosts > 1 else "-"),
        (True, "layout", lambda row: row.layout),
        (True, "algorithm", _algorithm),
        (any(row.overlap != "auto" for row in rows), "overlap", lambda row: row.overlap if reduces(row) else "-"),
        (speculation, "speculation", lambda row: row.speculates),
        (speculation, "accepted", lambda row: "-" if row.accepted is None else f"{row.accepted:.0%}"),
        (True, "batch", lambda row: str(row.batch)),
        (True, "TTFT ms", lambda row: f"{row.ttft_ms:.1f}"),
        (True, "TPOT ms", lambda row: f"{row.tpot_ms:.2f}"),
        (True, "ITL ms", lambda row: f"{row.itl_ms:.2f}"),
        (True, "tokens/s", lambda row: f"{row.tokens_per_s:.1f}"),
        (True, "communication", lambda row: f"{row.communication:.1%}"),
        (True, "of roofline", lambda row: f"{row.roofline:.0%}"),
    ]
    return [(name, text) for shown, name, text in listed if shown]


def _algorithm(row: EngineRow) -> str:
    return row.algorithm if reduces(row) or row.hosts > 1 or row.algorithm == TRANSFORMERS else "-"


def table(rows: Sequence[EngineRow]) -> Table:
    view = Table(box=None, pad_edge=False, header_style="bold")
    shown = columns(rows)
    for name, _ in shown:
        view.add_column(name, justify="left" if name in ("layout", "algorithm", "overlap", "speculation") else "right")
    for row in rows:
        view.add_row(*(text(row) for _, text in shown))
    return view


def document(rows: Sequence[EngineRow], environment: dict[str, Any], command: str, kernels: dict[str, str]) -> str:
    """Return the rows as JSON, with the environment, the command and the kernels that produced them."""
    result = stamped(environment, command, kernels) | {"rows": [asdict(row) for row in rows]}
    return json.dumps(result, indent=1) + "\n"
