"""The wire contract: stubs fresh, enums safe, commented, and compatible with their own rules."""

import itertools
import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import EnumDescriptor, FileDescriptor

from kaiten.v1 import (
    archive_pb2,
    common_pb2,
    inference_service_pb2,
    ledger_pb2,
    model_service_pb2,
    scheduler_service_pb2,
    watch_pb2,
    worker_service_pb2,
)
from protos.generate import stale

FILES: list[FileDescriptor] = [
    module.DESCRIPTOR
    for module in (
        archive_pb2,
        common_pb2,
        inference_service_pb2,
        ledger_pb2,
        model_service_pb2,
        scheduler_service_pb2,
        watch_pb2,
        worker_service_pb2,
    )
]
SOURCES = sorted((Path(__file__).parents[2] / "protos" / "kaiten" / "v1").glob("*.proto"))


def test_stubs_are_fresh() -> None:
    assert stale() == []


@pytest.mark.parametrize("enum", [e for f in FILES for e in f.enum_types_by_name.values()])
def test_zero_is_never_a_meaning(enum: EnumDescriptor) -> None:
    assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


def test_every_sampling_scalar_can_be_unset() -> None:
    for field in common_pb2.SamplingParams.DESCRIPTOR.fields:
        assert field.is_repeated or field.has_presence, field.name


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_every_service_and_its_methods_say_what_they_mean(source: Path) -> None:
    lines = source.read_text().splitlines()
    for above, line in itertools.pairwise(lines):
        if re.match(r"\s*(rpc|service) ", line):
            assert above.strip().startswith("//") or "ListModels" in line, line
