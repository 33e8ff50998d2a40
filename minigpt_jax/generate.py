"""Greedy continuation of prompts, to show what a model in training writes.

Every new token runs the model over the whole row again: simple, and fast enough for a few short samples. There is
no key/value cache here yet.

B batch  L row length (prompt and continuation, padded)  D hidden  V vocabulary
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minigpt_jax.model import Transformer

Decoder = Callable[[Any, Sequence[Sequence[int]]], list[list[int]]]

ROW_MULTIPLE = 64
"""Rows are padded to a multiple of this, so that prompts of like length share a compilation."""


def make_greedy_decoder(graph: nnx.GraphDef[Transformer], *, max_new_tokens: int, stop_id: int) -> Decoder:
    """A function (parameters, prompts) -> new ids of each prompt, up to and without `stop_id`.

    Prompts of unlike length go side by side, each as if it were alone: a row is filled from the left, and a causal
    model does not see what stands to the right.
    """

    @jax.jit
    def extend(parameters: Any, rows: jax.Array, lengths: jax.Array) -> jax.Array:  # [B, L], [B] -> [B, L]
        model = nnx.merge(graph, parameters)
        segment_ids = jnp.ones_like(rows)
        positions = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
        row_numbers = jnp.arange(rows.shape[0])

        def add_token(number: jax.Array, rows: jax.Array) -> jax.Array:
            hidden = model(rows, segment_ids=segment_ids, positions=positions)
            hidden = hidden.reshape(*rows.shape, -1)[row_numbers, lengths + number - 1]  # [B, D]
            return rows.at[row_numbers, lengths + number].set(jnp.argmax(model.logits(hidden), -1).astype(rows.dtype))

        return jax.lax.fori_loop(0, max_new_tokens, add_token, rows)

    def decode(parameters: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        longest = max(len(prompt) for prompt in prompts) + max_new_tokens
        rows = np.zeros((len(prompts), -(-longest // ROW_MULTIPLE) * ROW_MULTIPLE), np.int32)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        extended = np.asarray(extend(parameters, rows, lengths))
        new = [row[length : length + max_new_tokens].tolist() for row, length in zip(extended, lengths, strict=True)]
        return [ids[: ids.index(stop_id)] if stop_id in ids else ids for ids in new]

    return decode
