"""Next-token cross entropy that never holds all logits.

minigpt_jax/chunks.py makes logits and gradients for a chunk of positions at a time.

S positions  C positions of one chunk  D hidden  V vocabulary
"""

import jax
import jax.numpy as jnp

from minigpt_jax.chunks import Arrays, summed_losses, supervised_first, whole_chunks

CHUNK = 1024
"""Positions whose logits exist at one time."""

SPARSE_CHUNK = 256
"""The same where unsupervised positions are skipped: a chunk that has one to learn is computed whole."""


def next_token_loss(
    hidden: jax.Array,  # [S, D]
    head: jax.Array,  # [V, D]
    targets: jax.Array,  # int32 [S]
    loss_weights: jax.Array,  # float [S]
    *,
    sparse: bool = False,
) -> jax.Array:
    """Sum over positions of loss_weights * -log softmax(hidden @ head.T)[target], in nats.

    Dividing by the number of supervised tokens is the caller's: under accumulation the number is the window's.

    Args:
        hidden: last hidden states, in the compute dtype.
        head: output head; cast to the dtype of `hidden` for the product.
        targets: the right next token of each position; any valid id where the weight is 0.
        loss_weights: 0 takes a position out of the loss.
        sparse: gather what is supervised and make no logits for the rest. The sum is the same but for its order; worth
            it where a good part has no weight, as in conversations.

    Returns:
        A scalar in at least float32.
    """
    size = min(SPARSE_CHUNK if sparse else CHUNK, hidden.shape[0])
    if sparse:
        order = supervised_first(loss_weights)
        hidden, targets, loss_weights = hidden[order], targets[order], loss_weights[order]
    hidden, targets, loss_weights = whole_chunks(size, hidden, targets, loss_weights)
    (loss,) = summed_losses(token_losses, 1, size, hidden, head, loss_weights, (targets,), ())
    return loss


def token_losses(logits: jax.Array, targets: jax.Array) -> tuple[Arrays, jax.Array]:
    """Cross entropy of each position (one array [C], in nats) and its gradient by the logits [C, V].

    The gradient is softmax(logits) - one_hot(target). logits [C, V], targets [C].
    """
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    is_target = targets[:, None] == jnp.arange(logits.shape[-1])
    losses = -jnp.take_along_axis(log_probabilities, targets[:, None], axis=-1)[:, 0]
    return (losses,), jnp.exp(log_probabilities) - is_target
