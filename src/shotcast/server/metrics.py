"""Prometheus metrics: engine counters, read at each scrape, and measurements of the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shotcast.engine.outputs import RequestOutput

if TYPE_CHECKING:
    from shotcast.engine.async_llm import AsyncLLM

TTFT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TPOT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """The metrics of one server. Each output of the engine counts as a request."""

    def __init__(self, engine: AsyncLLM):
        self._engine = engine
        self._registry = registry = CollectorRegistry()
        registry.register(self)
        self._ttft = Histogram(
            "shotcast_ttft_seconds", "From a request to its first token.", buckets=TTFT_S, registry=registry
        )
        self._tpot = Histogram(
            "shotcast_tpot_seconds", "Per output token after the first.", buckets=TPOT_S, registry=registry
        )
        self._time = Histogram(
            "shotcast_request_seconds", "From a request to its last token.", buckets=REQUEST_S, registry=registry
        )
        self._requests = Counter(
            "shotcast_requests", "Requests by how they ended.", ["finish_reason"], registry=registry
        )
        self._responses = Counter("shotcast_responses", "HTTP responses by status.", ["status"], registry=registry)

    def finished(self, output: RequestOutput) -> None:
        """Count a request that ended with an output, and observe its times."""
        self.ended(str(output.finish_reason))
        self._time.observe(output.time_s)
        if output.ttft_s is not None:
            self._ttft.observe(output.ttft_s)
        if output.tpot_s is not None:
            self._tpot.observe(output.tpot_s)

    def ended(self, finish_reason: str) -> None:
        """Count a request that ended, with or without an output ("abort", "error")."""
        self._requests.labels(finish_reason).inc()

    def responded(self, status: int) -> None:
        self._responses.labels(str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the engine, as the registry asks for them."""
        yield GaugeMetricFamily("shotcast_engine_up", "0 when the engine died.", float(self._engine.dead is None))
        if self._engine.dead is not None:
            return
        stats = self._engine.stats()
        used = stats.kv_blocks_used / stats.kv_blocks if stats.kv_blocks else 0.0
        for name, documentation, gauge in (
            ("requests_running", "Requests that are being computed.", stats.running),
            ("requests_waiting", "Requests in the engine's queue.", stats.waiting),
            ("kv_used_fraction", "Fraction of the cache blocks that running requests hold.", used),
        ):
            yield GaugeMetricFamily(f"shotcast_{name}", documentation, gauge)
        for name, documentation, count in (
            ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            ("cached_prompt_tokens", "Prompt tokens that were found in the prefix cache.", stats.cached_tokens),
            ("output_tokens", "Tokens sampled.", stats.output_tokens),
            ("preemptions", "How often a request lost its blocks to others.", stats.preemptions),
            ("proposed_tokens", "Proposals of speculative decoding that were verified.", stats.proposed_tokens),
            ("accepted_tokens", "Those of them that were accepted.", stats.accepted_tokens),
            ("steps", "Steps of the engine.", stats.steps),
            ("step_seconds", "Time of all steps; on CUDA, of stamped steps.", stats.step_s),
            ("communication_seconds", "Part of the step time that rank 0 spent in collectives.", stats.communication_s),
        ):
            yield CounterMetricFamily(f"shotcast_{name}", documentation, count)


class CountResponses:
    """Middleware that counts responses. It wraps everything else, so it also sees responses to failed requests."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responded(message["status"])
            await send(message)

        await self._app(scope, receive, counted)
