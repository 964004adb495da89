# mypy: ignore-errors
# (what it imports has no types, or is not installed where types are checked)
"""Run jobs with transformers. A script for any Python that has transformers; it imports nothing
of kaiten.

    python transformers_script.py --model FOLDER --mode one|static8|static16|continuous
        --dtype bf16 --threads 2 --jobs jobs.json --out out.json

Says "ready" on stdout after a first token, then runs the uncounted warm-up of jobs.json.
Then every job is due at once; out.json holds, job by job, `stories`: [[seconds, tokens], ...], when
how many of its tokens could be shown, and `tokens`.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

# Without a block count the cache is sized to all memory; this holds the whole crowd.
KV_PAGES, PAGE_TOKENS, STEP_TOKENS = 64, 256, 512
WAIT_S = 600.0


class Ticks(StoppingCriteria):
    """Never stops; notes when each token came."""

    def __init__(self):
        self.at_s = []

    def __call__(self, input_ids, scores, **_):
        self.at_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def forced(tokens):
    return GenerationConfig(
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
    )


def one_by_one(model, jobs):
    """`generate` for each job in turn."""
    stories, tokens, started_s = [], [], time.perf_counter()
    for job in jobs:
        ticks, prompt = Ticks(), torch.tensor([job["prompt"]])
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=forced(job["output_tokens"]),
            stopping_criteria=StoppingCriteriaList([ticks]),
        )
        stories.append([[at_s - started_s, 1] for at_s in ticks.at_s])
        tokens.append(made[0, prompt.shape[1] :].tolist())
    return stories, tokens


def static(model, jobs, batch):
    """Left-padded batches in order of arrival; an answer is there when its batch is done."""
    stories, answers, started_s = [], [], time.perf_counter()
    for start in range(0, len(jobs), batch):
        group = jobs[start : start + batch]
        wide = max(len(job["prompt"]) for job in group)
        tokens = max(job["output_tokens"] for job in group)
        prompts = torch.zeros(len(group), wide, dtype=torch.long)
        mask = torch.zeros_like(prompts)
        for row, job in enumerate(group):
            prompts[row, wide - len(job["prompt"]) :] = torch.tensor(job["prompt"])
            mask[row, wide - len(job["prompt"]) :] = 1
        made = model.generate(prompts, attention_mask=mask, generation_config=forced(tokens))
        assert made.shape[1] == wide + tokens
        at_s = time.perf_counter() - started_s
        stories += [[[at_s, job["output_tokens"]]] for job in group]
        answers += [
            made[row, wide : wide + job["output_tokens"]].tolist() for row, job in enumerate(group)
        ]
    return stories, answers


def continuous(model, jobs):
    """transformers' own continuous batching."""
    from transformers import ContinuousBatchingConfig

    config = ContinuousBatchingConfig(
        num_blocks=KV_PAGES,
        page_size=PAGE_TOKENS,
        max_batch_tokens=STEP_TOKENS,
        use_cuda_graph=False,
    )
    plain = GenerationConfig(max_new_tokens=256, do_sample=False, eos_token_id=-1, pad_token_id=0)
    stories, tokens = [None] * len(jobs), [None] * len(jobs)
    with model.continuous_batching_context_manager(
        generation_config=plain, continuous_batching_config=config, warmup=False
    ) as manager:
        started_s = time.perf_counter()
        for index, job in enumerate(jobs):
            manager.add_request(
                job["prompt"],
                request_id=str(index),
                max_new_tokens=job["output_tokens"],
                record_timestamps=True,
                eos_token_id=-1,
            )
        while None in stories:
            answer = manager.get_result(timeout=1)
            if answer is None:
                if not manager.is_running() or time.perf_counter() - started_s > WAIT_S:
                    raise RuntimeError("continuous batching stopped before its requests did")
            elif answer.error:
                raise RuntimeError(answer.error)
            elif answer.is_finished():
                count = len(answer.generated_tokens)
                at_s = answer.timestamps or [time.perf_counter()]
                share = [1] * len(at_s) if len(at_s) == count else [0] * (len(at_s) - 1) + [count]
                stories[int(answer.request_id)] = [
                    [at - started_s, shown] for at, shown in zip(at_s, share, strict=True)
                ]
                tokens[int(answer.request_id)] = list(answer.generated_tokens)
    return stories, tokens


def run(model, jobs, mode):
    if mode == "one":
        return one_by_one(model, jobs)
    if mode == "continuous":
        return continuous(model, jobs)
    return static(model, jobs, int(mode.removeprefix("static")))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--jobs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    dtype = torch.bfloat16 if chosen.dtype == "bf16" else torch.float32
    model = LlamaForCausalLM.from_pretrained(
        chosen.model, dtype=dtype, attn_implementation="sdpa"
    ).eval()
    with torch.inference_mode():
        run(model, [{"prompt": [5, 6, 7], "output_tokens": 2}], chosen.mode)
        print("ready", flush=True)
        asked = json.loads(chosen.jobs.read_text())
        run(model, asked["warm"], chosen.mode)
        used_s = time.process_time()
        stories, tokens = run(model, asked["jobs"], chosen.mode)
        cpu_s = time.process_time() - used_s
    chosen.out.write_text(json.dumps({"stories": stories, "tokens": tokens, "cpu_s": cpu_s}))


if __name__ == "__main__":
    sys.exit(main())
