"""Generation in JAX: the cache, prompts of unlike length, and how often something is compiled.

B batch
"""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import numpy_transformer
import pytest

from minigpt_jax import generate as rooms
from minigpt_jax.adapter_tree import merge
from minigpt_jax.config import ModelConfig
from minigpt_jax.formats.names import map_leaves
from minigpt_jax.generate import SLOT_MULTIPLE, JaxDecoder
from minigpt_jax.generation import Continuation, GenerationConfig, greedy
from minigpt_jax.initialization import initial_adapters, initial_parameters
from minigpt_jax.lora_config import LoraConfig

pytestmark = pytest.mark.usefixtures("little_compiling")

CONFIG = ModelConfig(
    vocab_size=23, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=12, rope_theta=100.0,
    tie_word_embeddings=False,
)  # fmt: skip
PROMPTS = [[5, 9, 1, 7], [2], list(range(3, 23)) * 3]
NEVER = -1
DRAWN = GenerationConfig(max_new_tokens=12, temperature=1.5, top_p=1.0)


@pytest.fixture(scope="module")
def parameters():
    drawn = initial_parameters(CONFIG, initializer="xavier", seed=2)
    drawn["embed_tokens"]["embedding"] *= 50
    return drawn


@pytest.fixture
def decoder(parameters):
    return JaxDecoder(CONFIG, parameters)


def continued(decoder, prompts, config, *, context=64):
    decoder.start(rows=len(prompts), slots=context)
    decoder.read(prompts)
    return finished(decoder, config, context=context)


def finished(decoder, config, *, context=64):
    continuation = Continuation(decoder, config, context=context, stop_ids=(NEVER,))
    while continuation.is_going:
        continuation.step(5)
    return [row.ids for row in continuation.rows]


def full_scores(parameters, ids):
    """[V] scores of what follows these ids, by the NumPy model that reads them all."""
    row, parameters = np.array([ids]), map_leaves(np.asarray, parameters)
    return numpy_transformer.logits(parameters, CONFIG, row, np.zeros_like(row), np.arange(len(ids))[None])[0, -1]


def plain_loop(parameters, prompt, number):
    ids = list(prompt)
    for _ in range(number):
        ids.append(int(full_scores(parameters, ids).argmax()))
    return ids[len(prompt) :]


def scores_of(decoder):
    return np.asarray(decoder._known.scores)


def test_scores_are_those_of_a_full_forward_before_and_after_decoding(decoder, parameters):
    decoder.start(rows=len(PROMPTS), slots=90)
    decoder.read(PROMPTS)
    rows = [list(prompt) for prompt in PROMPTS]
    for _ in range(2):
        for row, scores in zip(rows, scores_of(decoder), strict=True):
            np.testing.assert_allclose(scores, full_scores(parameters, row), rtol=0, atol=1e-4)
        for row, new in zip(rows, finished(decoder, DRAWN, context=90), strict=True):
            row += new


def test_the_continuation_is_that_of_a_plain_loop_over_full_forwards(decoder, parameters):
    ids = greedy(decoder, PROMPTS, max_new_tokens=40, stop_id=NEVER)  # more than one decoding call
    assert ids == [plain_loop(parameters, prompt, 40) for prompt in PROMPTS]
    assert len({tuple(row) for row in ids}) == len(PROMPTS)  # else constants would be compared


@pytest.mark.parametrize("config", [DRAWN, GenerationConfig(max_new_tokens=9, temperature=0.0, repetition_penalty=1.3)])
def test_a_row_does_not_depend_on_the_rows_beside_it(decoder, config):
    together = continued(decoder, PROMPTS, config, context=90)
    # A row's draws are known by its place, so it stands there alone too.
    for place, prompt in enumerate(PROMPTS):
        alone = continued(decoder, [[1]] * place + [prompt], config, context=90)
        assert alone[place] == together[place]


@pytest.mark.parametrize("size", [1, 7, 16, 31])
def test_a_prompt_read_in_chunks_is_the_prompt_read_whole(decoder, size):
    prompt = PROMPTS[2]
    decoder.start(rows=1, slots=64)
    decoder.read([prompt])
    whole = scores_of(decoder)
    decoder.start(rows=1, slots=64)
    for start in range(0, len(prompt), size):
        decoder.read([prompt[start : start + size]])
    np.testing.assert_allclose(scores_of(decoder), whole, rtol=0, atol=2e-5)
    assert decoder.lengths == [60]


def test_a_prompt_longer_than_a_bucket_is_read_in_several(decoder, monkeypatch):
    expected = continued(decoder, PROMPTS, DRAWN, context=90)
    monkeypatch.setattr(rooms, "BUCKETS", (16, 4))
    assert continued(decoder, PROMPTS, DRAWN, context=90) == expected


def test_what_is_forgotten_leaves_no_trace(decoder):
    config = GenerationConfig(max_new_tokens=8, temperature=0.0, repetition_penalty=5.0)
    expected = continued(decoder, [[5, 9, 2, 4], [6, 3]], config)
    decoder.start(rows=2, slots=64)
    decoder.read([[5, 9, 11, 12, 13, 14, 15], [6, 17, 18]])
    decoder.keep([2, 1])
    decoder.read([[2, 4], [3]])
    assert decoder.lengths == [4, 2]
    assert finished(decoder, config) == expected


def test_repeated_rows_are_samples_of_one_prompt(decoder):
    decoder.start(rows=1, slots=64)
    decoder.read([PROMPTS[0]])
    decoder.repeat(3)
    assert finished(decoder, DRAWN) == continued(decoder, [PROMPTS[0]] * 3, DRAWN)


def test_a_row_ends_with_its_room_and_is_not_written_over(decoder):
    context = SLOT_MULTIPLE
    prompt = (list(range(3, 23)) * 20)[: context - 3]
    (ids,) = continued(decoder, [prompt], GenerationConfig(max_new_tokens=50, temperature=0.0), context=context)
    assert len(ids) == 3
    decoder.start(rows=1, slots=4 * context)
    decoder.read([prompt])
    assert finished(decoder, GenerationConfig(max_new_tokens=3, temperature=0.0), context=4 * context) == [ids]


def test_a_stop_id_ends_its_own_row_alone(decoder):
    whole = greedy(decoder, PROMPTS, max_new_tokens=12, stop_id=NEVER)
    stop_id = next(id for id in whole[0] if id not in whole[2])
    stopped = greedy(decoder, PROMPTS, max_new_tokens=12, stop_id=stop_id)
    assert stopped == [ids[: ids.index(stop_id)] if stop_id in ids else ids for ids in whole]
    assert len(stopped[0]) < 12 == len(stopped[2])


def new_ids(decoder, config, *, steps, active, **options):
    """The ids of one decoding call, without their rows' own numbers."""
    uniforms = np.full((len(active), steps), 0.5, np.float32)
    return decoder.extend([config] * len(active), uniforms=uniforms, stop_ids=(NEVER,), is_active=active, **options)


def test_a_row_that_rests_is_left_as_it_is_however_few_slots_the_others_take(decoder, monkeypatch):
    monkeypatch.setattr(rooms, "SLOT_MULTIPLE", 16)
    monkeypatch.setattr(rooms, "USUAL_SLOTS", 16)
    prompts = [*PROMPTS, [3, 4], [8]]
    decoder.start(rows=5, slots=90)
    decoder.read(prompts)
    expected = new_ids(decoder, DRAWN, steps=8, active=[True] * 5).ids
    decoder.start(rows=5, slots=90)
    decoder.read(prompts)
    ids = [[] for _ in prompts]
    for active in ([0, 1, 0, 0, 0], [1, 0, 0, 1, 1], [0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [1, 1, 0, 1, 1]):
        for row, new in zip(ids, new_ids(decoder, DRAWN, steps=4, active=[one > 0 for one in active]).ids, strict=True):
            row += new
    assert ids == expected
    assert decoder._known.cache.slots == 128  # of which the short rows were computed with 16, the fewest
    assert decoder.lengths == [len(prompt) + 8 for prompt in prompts]


def test_log_probabilities_are_the_log_softmax_of_the_scores(parameters, float64):
    doubled = map_leaves(lambda leaf: jnp.asarray(leaf, jnp.float64), parameters)
    decoder = JaxDecoder(CONFIG, doubled, dtype=jnp.dtype(jnp.float64))
    repeating = [[3, 4, 5, 6, 7] * 4, [2], [9, 8, 7, 6] * 5]
    for config in (DRAWN, GenerationConfig(temperature=0.0, repetition_penalty=0.8, guesses=2)):
        decoder.start(rows=3, slots=64)
        decoder.read(repeating)
        before = decoder.passes
        new = new_ids(decoder, config, steps=12, active=[True, False, True], num_logprobs=4)
        assert (decoder.passes - before < 12) == (config.guesses > 0)
        assert (new.ids[1], new.logprobs[1]) == ([], [])
        for row in (0, 2):
            assert [each.id for each in new.logprobs[row]] == new.ids[row]
            for place, given in enumerate(new.logprobs[row]):
                scores = full_scores(doubled, repeating[row] + new.ids[row][:place])
                expected = scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
                likeliest = np.argsort(-expected)[:4]
                assert given.logprob == pytest.approx(expected[given.id], abs=1e-11)
                assert [id for id, _ in given.top] == likeliest.tolist()
                np.testing.assert_allclose([one for _, one in given.top], expected[likeliest], rtol=0, atol=1e-11)


def test_guessing_ahead_changes_nothing_but_the_number_of_passes(decoder):
    repeating = [[3, 4, 5, 6, 7] * 6, [2], [9, 8, 7, 6] * 5]
    for settings in ({"temperature": 0.0}, {"temperature": 0.4, "repetition_penalty": 0.8}):
        config = GenerationConfig(max_new_tokens=37, **settings)
        before = decoder.passes
        expected = continued(decoder, repeating, config, context=90)
        plain, before = decoder.passes - before, decoder.passes
        guessed = continued(decoder, repeating, dataclasses.replace(config, guesses=4), context=90)
        assert guessed == expected
        assert decoder.passes - before < plain
    # Up to the last slot, and up to a stop id.
    config = GenerationConfig(max_new_tokens=300, temperature=0.0)
    room = SLOT_MULTIPLE - 5
    long = [(repeating[0] * 20)[:room]]
    expected = continued(decoder, long, config, context=SLOT_MULTIPLE)
    assert continued(decoder, long, dataclasses.replace(config, guesses=4), context=SLOT_MULTIPLE) == expected
    whole = greedy(decoder, repeating, max_new_tokens=20, stop_id=NEVER)
    stop_id = whole[0][6]
    for guesses in (0, 4):
        decoder.start(rows=3, slots=90)
        decoder.read(repeating)
        config = GenerationConfig(max_new_tokens=20, temperature=0.0, guesses=guesses)
        continuation = Continuation(decoder, config, context=90, stop_ids=(stop_id,))
        while continuation.is_going:
            continuation.step(7)
        assert [row.ids for row in continuation.rows] == [
            ids[: ids.index(stop_id)] if stop_id in ids else ids for ids in whole
        ]


@pytest.mark.parametrize(("room", "slots"), [(512, 1), (None, 3)], ids=["one room", "each its own"])
def test_fifty_prompts_of_unlike_length_share_their_compilations(decoder, room, slots):
    generator = random.Random(5)
    before = rooms._read._cache_size(), rooms._extend._cache_size()
    for _ in range(50):
        prompt = [generator.randrange(23) for _ in range(generator.randrange(1, 500))]
        config = GenerationConfig(max_new_tokens=4, temperature=0.0)
        continued(decoder, [prompt], config, context=room or len(prompt) + 4)
    after = rooms._read._cache_size(), rooms._extend._cache_size()
    # For each number of slots one, and one for each width of a bucket.
    assert after[0] - before[0] <= len(rooms.BUCKETS) * slots
    assert after[1] - before[1] <= slots


def test_adapters_beside_the_weights_generate_as_merged_ones(parameters):
    lora = LoraConfig(rank=2, alpha=4.0, dropout=0.5, targets=("q_proj", "v_proj", "down_proj"))
    tree = map_leaves(
        lambda leaf: leaf + np.random.default_rng(1).normal(size=leaf.shape).astype(np.float32),
        initial_adapters(CONFIG, lora, seed=3),
    )
    beside = JaxDecoder(CONFIG, parameters, adapters=tree, lora=lora)
    merged = JaxDecoder(CONFIG, merge(parameters, tree, lora))
    ids = greedy(beside, PROMPTS, max_new_tokens=12, stop_id=NEVER)
    assert ids == greedy(merged, PROMPTS, max_new_tokens=12, stop_id=NEVER)
    assert ids != greedy(JaxDecoder(CONFIG, parameters), PROMPTS, max_new_tokens=12, stop_id=NEVER)


def test_generation_in_bfloat16_keeps_its_scores_in_float32(parameters):
    decoder = JaxDecoder(CONFIG, parameters, dtype=jnp.dtype(jnp.bfloat16))
    decoder.start(rows=1, slots=16)
    decoder.read([[3, 4]])
    assert decoder._known.scores.dtype == jnp.float32
    assert decoder._known.cache.keys[0].dtype == jnp.bfloat16


def test_memory_is_steady_over_many_calls(decoder):
    decoder.start(rows=2, slots=64)
    decoder.read(PROMPTS[:2])
    for round_ in range(200):
        decoder.keep([1, 1])
        decoder.read([[3], [4]])
        if round_ == 20:
            held = len(jax.live_arrays())
    assert len(jax.live_arrays()) <= held
