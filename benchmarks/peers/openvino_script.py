# mypy: ignore-errors
# (what it imports has no types, or is not installed where types are checked)
"""Run jobs with OpenVINO GenAI's continuous batching. A script for a Python that has
`openvino-genai`; it imports nothing of kaiten. Flags and output as in transformers_script.

--model is a folder in OpenVINO's format, made from the checkpoint by `optimum-cli export openvino`.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

SLOTS, STEP_TOKENS, CACHE_GB = 64, 512, 1


def run(pipeline, jobs):
    """Everything is asked at once, then stepped until nothing is left."""
    started_s = time.perf_counter()
    handles = []
    for index, job in enumerate(jobs):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = job["output_tokens"]
        config.ignore_eos = True
        config.do_sample = False
        prompt = openvino.Tensor(np.array([job["prompt"]], dtype=np.int64))
        handles.append(pipeline.add_request(index, prompt, config))
    stories, tokens = [[] for _ in jobs], [[] for _ in jobs]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        at_s = time.perf_counter() - started_s
        for story, made, handle in zip(stories, tokens, handles, strict=True):
            while handle.can_read():
                (output,) = handle.read().values()
                story.append([at_s, len(output.generated_ids)])
                made += output.generated_ids
    return stories, tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--mode", default="continuous")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--jobs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_seqs = SLOTS
    scheduler.max_num_batched_tokens = STEP_TOKENS
    properties = {
        "INFERENCE_NUM_THREADS": chosen.threads,
        "INFERENCE_PRECISION_HINT": {"bf16": "bf16", "fp32": "f32"}[chosen.dtype],
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(chosen.model, scheduler, "CPU", properties)
    run(pipeline, [{"prompt": [5, 6, 7], "output_tokens": 2}])
    print("ready", flush=True)
    asked = json.loads(chosen.jobs.read_text())
    run(pipeline, asked["warm"])
    used_s = time.process_time()
    stories, tokens = run(pipeline, asked["jobs"])
    cpu_s = time.process_time() - used_s
    chosen.out.write_text(json.dumps({"stories": stories, "tokens": tokens, "cpu_s": cpu_s}))


if __name__ == "__main__":
    sys.exit(main())
