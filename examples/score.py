"""Which of several texts does the model find likeliest? From the log-probabilities of the prompt.

No token is made: each text is computed once, all of them in one batch. This is what evaluation
harnesses do with answers to choose from.
"""

import os
import sys

from kaiten.client import Client

BEGINNING = "The chef"
ENDINGS = sys.argv[1:] or [" cuts the fish.", " fish the cuts.", " compiles the kernel."]

address = os.environ.get("KAITEN_ADDRESS", "127.0.0.1:50051")
with Client(address, api_key=os.environ.get("KAITEN_API_KEY")) as client:
    answers = client.complete_all(
        [BEGINNING + ending for ending in ENDINGS], max_tokens=0, prompt_logprobs=0
    )
scores = []
for ending, answer in zip(ENDINGS, answers, strict=True):
    assert answer.prompt is not None
    logprobs = [token.logprob for token in answer.prompt.logprobs]
    # Per token: longer texts would lose otherwise.
    scores.append((sum(logprobs) / len(logprobs), ending))
for score, ending in sorted(scores, reverse=True):
    print(f"{score:8.3f}  {BEGINNING}{ending}")
