"""The transformer a second time, in NumPy float64: one position, one head at a time, for the tests to compare with.

It shares no line with minigpt_jax/model.py. A rotary pair is one complex number here, and visibility is a loop.

B batch  T time  V vocabulary
"""

import cmath
import math

import numpy as np


def logits(parameters, config, tokens, segment_ids, positions):
    """Scores over the vocabulary [B, T, V] of int arrays [B, T]."""
    embedding = np.asarray(parameters["embed_tokens"]["embedding"], np.float64)
    head = np.asarray(parameters["lm_head"]["kernel"]).T if "lm_head" in parameters else embedding
    rows = []
    for row_tokens, row_segments, row_positions in zip(tokens, segment_ids, positions, strict=True):
        stream = [embedding[token] for token in row_tokens]
        for number in range(config.num_layers):
            stream = block(parameters["layers"][number], config, stream, row_segments, row_positions)
        rows.append([head @ norm(x, parameters["norm"], config) for x in stream])
    return np.array(rows)


def block(parameters, config, stream, segments, positions):
    inputs = [norm(x, parameters["input_layernorm"], config) for x in stream]
    context = attention(parameters["self_attn"], config, inputs, segments, positions)
    stream = [x + y for x, y in zip(stream, context, strict=True)]
    return [
        x + feed_forward(parameters["mlp"], norm(x, parameters["post_attention_layernorm"], config)) for x in stream
    ]


def attention(parameters, config, inputs, segments, positions):
    kernel = {name: parameters[name]["kernel"] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    size = config.head_dim

    def heads(x, name):
        return (x @ kernel[name]).reshape(-1, size)

    def rotated(x, name, norm_name, position):
        vectors = heads(x, name)
        if config.qk_norm:
            vectors = [norm(vector, parameters[norm_name], config) for vector in vectors]
        return [rotate(vector, position, config.rope_theta) for vector in vectors]

    queries = [rotated(x, "q_proj", "q_norm", position) for x, position in zip(inputs, positions, strict=True)]
    keys = [rotated(x, "k_proj", "k_norm", position) for x, position in zip(inputs, positions, strict=True)]
    values = [heads(x, "v_proj") for x in inputs]
    outputs = []
    for here in range(len(inputs)):
        visible = [there for there in range(here + 1) if segments[there] == segments[here]]
        contexts = []
        for head in range(config.num_heads):
            group = head // (config.num_heads // config.num_kv_heads)
            scores = [queries[here][head] @ keys[there][group] / math.sqrt(size) for there in visible]
            weights = np.exp(np.array(scores) - max(scores))
            weights /= weights.sum()
            contexts.append(sum(weight * values[there][group] for weight, there in zip(weights, visible, strict=True)))
        outputs.append(np.concatenate(contexts) @ kernel["o_proj"])
    return outputs


def rotate(vector, position, theta):
    half = len(vector) // 2
    turned = [
        complex(vector[i], vector[i + half]) * cmath.exp(1j * int(position) * theta ** (-2 * i / len(vector)))
        for i in range(half)
    ]
    return np.array([z.real for z in turned] + [z.imag for z in turned])


def feed_forward(parameters, x):
    gate = x @ parameters["gate_proj"]["kernel"]
    return (gate / (1 + np.exp(-gate)) * (x @ parameters["up_proj"]["kernel"])) @ parameters["down_proj"]["kernel"]


def norm(x, parameters, config):
    return x / math.sqrt(np.dot(x, x) / len(x) + config.rms_norm_eps) * parameters["weight"]
