"""Generation in both frameworks: the same scores with a cache as without, the same draws from the same numbers.

B rows  V vocabulary
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flax import nnx  # noqa: E402
from twins import SMALL, SMALL_3, random_parameters, torch_model  # noqa: E402

from minigpt_jax.formats.names import map_leaves  # noqa: E402
from minigpt_jax.generate import JaxDecoder  # noqa: E402
from minigpt_jax.generate import sampling_of as jax_sampling  # noqa: E402
from minigpt_jax.generation import Continuation, GenerationConfig  # noqa: E402
from minigpt_jax.model import model_graph  # noqa: E402
from minigpt_jax.sampling import sample as jax_sample  # noqa: E402
from minigpt_torch.generate import TorchDecoder  # noqa: E402
from minigpt_torch.generate import sampling_of as torch_sampling  # noqa: E402
from minigpt_torch.sampling import sample as torch_sample  # noqa: E402

pytestmark = pytest.mark.usefixtures("little_compiling")

NEVER = -1
PROMPTS = [[5, 9, 1, 7, 11, 30, 2], [2], [*range(3, 40)]]
GREEDY = {"temperature": 0.0}
SETTINGS = [
    GREEDY,
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 1.0},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.3, "top_p": 1.0, "min_p": 0.2},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.4},
    {**GREEDY, "repetition_penalty": 1.7},
    {"temperature": 1e-30, "top_p": 1.0},
    {"temperature": 1.0, "top_k": 1, "top_p": 1.0},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "top_p": 1.0, "min_p": 1.0},
    {**GREEDY, "guesses": 3},
    {"temperature": 0.8, "guesses": 5, "repetition_penalty": 0.9},
    {"temperature": 100.0, "top_k": 1000, "top_p": 1.0, "repetition_penalty": 0.5},
]


def decoders(config, dtype):
    parameters = random_parameters(config, dtype=dtype)
    placed = map_leaves(lambda leaf: jnp.asarray(leaf, dtype), parameters)
    return JaxDecoder(config, placed, dtype=jnp.dtype(dtype)), TorchDecoder(
        torch_model(config, parameters, dtype=dtype)
    )


def ids_of(decoder, settings, *, number=40):
    decoder.start(rows=len(PROMPTS), slots=128)
    decoder.read(PROMPTS)
    config = GenerationConfig(max_new_tokens=number, **settings)
    continuation = Continuation(decoder, config, context=128, stop_ids=(NEVER,))
    while continuation.is_going:
        continuation.step(16)
    return [row.ids for row in continuation.rows]


@pytest.mark.parametrize("config", [SMALL, SMALL_3], ids=["2-series", "3-series"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scores_with_a_cache_are_those_of_a_full_forward_in_both(config, dtype, float64, relative_error, bound):
    graph = model_graph(config, dtype=jnp.dtype(dtype), kernel="reference")
    model = nnx.merge(graph, map_leaves(lambda leaf: jnp.asarray(leaf, dtype), random_parameters(config, dtype=dtype)))
    exact = bound if dtype == "float64" else None
    for decoder in decoders(config, dtype):
        decoder.start(rows=3, slots=64)
        for part in (slice(0, 4), slice(4, 5), slice(5, 99)):
            decoder.read([prompt[part] for prompt in PROMPTS])
        scores = np.asarray(decoder._known.scores)
        longest = max(map(len, PROMPTS))
        for row, prompt in zip(scores, PROMPTS, strict=True):
            # All as long as the longest, so that one shape is compiled: no token sees those behind it.
            tokens = np.array([prompt + [0] * (longest - len(prompt))])
            hidden = model(tokens, segment_ids=np.ones_like(tokens), positions=np.arange(longest)[None])
            full = np.asarray(model.logits(hidden))[len(prompt) - 1]
            assert relative_error(row, full) <= (exact.sub_module if exact else 2e-6)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_same_seed_generates_the_same_tokens_in_both(settings, float64):
    both = decoders(SMALL, "float64")
    ours, theirs = (ids_of(decoder, settings) for decoder in both)
    assert ours == theirs
    assert both[0].passes == both[1].passes
    assert all(len(row) == 40 for row in ours)


@pytest.mark.parametrize("config", [SMALL, SMALL_3], ids=["2-series", "3-series"])
def test_greedy_tokens_are_the_same_in_float32(config):
    ours, theirs = (ids_of(decoder, GREEDY) for decoder in decoders(config, "float32"))
    assert ours == theirs
    assert len({tuple(row) for row in ours}) == len(PROMPTS)  # else constants would be compared


@pytest.mark.parametrize("settings", [GREEDY, {"temperature": 2.0, "guesses": 3}], ids=str)
def test_log_probabilities_are_the_same_in_both(settings, float64):
    config, given = GenerationConfig(**settings), []
    for decoder in decoders(SMALL, "float64"):
        decoder.start(rows=3, slots=128)
        decoder.read(PROMPTS)
        given.append(
            decoder.extend(
                [config] * 3,
                uniforms=np.full((3, 12), 0.3, np.float32),
                stop_ids=(NEVER,),
                is_active=[True, False, True],
                num_logprobs=6,
            )
        )
    ours, theirs = given
    assert ours.ids == theirs.ids
    assert [len(row) for row in ours.logprobs] == [12, 0, 12]
    for mine, other in zip(itertools.chain(*ours.logprobs), itertools.chain(*theirs.logprobs), strict=True):
        assert (mine.id, [id for id, _ in mine.top]) == (other.id, [id for id, _ in other.top])
        values = [[each.logprob, *(one for _, one in each.top)] for each in (mine, other)]
        np.testing.assert_allclose(*values, rtol=0, atol=1e-12)


def test_rows_that_rest_are_left_as_they_are_in_both(float64):
    config, uniforms = GenerationConfig(temperature=1.5, top_p=1.0), np.full((3, 5), 0.3, np.float32)
    given = []
    for decoder in decoders(SMALL, "float64"):
        decoder.start(rows=3, slots=128)
        decoder.read([PROMPTS[0], (), ()])
        decoder.read([(), PROMPTS[1], PROMPTS[2]])
        for active in ([False, False, True], [True, True, False]):
            new = decoder.extend([config] * 3, uniforms=uniforms, stop_ids=(NEVER,), is_active=active)
            given.append(new.ids)
        decoder.start(rows=3, slots=128)
        decoder.read(PROMPTS)
        given.append(decoder.extend([config] * 3, uniforms=uniforms, stop_ids=(NEVER,), is_active=[True] * 3).ids)
    assert given[:3] == given[3:]
    assert [*given[1][:2], given[0][2]] == given[2]


def drawn_by_both(scores, seen, configs, uniform):
    high = np.float64
    ours = jax_sample(jnp.asarray(scores), jnp.asarray(seen), jax_sampling(configs, dtype=high), jnp.asarray(uniform))
    tensors = [torch.from_numpy(each) for each in (scores, seen, uniform)]
    theirs = torch_sample(*tensors[:2], torch_sampling(configs, dtype=torch.float64, device="cpu"), tensors[2])
    assert np.asarray(ours).tolist() == theirs.tolist()
    return theirs.numpy()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_are_drawn_from_the_distribution_that_transformers_warps(settings, float64):
    transformers = pytest.importorskip("transformers")
    config = GenerationConfig(**{"top_p": 1.0, **settings})
    rng = np.random.default_rng(3)
    scores = rng.normal(scale=3.0, size=(1, 50))
    read = torch.tensor([[3, 17, 17, int(scores.argmax()), int(scores.argmin())]])
    seen = np.zeros((1, 50), bool)
    seen[0, read] = True
    warped = torch.from_numpy(scores)
    chain = [transformers.RepetitionPenaltyLogitsProcessor(config.repetition_penalty)]
    if config.temperature:
        chain.append(transformers.TemperatureLogitsWarper(config.temperature))
        chain += [transformers.TopKLogitsWarper(config.top_k)] if config.top_k else []
        chain += [transformers.TopPLogitsWarper(config.top_p)] if config.top_p < 1 else []
        chain += [transformers.MinPLogitsWarper(config.min_p)] if config.min_p else []
    for warp in chain:
        warped = warp(read, warped)
    probabilities = warped.softmax(-1)[0].numpy()
    if not config.temperature:
        probabilities = (probabilities == probabilities.max()).astype(float)
    count = 2000
    uniform = (np.arange(count) + 0.5) / count
    ids = drawn_by_both(np.repeat(scores, count, 0), np.repeat(seen, count, 0), [config] * count, uniform)
    drawn = np.bincount(ids, minlength=50) / count
    np.testing.assert_allclose(drawn, probabilities, rtol=0, atol=1 / count + 1e-9)


def test_each_row_has_its_own_settings_and_its_own_number(float64):
    rng = np.random.default_rng(4)
    scores, seen = rng.normal(size=(6, 30)), np.zeros((6, 30), bool)
    configs = [GenerationConfig(temperature=t, top_k=k, top_p=1.0) for t, k in itertools.product((0.0, 2.0), (0, 1, 3))]
    uniform = rng.uniform(size=6)
    together = drawn_by_both(scores, seen, configs, uniform)
    for row in range(6):
        part = slice(row, row + 1)
        assert drawn_by_both(scores[part], seen[part], [configs[row]], uniform[part]) == together[row]
    highest = scores.argmax(-1)
    assert (together[[0, 1, 2, 4]] == highest[[0, 1, 2, 4]]).all()


def test_the_last_number_below_one_draws_a_token_that_can_be(float64):
    scores = np.array([[0.0, 0.0, -np.inf, -np.inf], [5.0, 0.0, 0.0, 0.0]])
    uniform = np.full(2, 1 - 2.0**-24)
    configs = [GenerationConfig(temperature=1.0, top_p=1.0)] * 2
    assert drawn_by_both(scores, np.zeros((2, 4), bool), configs, uniform).tolist() == [1, 3]
    single = jax_sample(
        jnp.asarray(scores, jnp.float32), jnp.zeros((2, 4), bool), jax_sampling(configs, dtype=np.float32),
        jnp.asarray(uniform, jnp.float32),
    )  # fmt: skip
    assert np.asarray(single).tolist() == [1, 3]


def test_a_seen_id_of_negative_score_becomes_less_likely(float64):
    scores = np.array([[-1.0, -1.1, -5.0]])
    seen = np.array([[True, False, False]])
    config = GenerationConfig(temperature=0.0, repetition_penalty=1.5)
    assert drawn_by_both(scores, seen, [config], np.zeros(1)).tolist() == [1]
