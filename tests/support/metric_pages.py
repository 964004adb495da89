"""/metrics as Prometheus reads it."""

from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Scrape:
    """One look at a page: every sample's value, by name and labels."""

    values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def __call__(self, name: str, **labels: str) -> float:
        """A sample's value; 0 when it was never counted."""
        given = frozenset(labels.items())
        found = [v for (n, has), v in self.values.items() if n == name and given <= has]
        return sum(found)

    def names(self) -> set[str]:
        return {name for name, _ in self.values}


def scrape(url: str) -> Scrape:
    """Fetch and parse; AssertionError for a page that Prometheus would refuse or read twice."""
    reply = httpx.get(f"{url}/metrics", timeout=30)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/plain; version=")
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(reply.text):
        assert family.documentation, f"{family.name} does not say what it is"
        for sample in family.samples:
            key = sample.name, frozenset((k, v) for k, v in sample.labels.items() if v)
            assert key not in values, f"{key} is told twice"
            values[key] = sample.value
    return Scrape(values)
