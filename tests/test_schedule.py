"""The learning rate at every point that has gone wrong somewhere."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigpt_jax.config import TrainConfig
from minigpt_jax.optimizer import make_schedule
from minigpt_jax.schedule import learning_rate_at


def rate(count, schedule="cosine", *, warmup, total, ratio=0.1):
    config = TrainConfig(learning_rate=1.0, warmup_steps=warmup, schedule=schedule, min_lr_ratio=ratio)
    return learning_rate_at(count, config, total_updates=total)


# (finished updates, rate) with warm-up 4 and length 24; the wsd schedule falls over the last round(24 / 5) = 5.
TABLES = {
    "cosine": [(0, 0.2), (3, 0.8), (4, 1.0), (14, 0.55), (24, 0.1)],
    "wsd": [(0, 0.2), (4, 1.0), (19, 1.0), (20, 0.82), (24, 0.1)],
    "constant": [(0, 0.2), (3, 0.8), (4, 1.0), (14, 1.0), (24, 1.0)],
}


@pytest.mark.parametrize("schedule", TABLES)
def test_each_schedule_has_its_five_known_points(schedule):
    rates = [float(rate(count, schedule, warmup=4, total=24)) for count, _ in TABLES[schedule]]
    assert rates == pytest.approx([expected for _, expected in TABLES[schedule]], abs=1e-15)


def test_the_last_update_of_a_cosine_run_is_just_above_the_floor():
    assert 0.1 < rate(23, warmup=4, total=24) < 0.11


@pytest.mark.parametrize("schedule", TABLES)
def test_without_warm_up_the_first_update_has_the_peak_rate(schedule):
    assert rate(0, schedule, warmup=0, total=10) == 1


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_a_run_that_is_all_warm_up_rises_to_its_last_update(schedule):
    rates = rate(np.arange(5), schedule, warmup=5, total=5)
    np.testing.assert_allclose(rates, [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6], rtol=1e-15)


@pytest.mark.parametrize("schedule", TABLES)
@pytest.mark.parametrize(("warmup", "expected"), [(0, 1.0), (1, 0.5)])
def test_a_run_of_one_update_has_a_rate(schedule, warmup, expected):
    assert rate(0, schedule, warmup=warmup, total=1) == expected


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_past_the_end_the_rate_stays_at_the_floor(schedule):
    np.testing.assert_allclose(rate(np.array([24, 25, 10**6]), schedule, warmup=4, total=24), 0.1, rtol=1e-14)


@given(
    schedule=st.sampled_from(sorted(TABLES)),
    warmup=st.integers(0, 50),
    total=st.integers(1, 60),
    ratio=st.floats(0, 1),
)
def test_the_rate_after_warm_up_stays_between_floor_and_peak(schedule, warmup, total, ratio):
    rates = rate(np.arange(warmup, warmup + total + 2), schedule, warmup=warmup, total=total, ratio=ratio)
    assert ((ratio - 1e-15 <= rates) & (rates <= 1 + 1e-15)).all()


@pytest.mark.parametrize("schedule", TABLES)
def test_the_traced_schedule_is_the_numpy_formula_in_float64(schedule, float64):
    config = TrainConfig(learning_rate=3e-3, warmup_steps=7, schedule=schedule)
    counts = np.arange(60)
    traced = [make_schedule(config, total_updates=50)(jnp.int32(count)) for count in counts]
    np.testing.assert_allclose(traced, learning_rate_at(counts, config, total_updates=50), rtol=1e-14)


def test_the_traced_schedule_is_the_numpy_formula_in_float32():
    config = TrainConfig(learning_rate=3e-3, warmup_steps=7)
    counts = np.arange(60)
    traced = make_schedule(config, total_updates=50)(jnp.asarray(counts))
    np.testing.assert_allclose(traced, learning_rate_at(counts, config, total_updates=50), rtol=1e-6)
