"""Greedy continuation.

B batch
"""

from functools import cache

import jax.numpy as jnp
import numpy as np
import numpy_transformer
import pytest

from minigpt_jax.config import ModelConfig
from minigpt_jax.generate import ROW_MULTIPLE, make_greedy_decoder
from minigpt_jax.initialization import initial_parameters
from minigpt_jax.model import model_graph

CONFIG = ModelConfig(
    vocab_size=23, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=12, rope_theta=100.0,
    tie_word_embeddings=False,
)  # fmt: skip
PROMPTS = [[5, 9, 1, 7], [2], list(range(3, 23)) * 3]
NEVER = -1


@pytest.fixture(scope="module")
def parameters():
    drawn = initial_parameters(CONFIG, initializer="xavier", seed=2)
    drawn["embed_tokens"]["embedding"] *= 50
    return drawn


@cache
def decoder(*, stop_id=NEVER, max_new_tokens=7):
    graph = model_graph(CONFIG, dtype=jnp.float32, kernel="blocked")
    return make_greedy_decoder(graph, max_new_tokens=max_new_tokens, stop_id=stop_id)


def plain_loop(parameters, prompt, number):
    ids = list(prompt)
    for _ in range(number):
        row = np.array([ids])
        scores = numpy_transformer.logits(parameters, CONFIG, row, np.zeros_like(row), np.arange(len(ids))[None])
        ids.append(int(scores[0, -1].argmax()))
    return ids[len(prompt) :]


def test_a_batch_of_unlike_prompts_is_continued_as_each_alone(parameters):
    # The long prompt makes the rows of the batch longer than those of the short prompts alone.
    assert len(PROMPTS[2]) + 7 > ROW_MULTIPLE
    decode = decoder()
    assert decode(parameters, PROMPTS) == [decode(parameters, [prompt])[0] for prompt in PROMPTS]


def test_the_continuation_is_that_of_a_plain_loop_over_full_forwards(parameters):
    assert decoder()(parameters, PROMPTS[:2]) == [plain_loop(parameters, prompt, 7) for prompt in PROMPTS[:2]]


def test_a_continuation_ends_before_the_first_stop_id(parameters):
    whole = decoder()(parameters, PROMPTS)
    stop_id = whole[0][3]
    stopped = decoder(stop_id=stop_id)(parameters, PROMPTS)
    assert stopped == [ids[: ids.index(stop_id)] if stop_id in ids else ids for ids in whole]
    assert len(stopped[0]) < 7


def test_different_prompts_are_continued_differently(parameters):
    # Else the tests above would compare constants.
    assert len({tuple(ids) for ids in decoder()(parameters, PROMPTS)}) == len(PROMPTS)
