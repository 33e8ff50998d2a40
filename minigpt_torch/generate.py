"""Greedy continuation of prompts, to show what a model in training writes.

Every new token runs the model over the whole row again, as in the twin, minigpt_jax/generate.py.
"""

from collections.abc import Sequence

import torch

from minigpt_torch.model import Transformer


@torch.no_grad()
def greedy(
    model: Transformer, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_id: int
) -> list[list[int]]:
    """The new ids of each prompt, up to and without `stop_id`. Prompts may be of unlike length."""
    device = model.embed_tokens.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    rows = torch.zeros(len(prompts), int(lengths.max()) + max_new_tokens, dtype=torch.int64, device=device)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    numbers = torch.arange(len(prompts), device=device)
    for number in range(max_new_tokens):
        # A row is filled from the left, and a causal model does not see what stands to the right.
        seen = rows[:, : int(lengths.max()) + number]
        positions = torch.arange(seen.shape[1], device=device).expand_as(seen)
        hidden = model(seen, segment_ids=torch.ones_like(seen), positions=positions)
        last = hidden.reshape(*seen.shape, -1)[numbers, lengths + number - 1]  # [B, D]
        rows[numbers, lengths + number] = model.logits(last).argmax(-1)
    new = [
        row[length : length + max_new_tokens].tolist()
        for row, length in zip(rows, lengths.tolist(), strict=True)
    ]  # fmt: skip
    return [ids[: ids.index(stop_id)] if stop_id in ids else ids for ids in new]
