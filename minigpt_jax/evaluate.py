"""How likely a JAX model finds tokens: minigpt_jax/scoring.py's `Scorer`; the twin is minigpt_torch/evaluate.py.

Only tokens that are asked about cost logits: their positions are gathered first and go a chunk at a time.

B rows  T predictions  S = B*T positions  C positions of one chunk  D hidden  V vocabulary
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from minigpt_jax.attention import default_kernel
from minigpt_jax.chunks import chunk_logits, one_chunk, supervised_first, used_chunks, whole_chunks
from minigpt_jax.config import ModelConfig
from minigpt_jax.int8 import int8_graph
from minigpt_jax.lora import layer_adapters
from minigpt_jax.lora_config import LoraConfig
from minigpt_jax.loss import SPARSE_CHUNK, token_losses
from minigpt_jax.model import Transformer, model_graph
from minigpt_jax.scoring import TokenScores


class JaxScorer:
    """A model that says how likely it finds tokens.

    Args:
        config: the model's shape.
        parameters: in the layout of minigpt_jax/initialization.py.
        dtype: of the computation.
        int8: the parameters are those of minigpt_jax/quantization.py's `int8_parameters`.
        adapters: a tree of adapters beside the parameters, with `lora` that they were made with.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Any,
        *,
        dtype: jnp.dtype = jnp.float32,
        int8: bool = False,
        adapters: Any = None,
        lora: LoraConfig | None = None,
    ):
        kernel = default_kernel(jax.devices()[0].platform, dtype)
        self._graph = (int8_graph if int8 else model_graph)(config, dtype=dtype, kernel=kernel)
        self._parameters, self._adapters, self._lora = parameters, adapters, lora

    def score(self, tokens: NDArray[np.int32], counts: NDArray[np.bool_]) -> TokenScores:
        """The scores [B, T] of the last T of T + 1 tokens; 0 and False where `counts` is False."""
        scores = _score(self._graph, self._lora, self._parameters, self._adapters, tokens, counts)
        return TokenScores(*map(np.asarray, scores))


@partial(jax.jit, static_argnames=("graph", "lora"))
def _score(
    graph: nnx.GraphDef[Transformer],
    lora: LoraConfig | None,
    parameters: Any,
    adapters: Any,
    tokens: jax.Array,  # int32 [B, T+1]
    counts: jax.Array,  # bool [B, T]
) -> tuple[jax.Array, jax.Array]:
    model = nnx.merge(graph, parameters)
    # Padding stands at the end of its row, where no token that counts can see it.
    hidden = model(
        tokens[:, :-1],
        segment_ids=jnp.ones(counts.shape, jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(counts.shape[1]), counts.shape),
        adapters=None if lora is None else layer_adapters(adapters, lora),
    )
    scores = token_scores(hidden, model.head, tokens[:, 1:].reshape(-1), counts.reshape(-1))
    return scores[0].reshape(counts.shape), scores[1].reshape(counts.shape)


def token_scores(
    hidden: jax.Array,  # [S, D]
    head: jax.Array,  # [V, D]
    targets: jax.Array,  # int32 [S]
    counts: jax.Array,  # bool [S]
) -> tuple[jax.Array, jax.Array]:
    """Log softmax(hidden @ head.T)[target] in at least float32, and whether that is the likeliest token; both [S].

    Of equally likely tokens the one with the lowest id counts as the likeliest, as in greedy decoding. Where `counts`
    is False the results are 0 and False.
    """
    count, size = hidden.shape[0], min(SPARSE_CHUNK, hidden.shape[0])
    order = supervised_first(counts)
    gathered = whole_chunks(size, hidden[order], targets[order], counts[order])
    cast_head = head.astype(hidden.dtype)

    def put_chunk(number: jax.Array, done: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        chunk_hidden, chunk_targets, chunk_counts = one_chunk(number, size, *gathered)
        logits = chunk_logits(chunk_hidden, cast_head)  # [C, V]
        (losses,), _ = token_losses(logits, chunk_targets)
        new = jnp.where(chunk_counts, -losses, 0), chunk_counts & (jnp.argmax(logits, axis=-1) == chunk_targets)
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=number * size, axis=0)
        return put(done[0], new[0]), put(done[1], new[1])

    places = gathered[0].shape[0]
    start = jnp.zeros(places, jnp.promote_types(hidden.dtype, jnp.float32)), jnp.zeros(places, bool)
    found = jax.lax.fori_loop(0, used_chunks(size, gathered[2]), put_chunk, start)
    log_probabilities, is_likeliest = (
        jnp.zeros(count, each.dtype).at[order].set(each[:count], unique_indices=True) for each in found
    )
    return log_probabilities, is_likeliest
