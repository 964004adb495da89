"""The two dashboards of Grafana, from one table.

    python -m tools.dashboards            write deploy/observability/grafana/*.json anew

Grafana's own JSON is long and says little; a panel here is a line: its title, its unit, and what it
asks Prometheus for, each with the legend of its series. `tests/contract` compares the files with
this table, and `make test-prometheus` asks a real Prometheus every question of it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

FOLDER: Final = Path(__file__).parents[1] / "deploy" / "observability" / "grafana" / "dashboards"
SOURCE: Final = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT, COLUMNS = 8, 8, 24
# The stage that says why nothing at all was planned is told apart.
NOT_PLAN: Final = '{stage!="plan"}'


class Panel(NamedTuple):
    """`asks`: PromQL, and the legend of what it gives."""

    title: str
    unit: str
    asks: Sequence[tuple[str, str]]


def quantiles(name: str, of: str = "") -> Sequence[tuple[str, str]]:
    """Median, 90th and 99th percentile of a histogram."""
    return [
        (
            f"histogram_quantile({share}, sum by (le) (rate({name}_bucket{of}[$__rate_interval])))",
            legend,
        )
        for share, legend in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    ]


def rate(name: str, by: str = "", of: str = "") -> str:
    """Per second, of all processes together, by a label."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({name}{of}[$__rate_interval]))"


SERVICE: Final = (
    Panel(
        "Requests",
        "reqps",
        [
            (rate("kaiten_gateway_requests_accepted_total", "origin"), "accepted: {{origin}}"),
            (rate("kaiten_gateway_requests_refused_total", "code"), "refused: {{code}}"),
        ],
    ),
    Panel(
        "How they end",
        "reqps",
        [(rate("kaiten_gateway_requests_ended_total", "outcome"), "{{outcome}}")],
    ),
    Panel(
        "Live",
        "short",
        [
            ("sum(kaiten_gateway_requests_live)", "followed by gateways"),
            ("sum(kaiten_requests_live)", "accepted and not over"),
            ("sum(kaiten_num_requests_waiting)", "sequences that wait"),
        ],
    ),
    Panel("Time to first token", "s", quantiles("gen_ai_server_time_to_first_token_seconds")),
    Panel("Time per output token", "s", quantiles("gen_ai_server_time_per_output_token_seconds")),
    Panel("Whole requests", "s", quantiles("gen_ai_server_request_duration_seconds")),
    Panel(
        "Tokens",
        "short",
        [
            (rate("kaiten_gateway_prompt_tokens_total"), "prompts"),
            (rate("kaiten_generation_tokens_total"), "output"),
            (rate("kaiten_prefix_cache_hits_total"), "found in the prefix cache"),
        ],
    ),
    Panel(
        "Wait for a slot",
        "s",
        [
            ("max(kaiten_queue_time_forecast_seconds)", "of whoever comes now"),
            *quantiles("kaiten_request_queue_time_seconds"),
        ],
    ),
    Panel(
        "Ready",
        "short",
        [
            ("kaiten_gateway_is_ready", "gateway {{instance}}"),
            ("sum(kaiten_is_leader)", "leaders"),
            ("max(kaiten_num_workers)", "workers"),
        ],
    ),
    Panel("Prompt lengths", "short", quantiles("kaiten_request_prompt_tokens")),
    Panel("Output lengths", "short", quantiles("kaiten_request_generation_tokens")),
    Panel(
        "Keys, batches, spans",
        "short",
        [
            (rate("kaiten_gateway_wrong_keys_total"), "wrong keys"),
            ("sum(kaiten_gateway_batches_driven)", "batches driven"),
            (rate("kaiten_spans_dropped_total", "job"), "spans dropped: {{job}}"),
        ],
    ),
)
ENGINE: Final = (
    Panel(
        "Batch and queue",
        "short",
        [
            ("sum(kaiten_num_requests_running)", "running"),
            ("sum(kaiten_num_requests_waiting)", "waiting"),
            ("sum(kaiten_worker_slots)", "slots"),
        ],
    ),
    Panel(
        "Why somebody was not scheduled",
        "ops",
        [
            (
                rate("kaiten_passed_over_total", "stage, reason", NOT_PLAN),
                "{{stage}}: {{reason}}",
            )
        ],
    ),
    Panel(
        "Why, by worker: the ten most",
        "ops",
        [
            (
                f"topk(10, {rate('kaiten_worker_passed_over_total', 'worker, reason', NOT_PLAN)})",
                "{{worker}}: {{reason}}",
            )
        ],
    ),
    Panel("Steps", "s", quantiles("kaiten_iteration_duration_seconds")),
    Panel("Tokens of a step", "short", quantiles("kaiten_iteration_tokens")),
    Panel(
        "Where iterations' time goes",
        "percentunit",
        [(rate("kaiten_iteration_time_seconds_total", "part"), "{{part}}")],
    ),
    Panel(
        "Budget in use",
        "percentunit",
        [
            (
                f"{rate('kaiten_budget_tokens_used_total')} / {rate('kaiten_budget_tokens_total')}",
                "of first steps",
            ),
            (
                f"{rate('kaiten_worker_budget_tokens_used_total', 'worker')} "
                f"/ {rate('kaiten_worker_budget_tokens_total', 'worker')}",
                "{{worker}}",
            ),
        ],
    ),
    Panel(
        "Slots in use",
        "percentunit",
        [
            (
                "sum by (worker) (kaiten_worker_slots_used) "
                "/ sum by (worker) (kaiten_worker_slots)",
                "{{worker}}",
            )
        ],
    ),
    Panel(
        "KV blocks",
        "percentunit",
        [
            (
                "sum by (worker) (kaiten_worker_kv_places_held) "
                "/ sum by (worker) (kaiten_worker_kv_places)",
                "held: {{worker}}",
            ),
            (
                "sum by (worker) (kaiten_worker_kv_tokens) "
                "/ sum by (worker) (kaiten_worker_kv_places)",
                "tokens: {{worker}}",
            ),
        ],
    ),
    Panel(
        "Preemptions and the prefix cache",
        "short",
        [
            (rate("kaiten_num_preemptions_total"), "preemptions per second"),
            (
                f"{rate('kaiten_prefix_cache_hits_total')} "
                f"/ {rate('kaiten_prefix_cache_queries_total')}",
                "prompt tokens found, of one",
            ),
            (
                rate("kaiten_worker_prefix_hit_tokens_total", "worker"),
                "tokens found per second: {{worker}}",
            ),
        ],
    ),
    Panel("Devices busy", "percentunit", [("kaiten_worker_device_busy", "{{instance}}")]),
    Panel(
        "Device memory",
        "bytes",
        [("kaiten_worker_device_memory_bytes", "{{state}}: {{instance}}")],
    ),
    Panel(
        "Workers",
        "short",
        [
            ("max by (worker) (kaiten_worker_heartbeat_age_seconds)", "silent for: {{worker}}"),
            (
                "sum by (how) (increase(kaiten_workers_lost_total[$__rate_interval]))",
                "lost: {{how}}",
            ),
            (rate("kaiten_worker_row_errors_total"), "row errors"),
        ],
    ),
    Panel(
        "Queued tokens and the wait for a slot",
        "short",
        [
            ("sum(kaiten_queued_tokens)", "tokens that wait"),
            ("max(kaiten_queue_time_forecast_seconds)", "seconds that a newcomer waits"),
        ],
    ),
    Panel("From a cancel to free blocks", "s", quantiles("kaiten_abort_to_free_seconds")),
    Panel(
        "Commits",
        "short",
        [
            ("max(kaiten_journal_lag_seconds)", "oldest unacknowledged, s"),
            ("max(kaiten_commit_backlog)", "records unacknowledged"),
            ("max(kaiten_fold_lag)", "records not folded"),
            ("max(kaiten_stalled_seconds)", "stalled, s"),
        ],
    ),
    Panel(
        "Leaders",
        "short",
        [
            ("sum(kaiten_is_leader)", "lead"),
            ("changes(max(kaiten_leader_epoch)[$__rate_interval:])", "changes"),
        ],
    ),
)
DASHBOARDS: Final[Mapping[str, tuple[str, Sequence[Panel]]]] = {
    "service": ("kaiten: service", SERVICE),
    "engine": ("kaiten: engine", ENGINE),
}


def dashboard(name: str) -> dict[str, Any]:
    """As Grafana reads it."""
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"kaiten-{name}",
        "title": title,
        "tags": ["kaiten"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "panels": list(_panels(panels)),
    }


def _panels(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    for index, panel in enumerate(panels):
        row, column = divmod(index, COLUMNS // WIDTH)
        yield {
            "id": index + 1,
            "type": "timeseries",
            "title": panel.title,
            "datasource": SOURCE,
            "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
            "fieldConfig": {
                "defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 10}},
                "overrides": [],
            },
            "options": {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            },
            "targets": [
                {
                    "refId": chr(ord("A") + number),
                    "datasource": SOURCE,
                    "expr": expr,
                    "legendFormat": legend,
                }
                for number, (expr, legend) in enumerate(panel.asks)
            ],
        }


def text(name: str) -> str:
    """Of its file."""
    return json.dumps(dashboard(name), indent=1) + "\n"


def main() -> None:
    """See the module's docstring."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(text(name))


if __name__ == "__main__":
    main()
