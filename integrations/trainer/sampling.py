"""Generation requests of the trainer: ids, seeds and limits, as functions of recipe and prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from integrations.trainer.recipe import Recipe
from integrations.trainer.tasks import Prompt
from integrations.trainer.tokenizer import Tokenizer
from integrations.trainer.trajectory import GenerationRequest


def request_seed(run_seed: int, prompt_index: int, sample_index: int) -> int:
    """A 63-bit seed that depends on nothing else, so a request repeated after a restart draws
    from the same stream."""
    text = f"{run_seed}/{prompt_index}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def group_requests(
    recipe: Recipe, tokenizer: Tokenizer, prompt: Prompt, samples: Sequence[int]
) -> list[GenerationRequest]:
    """The requests for some samples of one training prompt."""
    ids = tokenizer.prompt_ids(prompt.text, recipe.task.system)
    return [
        GenerationRequest(
            request_id=f"train/{prompt.index}/{sample}",
            prompt=ids,
            max_new_tokens=recipe.sampling.max_new_tokens,
            temperature=recipe.sampling.temperature,
            seed=request_seed(recipe.seed, prompt.index, sample),
            stop_token_ids=tokenizer.stop_token_ids,
            record_routing=recipe.routing_replay,
            prompt_index=prompt.index,
            sample_index=sample,
        )
        for sample in samples
    ]


def held_out_request(
    recipe: Recipe, tokenizer: Tokenizer, prompt: Prompt, version: int
) -> GenerationRequest:
    """The greedy request that evaluates one held-out prompt."""
    return GenerationRequest(
        request_id=f"evaluate/{version}/{prompt.index}",
        prompt=tokenizer.prompt_ids(prompt.text, recipe.task.system),
        max_new_tokens=recipe.sampling.max_new_tokens,
        temperature=0.0,
        seed=0,
        stop_token_ids=tokenizer.stop_token_ids,
        record_routing=False,
        prompt_index=prompt.index,
    )
