"""Train the shipped model: `python -m tools.mini.train --out kaiten/mini/checkpoint`.

One seeded command from the grammar to a checkpoint in the Hugging Face layout. The corpus and the
tokenizer are the same everywhere; the last bits of the weights depend on the machine's arithmetic.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tools.mini import card, evaluate, tokens

HELD_OUT_SEED = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the result. `row_tokens` bounds the longest document."""

    seed: int = 7
    steps: int = 3000
    warmup_steps: int = 80
    rows_per_step: int = 6
    row_tokens: int = 384
    learning_rate: float = 3e-3
    vocab_size: int = 1536
    positions: int = 1024
    hidden: int = 256
    layers: int = 4
    sample_tokens_max: int = 400
    questions: int = 200
    answer_tokens_max: int = evaluate.ANSWER_TOKENS_MAX


def build_model(recipe: Recipe, tokenizer: Tokenizer) -> Any:
    """A Llama with tied embeddings and two query heads to each key/value head.

    Any, here and below: the annotations of transformers do not hold under a strict type check.
    """
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=recipe.hidden,
            intermediate_size=recipe.hidden * 5 // 2,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.hidden // 64,
            num_key_value_heads=recipe.hidden // 128,
            head_dim=64,
            max_position_embeddings=recipe.positions,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=tokens.special_id(tokens.BOS),
            eos_token_id=list(tokens.STOP_IDS),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Packed rows. ids, labels and documents are [rows, row_tokens] int64.

    A label of -100 is not counted. `documents` numbers the documents of a row from 1; 0 is padding.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    documents: torch.Tensor

    def mask(self) -> torch.Tensor:
        """[rows, 1, row_tokens, row_tokens] bool: each id sees the earlier ids of its document.

        Without it a story learns its hero from its neighbour in the row.
        """
        same = self.documents[:, None, :, None] == self.documents[:, None, None, :]
        return same.tril()


def batches(recipe: Recipe, tokenizer: Tokenizer, *, seed: int) -> Iterator[Batch]:
    """Endless batches of the documents of one seed."""
    rows = tokens.rows(tokenizer, random.Random(seed), length=recipe.row_tokens)
    while True:
        chosen = list(islice(rows, recipe.rows_per_step))
        ids, labels, documents = torch.zeros(
            3, recipe.rows_per_step, recipe.row_tokens, dtype=torch.int64
        )
        labels -= 100
        for index, row in enumerate(chosen):
            start = 0
            for number, (document, counted) in enumerate(row, start=1):
                here = slice(start, start + len(document))
                ids[index, here] = torch.tensor(document)
                labels[index, here] = ids[index, here].where(torch.tensor(counted), -100)
                documents[index, here] = number
                start += len(document)
        yield Batch(ids=ids, labels=labels, documents=documents)


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy in nats over the counted tokens."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch.ids, attention_mask=batch.mask(), use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), batch.labels[:, 1:].flatten()
    )


def train(recipe: Recipe, tokenizer: Tokenizer) -> Any:
    torch.manual_seed(recipe.seed)
    model = build_model(recipe, tokenizer)
    steppers = optimizers(recipe, model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: rate(recipe, step))
        for each in steppers
    ]
    started = time.monotonic()
    corpus = batches(recipe, tokenizer, seed=recipe.seed)
    for step, batch in enumerate(islice(corpus, recipe.steps), start=1):
        loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(steppers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 50 == 0 or step == recipe.steps:
            seconds = time.monotonic() - started
            print(f"step {step:5d}  loss {loss.item():.3f}  {seconds:6.0f} s", flush=True)
    return model.eval()


def optimizers(recipe: Recipe, model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    embedding = model.get_input_embeddings().weight
    matrices = [each for each in model.parameters() if each.dim() > 1 and each is not embedding]
    norms = [each for each in model.parameters() if each.dim() == 1]
    # Norms are scales, not weights: nothing pulls them to zero.
    groups: list[dict[str, Any]] = [{"params": [embedding]}, {"params": norms, "weight_decay": 0.0}]
    lr, decay = recipe.learning_rate, 0.05
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=decay),
    ]


def rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a half cosine that ends at nothing."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


@torch.inference_mode()
def held_out_loss(recipe: Recipe, tokenizer: Tokenizer, model: Any) -> float:
    """The loss on documents of another seed."""
    corpus = islice(batches(recipe, tokenizer, seed=HELD_OUT_SEED), 8)
    return sum(loss_of(model, batch).item() for batch in corpus) / 8


def save(out: Path, recipe: Recipe, tokenizer: Tokenizer, model: Any) -> None:
    """Write the checkpoint folder; weights in bf16, as they are served."""
    out.mkdir(parents=True, exist_ok=True)
    loss = held_out_loss(recipe, tokenizer, model)
    model = model.to(torch.bfloat16)
    configured: Any = GenerationConfig
    model.generation_config = configured(
        bos_token_id=tokens.special_id(tokens.BOS),
        eos_token_id=list(tokens.STOP_IDS),
        pad_token_id=0,
    )
    model.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    config = tokens.tokenizer_config(positions=recipe.positions)
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "README.md").write_text(card_of(recipe, tokenizer, model, held_out_loss=loss))


def card_of(recipe: Recipe, tokenizer: Tokenizer, model: Any, *, held_out_loss: float) -> str:
    asked, prompts = zip(*card.prompts(), strict=True)
    told = evaluate.answers(tokenizer, model, prompts, tokens_max=recipe.sample_tokens_max)
    return card.render(
        list(zip(asked, told, strict=True)),
        evaluate.figures(
            tokenizer, model, count=recipe.questions, tokens_max=recipe.answer_tokens_max
        ),
        parameters=model.num_parameters(),
        held_out_loss=held_out_loss,
        steps=recipe.steps,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=Recipe().steps)
    parser.add_argument("--seed", type=int, default=Recipe().seed)
    options = parser.parse_args()
    recipe = Recipe(steps=options.steps, seed=options.seed)
    tokenizer = tokens.train_tokenizer(
        seed=recipe.seed, documents=8000, vocab_size=recipe.vocab_size
    )
    save(options.out, recipe, tokenizer, train(recipe, tokenizer))


if __name__ == "__main__":
    main()
