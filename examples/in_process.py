"""A model inside a script: no server to start, none left behind.

`LLM()` is the shipped model, `LLM("./folder")` yours; `LLM("Qwen/Qwen3-0.6B")` is downloaded once.
"""

from kaiten import LLM

REVIEWS = ["The tuna was superb.", "I waited an hour and left.", "Nice tea, cold rice."]

asked = [f"A guest said: {review} What do you say?" for review in REVIEWS]
conversations = [[{"role": "user", "content": each}] for each in asked]
with LLM() as llm:
    answers = llm.chat(conversations, max_tokens=24, temperature=0)
    for review, answer in zip(REVIEWS, answers, strict=True):
        print(f"{review} -> {answer.text}")
