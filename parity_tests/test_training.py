"""Whole training steps on both sides: every parameter and slot after 1, 2, 10 and 200 updates, and what is skipped.

The two schedules are compared rate by rate; both sides' dropout is given the same masks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from twins import (  # noqa: E402
    SMALL,
    SMALL_3,
    TOTAL,
    Pair,
    jax_batch,
    random_batch,
    random_parameters,
    shared_masks,
    torch_batch,
    torch_model,
    training,
)

from minigpt_jax import objective as jax_objective  # noqa: E402
from minigpt_jax.model import model_graph  # noqa: E402
from minigpt_jax.optimizer import make_schedule  # noqa: E402
from minigpt_torch import objective as torch_objective  # noqa: E402
from minigpt_torch.optimizer import learning_rate  # noqa: E402


def micro_batch(model, number):
    return random_batch(model, seed=number, rows=2, time=19)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "model", [pytest.param(SMALL, id="2-series"), pytest.param(SMALL_3, id="3-series", marks=pytest.mark.slow)]
)
def test_every_parameter_and_slot_is_the_same_after_1_2_10_and_200_updates(
    model, optimizer, float64, bound, relative_error
):
    pair = Pair(model, training(optimizer=optimizer))
    worst = {}
    for number in range(400):
        pair.train(micro_batch(model, number))
        updates = (number + 1) / 2
        if updates in (1, 2, 10, 200):
            worst[updates] = max(pair.errors(relative_error).values())
    assert int(pair.ours.opt_state.gradient_step) == 200
    assert worst[1] <= bound.update
    assert max(worst.values()) <= bound.trajectory


def test_losses_stay_together_for_200_updates_in_float32(bound_float32, relative_error):
    pair = Pair(SMALL, training(dtype="float32"))
    differences = []
    for number in range(400):
        ours, theirs = pair.train(micro_batch(SMALL, number))
        differences.append(abs(float(ours.loss_sum) - theirs.loss_sum) / theirs.loss_sum)
        if number == 1:
            first = max(pair.errors(relative_error).values())
    assert first <= bound_float32.update
    assert max(differences) <= bound_float32.trajectory


@pytest.mark.parametrize("bad", [0, 1, 4])
def test_both_sides_skip_a_micro_batch_that_is_not_finite(bad, float64, bound, relative_error):
    pair = Pair(SMALL, training(accumulation_steps=3))
    for number in range(7):
        tokens, targets, weights, *rest = micro_batch(SMALL, number)
        if number == bad:
            weights = np.where(weights > 0, np.float32(np.inf), 0)
        ours, theirs = pair.train((tokens, targets, weights, *rest))
        assert bool(ours.skipped) == theirs.skipped == (number == bad)
    assert int(pair.ours.opt_state.gradient_step) == pair.theirs.updates == 2
    assert max(pair.errors(relative_error).values()) <= bound.update


def test_both_sides_skip_a_micro_batch_without_supervised_tokens(float64, bound, relative_error):
    pair = Pair(SMALL, training())
    for number in range(4):
        tokens, targets, weights, *rest = micro_batch(SMALL, number)
        ours, theirs = pair.train((tokens, targets, weights * (number != 1), *rest))
        assert bool(ours.skipped) == theirs.skipped == (number == 1)
    assert max(pair.errors(relative_error).values()) <= bound.update


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_both_sides_refuse_an_update_that_would_not_be_finite(optimizer, float64, bound, relative_error):
    pair = Pair(SMALL, training(accumulation_steps=1, optimizer=optimizer))
    pair.train(micro_batch(SMALL, 0))
    pair.ours = pair.ours._replace(learning_rate_scale=jnp.full((), np.inf))
    pair.theirs.learning_rate_scale = np.inf
    before = pair.trees()
    ours, theirs = pair.train(micro_batch(SMALL, 1))
    assert bool(ours.skipped)
    assert theirs.skipped
    for old, new in zip(before, pair.trees(), strict=True):
        assert all(np.array_equal(old[path], new[path]) for path in old)
    # What the trees do not hold, the rule's own count, was put back as well: the next update is the same.
    pair.ours = pair.ours._replace(learning_rate_scale=jnp.ones(()))
    pair.theirs.learning_rate_scale = 1.0
    pair.train(micro_batch(SMALL, 2))
    assert max(pair.errors(relative_error).values()) <= bound.update


def test_both_sides_refuse_a_last_partial_window_that_would_not_be_finite(float64):
    pair = Pair(SMALL, training(accumulation_steps=3))
    pair.train(micro_batch(SMALL, 0))
    pair.ours = pair.ours._replace(learning_rate_scale=jnp.full((), np.inf))
    pair.theirs.learning_rate_scale = np.inf
    before = pair.trees()
    assert pair.flush() is None
    for old, new in zip(before, pair.trees(), strict=True):
        assert all(np.array_equal(old[path], new[path]) for path in old)


def test_a_last_partial_window_is_the_same_update(float64, bound, relative_error):
    pair = Pair(SMALL, training(accumulation_steps=4))
    for number in range(6):
        pair.train(micro_batch(SMALL, number))
    pair.flush()
    assert int(pair.ours.opt_state.gradient_step) == pair.theirs.updates == 2
    assert max(pair.errors(relative_error).values()) <= bound.update


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 7, TOTAL])
def test_the_schedule_is_the_same_table(schedule, warmup, float64, bound):
    config = training(schedule=schedule, warmup_steps=warmup)
    rate = make_schedule(config, total_updates=TOTAL)
    for count in (0, 1, 6, 7, 8, 100, 168, 169, 209, 210, 300):
        ours = float(rate(jnp.asarray(count, jnp.int32)))
        assert abs(ours - learning_rate(count, config, total_updates=TOTAL)) <= bound.sub_module


def test_dropout_with_shared_masks_is_the_same_function(float64, bound, relative_error):
    parameters, arrays = random_parameters(SMALL), random_batch(SMALL)
    graph = model_graph(SMALL, dtype=jnp.dtype("float64"), kernel="blocked")
    key, rate = jax.random.key(3), 0.3
    masks = shared_masks(SMALL, training(dropout=rate), key=key, num_positions=arrays[0].size)
    ours = jax_objective.summed_loss(
        graph, jax.tree.map(jnp.asarray, parameters), jax_batch(arrays), dropout_rate=rate, dropout_key=key
    )
    twin = torch_model(SMALL, parameters)
    theirs = torch_objective.summed_loss(twin, torch_batch(arrays), dropout_rate=rate, dropout_masks=masks.model)
    without = torch_objective.summed_loss(twin, torch_batch(arrays))
    assert relative_error(ours, theirs.detach()) <= bound.gradient
    assert abs(theirs.item() - without.item()) > 1e-3
