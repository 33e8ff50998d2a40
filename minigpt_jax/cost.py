"""What a model and a training step cost: parameters, floating-point operations and memory by formula; memory held.

Framework-free. S = B*T positions, D hidden, F ffn, V vocabulary, N query heads, K kv heads, H head size
"""

import resource
import sys

from minigpt_jax.adapter_tree import adapter_count
from minigpt_jax.config import ModelConfig, TrainConfig


def parameter_count(config: ModelConfig) -> int:
    """Number of the model's parameters; a tied head counts once."""
    embedding = config.vocab_size * config.hidden_size
    head = 0 if config.tie_word_embeddings else embedding
    norms = config.hidden_size * (2 * config.num_layers + 1)
    if config.qk_norm:
        norms += 2 * config.head_dim * config.num_layers
    return embedding + head + norms + config.num_layers * _matrices_of_block(config)


def trained_parameter_count(config: ModelConfig, train: TrainConfig) -> int:
    """Number of parameters that the stage trains: the adapters in lora, the model's own otherwise.

    Raises:
        UserError: in lora, the rank is larger than a side of a targeted matrix.
    """
    return adapter_count(config, train.lora) if train.stage == "lora" else parameter_count(config)


def _matrices_of_block(config: ModelConfig) -> int:
    heads = 2 * config.num_heads + 2 * config.num_kv_heads  # q, o, k, v
    return config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)


def rows_of_example(train: TrainConfig) -> int:
    """Rows that one of `batch_size` examples takes: a pair has two."""
    return 2 if train.stage == "dpo" else 1


def training_flops_per_token(config: ModelConfig, *, time: int, supervised: float = 1.0) -> float:
    """Model FLOPs of forward and backward for one position of a row of `time` positions.

    6 for each weight of a matrix product (2 forward, 4 backward), the output head among them where a token is learned
    (`supervised` is the part of the tokens that is); and causal attention: scores and weighted sum over the
    (time + 1) / 2 positions that one position sees on average. Recomputation in the backward pass and the products with
    the mask's upper triangle are not model FLOPs and are not counted. Counted as if every weight were trained: in lora
    that is about a half too much; a teacher or a copied reference is not counted.
    """
    matrices = config.num_layers * _matrices_of_block(config) + supervised * config.vocab_size * config.hidden_size
    attention = config.num_layers * 2 * config.num_heads * config.head_dim * (time + 1) / 2
    return 6 * (matrices + attention)


def training_bytes(config: ModelConfig, train: TrainConfig, *, teacher: ModelConfig | None = None) -> int:
    """Estimated peak device memory of a training step in bytes.

    What is trained, its gradients, the accumulator and the optimizer's moments; what is not trained but computed with;
    the activations that the backward pass keeps; one chunk of logits three times over and the head's gradient. An
    estimate: allocators add their own.
    """
    master = 8 if train.dtype == "float64" else 4
    compute = {"float64": 8, "bfloat16": 2}.get(train.dtype or "float32", 4)
    assert train.batch_size is not None
    positions = train.batch_size * rows_of_example(train) * train.max_seq_len
    frozen = 0 if teacher is None else parameter_count(teacher)
    if train.holds_first_model:
        frozen += parameter_count(config)
    states = (5 * trained_parameter_count(config, train) + frozen) * master
    kv_size, query_size = config.num_kv_heads * config.head_dim, config.num_heads * config.head_dim
    # Kept for each block: two norm inputs and outputs, q k v before and after rotation, context, gate, up, product.
    kept = 4 * config.hidden_size + 3 * query_size + 4 * kv_size + 3 * config.intermediate_size
    activations = positions * (config.num_layers * kept + 2 * config.hidden_size) * compute
    logits = 3 * min(positions, 1024) * config.vocab_size * max(compute, 4)
    return int(states + activations + logits + config.vocab_size * config.hidden_size * master)


def peak_memory_bytes() -> int:
    """Most memory this process has held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
