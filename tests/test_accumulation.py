"""One update is the mean over its window's tokens, however the window is cut; what is not finite changes nothing.

B batch  T time
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minigpt_jax import objective as objective_room
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.initialization import initial_parameters
from minigpt_jax.model import model_graph
from minigpt_jax.objective import BatchArrays
from minigpt_jax.train_step import init_state, make_flush_step, make_train_step

MODEL = ModelConfig(
    vocab_size=13, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, intermediate_size=6
)
TIME = 5
GRAPH = model_graph(MODEL, dtype=jnp.float64, kernel="reference")


def train_config(accumulation_steps):
    return TrainConfig(
        learning_rate=0.01, warmup_steps=2, accumulation_steps=accumulation_steps, weight_decay=0.1, grad_clip=0.5
    )


@cache
def compiled_step(accumulation_steps):
    return make_train_step(GRAPH, train_config(accumulation_steps), total_updates=10)


@cache
def compiled_flush():
    return make_flush_step(train_config(1), total_updates=10)


def fresh_state(accumulation_steps):
    drawn = initial_parameters(MODEL, initializer="xavier", seed=0, dtype="float64")
    return init_state(jax.tree.map(jnp.asarray, drawn), train_config(accumulation_steps), total_updates=10)


def rows(number, *, seed=0, weights=None):
    """`number` rows with ragged loss weights; the first row of every eight has none."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, MODEL.vocab_size, (2, number, TIME)).astype(np.int32)
    if weights is None:
        weights = (np.arange(TIME) < rng.integers(0, TIME + 1, (number, 1))).astype(np.float64)
        weights[::8] = 0
    positions = np.tile(np.arange(TIME, dtype=np.int32), (number, 1))
    return BatchArrays(tokens, targets, weights, np.zeros_like(tokens), positions)


def part(batch, start, end):
    return jax.tree.map(lambda array: array[start:end], batch)


def padded(batch):
    """The batch with unsupervised rows up to 32, so that whole windows share one compilation."""
    return jax.tree.map(lambda array: np.pad(array, ((0, 32 - len(array)), (0, 0))), batch)


def run(micro_batches, *, accumulation_steps, state=None, flush=False):
    """The state after these micro-batches, as NumPy, and the metrics of each."""
    state = fresh_state(accumulation_steps) if state is None else jax.tree.map(jnp.asarray, state)
    metrics = []
    for micro_batch in micro_batches:
        arrays = jax.tree.map(jnp.asarray, micro_batch)
        state, reported = compiled_step(accumulation_steps)(state, arrays, jax.random.key(0))
        metrics.append(jax.device_get(reported))
    if flush:
        state, _ = compiled_flush()(state)
    return jax.tree.map(np.array, state), metrics


def largest_difference(left, right):
    return max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))


def as_bytes(tree):
    return [leaf.tobytes() for leaf in jax.tree.leaves(tree)]


# --- Cutting a window ---


def test_1_x_32_is_4_x_8_is_32_x_1_with_ragged_masks_and_a_partial_last_window(float64):
    data, count = rows(72), 72  # Two windows of 32 rows and one of 8.
    whole, _ = run([part(data, 0, 32), part(data, 32, 64), padded(part(data, 64, 72))], accumulation_steps=1)
    differences = {}
    for size, accumulation_steps in ((8, 4), (1, 32)):
        pieces = [part(data, start, start + size) for start in range(0, count, size)]
        # A row without tokens is rejected alone and does not count, so the windows of single rows are cut by hand.
        if size == 1:
            state = None
            for start in range(0, count, 32):
                window = pieces[start : start + 32]
                state, _ = run(window, accumulation_steps=accumulation_steps, state=state, flush=True)
        else:
            state, _ = run(pieces, accumulation_steps=accumulation_steps, flush=True)
        assert state.opt_state.gradient_step == whole.opt_state.gradient_step == 3
        differences[f"{accumulation_steps} x {size}"] = largest_difference(
            (state.parameters, state.opt_state), (whole.parameters, whole.opt_state)
        )
    print("largest difference from 1 x 32 in parameters, moments, counters:", differences)
    assert max(differences.values()) <= 1e-12


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    weights=st.lists(st.sampled_from([0.0, 1.0]), min_size=8 * TIME, max_size=8 * TIME).filter(any),
    seed=st.integers(0, 1000),
)
def test_any_mask_gives_one_update_however_the_rows_are_cut(weights, seed, float64):
    data = rows(8, seed=seed, weights=np.array(weights).reshape(8, TIME))
    whole, _ = run([padded(data)], accumulation_steps=1)
    single, _ = run([part(data, row, row + 1) for row in range(8)], accumulation_steps=32, flush=True)
    assert largest_difference(whole.parameters, single.parameters) <= 1e-12


def test_one_left_over_micro_batch_is_flushed_with_its_own_tokens(float64):
    data = rows(40)
    whole, _ = run([part(data, 0, 32), padded(part(data, 32, 40))], accumulation_steps=1)
    pieces = [part(data, start, start + 8) for start in range(0, 40, 8)]
    flushed, _ = run(pieces, accumulation_steps=4, flush=True)
    assert largest_difference(whole.parameters, flushed.parameters) <= 1e-12


def test_after_a_flush_the_window_is_empty(float64):
    flushed, _ = run([part(rows(8), 0, 8)], accumulation_steps=4, flush=True)
    assert (flushed.opt_state.mini_step, flushed.opt_state.gradient_step) == (0, 1)
    assert (
        largest_difference(flushed.opt_state.acc_grads, jax.tree.map(np.zeros_like, flushed.opt_state.acc_grads)) == 0
    )


def test_nothing_moves_before_the_last_micro_batch_of_a_window(float64):
    before, _ = run([], accumulation_steps=4)
    data = rows(32)
    after, metrics = run([part(data, start, start + 8) for start in (0, 8, 16)], accumulation_steps=4)
    assert as_bytes((after.parameters, after.opt_state.inner_opt_state)) == as_bytes(
        (before.parameters, before.opt_state.inner_opt_state)
    )
    assert [int(reported.updates) for reported in metrics] == [0, 0, 0]


def test_the_last_micro_batch_of_a_window_moves_every_parameter(float64):
    data = rows(32)
    before, _ = run([], accumulation_steps=4)
    after, metrics = run([part(data, start, start + 8) for start in (0, 8, 16, 24)], accumulation_steps=4)
    assert int(metrics[-1].updates) == 1
    assert all(
        (a != b).any()
        for a, b in zip(jax.tree.leaves(after.parameters), jax.tree.leaves(before.parameters), strict=True)
    )


def test_a_negative_zero_survives_inside_a_window(float64):
    state, _ = run([], accumulation_steps=4)
    state.parameters["norm"]["weight"][0] = -0.0
    after, _ = run([rows(8)], accumulation_steps=4, state=state)
    assert np.signbit(after.parameters["norm"]["weight"][0])


# --- What is rejected ---

POISONS = {"loss and gradient are NaN": 1, "gradient is NaN, loss is finite": 2, "loss is infinite, gradient is not": 3}


@pytest.fixture(scope="module", autouse=True)
def _loss_that_can_be_poisoned():
    """Lets segment_ids[0, 0], which is 0 in all rows here, choose a poison for the micro-batch."""
    summed_loss = objective_room.summed_loss

    def poisoned_loss(graph, parameters, batch, **options):
        poison = batch.segment_ids[0, 0]
        loss = summed_loss(graph, parameters, batch._replace(segment_ids=jnp.zeros_like(batch.segment_ids)), **options)
        first = parameters["norm"]["weight"][0]
        root = jnp.sqrt(jnp.where(poison == 2, 0 * first, 1.0))  # At 0 the root is 0 and its slope is infinite.
        loss = loss + jnp.where(poison == 2, root, 0)
        return loss + jnp.where(poison == 1, jnp.nan, 0) * first + jnp.where(poison == 3, jnp.inf, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective_room, "summed_loss", poisoned_loss)
        yield


def poisoned(batch, poison):
    segment_ids = batch.segment_ids.copy()
    segment_ids[0, 0] = poison
    return batch._replace(segment_ids=segment_ids)


def without_tokens(batch):
    return batch._replace(loss_weights=np.zeros_like(batch.loss_weights))


def test_a_rejected_micro_batch_leaves_no_trace_wherever_it_stands(float64):
    data = rows(32)
    good = [part(data, start, start + 8) for start in (0, 8, 16, 24)]
    bad = {name: poisoned(rows(8, seed=9), poison) for name, poison in POISONS.items()}
    bad["no supervised token"] = without_tokens(rows(8, seed=9))
    # The second window shows what the accumulators kept.
    expected, _ = run(good + good, accumulation_steps=4)
    for name, micro_batch in bad.items():
        for place in range(5):
            state, metrics = run([*good[:place], micro_batch, *good[place:], *good], accumulation_steps=4)
            assert as_bytes(state) == as_bytes(expected), f"{name}, before micro-batch {place}"
            assert [bool(reported.skipped) for reported in metrics] == [number == place for number in range(9)], name


@cache
def compiled_gradient():
    return jax.jit(
        lambda parameters, batch: jax.value_and_grad(lambda tree: objective_room.summed_loss(GRAPH, tree, batch))(
            parameters
        )
    )


@pytest.mark.parametrize(("name", "poison"), POISONS.items())
def test_the_poisons_are_what_their_names_say(name, poison, float64):
    batch = jax.tree.map(jnp.asarray, poisoned(rows(8), poison))
    loss, gradient = jax.device_get(compiled_gradient()(fresh_state(1).parameters, batch))
    is_finite = (np.isfinite(loss), all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)))
    assert is_finite == {1: (False, False), 2: (True, False), 3: (False, True)}[poison], name


def test_a_rejected_first_micro_batch_after_an_update_is_no_update(float64):
    data = rows(32)
    pieces = [part(data, start, start + 8) for start in (0, 8, 16, 24)]
    _, metrics = run([*pieces, poisoned(pieces[0], 1), pieces[0]], accumulation_steps=4)
    assert [(int(reported.updates), bool(reported.skipped)) for reported in metrics[3:]] == [
        (1, False),
        (1, True),
        (1, False),
    ]


@pytest.mark.parametrize("spoil", [without_tokens, lambda batch: poisoned(batch, 1), lambda batch: poisoned(batch, 3)])
def test_a_skipped_step_decays_no_weight(spoil, float64):
    before, _ = run([rows(32)], accumulation_steps=1)
    after, _ = run([spoil(rows(32, seed=1))], accumulation_steps=1, state=before)
    assert as_bytes(after) == as_bytes(before)


# --- The factor on the learning rate ---


def test_the_learning_rate_scale_is_a_factor_on_the_whole_update(float64):
    start, _ = run([], accumulation_steps=1)
    full, full_metrics = run([part(rows(32), 0, 32)], accumulation_steps=1, state=start)
    half_start = start._replace(learning_rate_scale=np.float64(0.5))
    half, half_metrics = run([part(rows(32), 0, 32)], accumulation_steps=1, state=half_start)
    moved = [
        jax.tree.map(lambda after, before: after - before, state.parameters, start.parameters) for state in (full, half)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a / 2, rtol=0, atol=1e-15), *moved)
    assert half_metrics[0].learning_rate == full_metrics[0].learning_rate / 2


def test_the_reported_rate_is_that_of_the_update_in_progress(float64):
    _, metrics = run([part(rows(32), 0, 32)] * 4, accumulation_steps=1)
    # Warm-up 2 of peak 0.01, then a cosine over the other 8 updates to a tenth.
    expected = [0.01 / 3, 0.02 / 3, 0.01, 0.001 + 0.009 * (1 + np.cos(np.pi / 8)) / 2]
    np.testing.assert_allclose([reported.learning_rate for reported in metrics], expected, rtol=1e-14)
