from __future__ import annotations

import httpx
from live_server import live
from prometheus_client.parser import text_string_to_metric_families


def samples(url: str) -> dict[str, float]:
    """Return the samples of ``/metrics`` by name with labels."""
    answer = httpx.get(f"{url}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[" ".join([sample.name, *(f"{name}={value}" for name, value in sample.labels.items())])] = sample.value
    return found


def test_engine_counters_are_current() -> None:
    with live() as server:
        found = samples(server.url)
        expected = {
            "engine_up": 1,
            "requests_running": 0,
            "requests_waiting": 3,
            "kv_used_fraction": 0.25,
            "prompt_tokens_total": 1000,
            "cached_prompt_tokens_total": 400,
            "output_tokens_total": 500,
            "preemptions_total": 7,
            "proposed_tokens_total": 90,
            "accepted_tokens_total": 80,
            "steps_total": 60,
            "step_seconds_total": 1.5,
            "communication_seconds_total": 0.25,
        }
        assert {name: found[f"shotcast_{name}"] for name in expected} == expected
        server.engine.running = 2
        assert samples(server.url)["shotcast_requests_running"] == 2


def test_requests_and_responses_are_counted() -> None:
    with live() as server:
        server.post("/v1/completions", {"model": "letters", "prompt": "x", "n": 2})
        server.post("/v1/completions", {"model": "letters", "prompt": "x", "max_tokens": 1, "stream": True})
        server.post("/v1/completions", {"model": "other", "prompt": "x"})
        server.engine.fault = RuntimeError("fault")
        server.post("/v1/completions", {"model": "letters", "prompt": "x"})
        found = samples(server.url)
    assert found["shotcast_requests_total finish_reason=stop"] == 2
    assert found["shotcast_requests_total finish_reason=length"] == 1
    assert found["shotcast_requests_total finish_reason=error"] == 1
    assert found["shotcast_responses_total status=200"] == 2
    assert found["shotcast_responses_total status=404"] == 1
    assert found["shotcast_responses_total status=500"] == 1
    # The engine reports 0.25 s to the first token and 0.125 s for each further one: twice six tokens, and once one.
    assert found["shotcast_ttft_seconds_count"] == 3
    assert found["shotcast_ttft_seconds_sum"] == 3 * 0.25
    assert found["shotcast_tpot_seconds_count"] == 2
    assert found["shotcast_tpot_seconds_sum"] == 2 * 0.125
    assert found["shotcast_request_seconds_count"] == 3
    assert found["shotcast_request_seconds_sum"] == 2 * (0.25 + 5 * 0.125) + 0.25
