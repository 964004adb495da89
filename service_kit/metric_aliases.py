"""Names that dashboards and autoscalers of vLLM know, for values that are ours: one table.

The page for Prometheus has both, OTLP has ours alone. Like vLLM's they carry `model_name`.
"""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import Metric, Sample
from prometheus_client.openmetrics import exposition as openmetrics

# Of ours, without the suffixes that a kind of metric adds. docs/metrics.md shows the table. Not in
# it: vLLM's gaps between tokens, each one of them; nothing here is measured per token, and under
# their names the means of requests would hide every stall.
ALIASES: Final = {
    "kaiten_num_requests_running": ("vllm:num_requests_running",),
    "kaiten_num_requests_waiting": ("vllm:num_requests_waiting",),
    "kaiten_kv_cache_usage_perc": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "kaiten_num_preemptions": ("vllm:num_preemptions",),
    "kaiten_prompt_tokens": ("vllm:prompt_tokens",),
    "kaiten_generation_tokens": ("vllm:generation_tokens",),
    "kaiten_prefix_cache_queries": ("vllm:prefix_cache_queries",),
    "kaiten_prefix_cache_hits": ("vllm:prefix_cache_hits",),
    "kaiten_request_success": ("vllm:request_success",),
    "kaiten_iteration_tokens": ("vllm:iteration_tokens_total",),
    "kaiten_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "kaiten_request_generation_tokens": ("vllm:request_generation_tokens",),
    "kaiten_request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "kaiten_request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "kaiten_request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "kaiten_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "gen_ai_server_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "kaiten_request_inference_time_seconds": ("vllm:request_inference_time_seconds",),
    "gen_ai_server_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
}

# The conventions' own word for what `model_name` says.
OWN_LABEL: Final = "gen_ai_request_model"


OPENMETRICS: Final = "application/openmetrics-text"


class AliasedRegistry(CollectorRegistry):
    """A registry that says what it has under other names too."""

    def __init__(self, model_name: Callable[[], str]) -> None:
        super().__init__()
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Every family, each followed by its aliases."""
        for family in super().collect():
            yield family
            for name in ALIASES.get(family.name, ()):
                yield _renamed(family, name, self._model_name())


def _renamed(family: Metric, name: str, model_name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    labels = {"model_name": model_name} if model_name else {}
    renamed.samples = [
        Sample(
            name + sample.name.removeprefix(family.name),
            {**{k: v for k, v in sample.labels.items() if k != OWN_LABEL}, **labels},
            sample.value,
        )
        for sample in family.samples
    ]
    return renamed


def encoded(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """All of it as text, in the form that is asked for, and that form's name.

    Nothing in it needs escaping, and the library's would take the colons out of names.
    """
    if OPENMETRICS not in accept:
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
    body: bytes = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)
    return body, f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
