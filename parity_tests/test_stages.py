"""The stages after pretraining on both sides: their sums and gradients, 50 updates, and what stays frozen.

A window of two micro-batches holds, after the first of them, exactly that one's gradient.
"""

import dataclasses

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from twins import SMALL, SMALL_3, Pair, random_batch, shared_masks, training  # noqa: E402

from minigpt_jax.adapter_tree import adapter_shapes  # noqa: E402
from minigpt_jax.lora_config import TARGETS  # noqa: E402

pytestmark = pytest.mark.usefixtures("many_small_steps")

ROWS, TIME = 4, 17
TEACHER = dataclasses.replace(SMALL, hidden_size=64, num_layers=1)
SFT = training(stage="sft")
LORA = training(stage="lora", lora_rank=4, lora_dropout=0.4, dropout=0.1)
LORA_EVERYWHERE = training(stage="lora", lora_rank=4, lora_dropout=0.0, lora_targets=tuple(TARGETS))
DPO = training(stage="dpo")
DPO_COPY = training(stage="dpo", reference="copy", label_smoothing=0.1, dropout=0.1)
DISTILL = training(stage="distill", distill_alpha=0.3, dropout=0.1)

CASES = [
    pytest.param(SMALL, SFT, None, id="sft"),
    pytest.param(SMALL, LORA, SMALL, id="lora"),
    pytest.param(SMALL_3, LORA_EVERYWHERE, SMALL_3, id="lora-3-series", marks=pytest.mark.slow),
    pytest.param(SMALL, DPO, None, id="dpo-reference-in-the-batch"),
    pytest.param(SMALL, DPO_COPY, SMALL, id="dpo-reference-copied"),
    pytest.param(SMALL, DISTILL, TEACHER, id="distill"),
]
"""(model, training, shape of what is frozen). Where something is dropped, both sides are given the same masks."""


def micro_batch(model, config, number):
    """Rows of the stage; in dpo every third batch lacks a pair, as the last of a pass does."""
    arrays = random_batch(model, seed=number, rows=ROWS, time=TIME)
    if config.stage != "dpo":
        return arrays
    tokens, targets, weights, *places = arrays
    is_row = np.ones(ROWS, bool)
    is_row[[ROWS // 2 - 1, ROWS - 1]] = number % 3 != 0
    arrays = (tokens, targets, weights * is_row[:, None], *places)
    if config.reference == "copy":
        return arrays
    reference = -np.random.default_rng(number).uniform(20, 60, ROWS)
    return *arrays, reference * is_row


def sums_of(metrics):
    """What the objective said of a micro-batch."""
    return {"loss": metrics.loss_sum, "terms": metrics.loss_terms, **metrics.figures}


def assert_near(ours, theirs, bound, relative_error):
    assert ours.keys() == theirs.keys()
    assert {name: error for name in ours if (error := relative_error(ours[name], theirs[name])) > bound} == {}


def gradients_of(trees):
    start = "optimizer.gradient_sums."
    return {path.removeprefix(start): leaf for path, leaf in trees.items() if path.startswith(start)}


class Drill:
    """A run on both sides over seven batches in turn, each with its own masks."""

    def __init__(self, model, config, frozen):
        self.pair = Pair(model, config, frozen=frozen)
        keys = [jax.random.key(number) for number in range(7)]
        masks = [shared_masks(model, config, key=key, num_positions=ROWS * TIME) for key in keys]
        self.given = [(micro_batch(model, config, number), keys[number], masks[number]) for number in range(7)]

    def train(self, number):
        """The sums of both sides."""
        arrays, key, masks = self.given[number % 7]
        return map(sums_of, self.pair.train(arrays, key=key, masks=masks))


def assert_first_micro_batch_is_the_same(drill, bound, relative_error):
    """Loss, terms, every figure and every gradient."""
    assert_near(*drill.train(0), bound, relative_error)
    ours, theirs = map(gradients_of, drill.pair.trees())
    assert all(np.any(gradient) for gradient in ours.values())
    assert_near(ours, theirs, bound, relative_error)


@pytest.mark.parametrize(("model", "config", "frozen"), CASES)
def test_sums_and_every_gradient_are_the_same(model, config, frozen, float64, bound, relative_error):
    assert_first_micro_batch_is_the_same(Drill(model, config, frozen), bound.gradient, relative_error)


@pytest.mark.parametrize(("model", "config", "frozen"), CASES)
def test_sums_and_every_gradient_are_the_same_in_float32(model, config, frozen, bound_float32, relative_error):
    one_block, kept_block = (shape and dataclasses.replace(shape, num_layers=1) for shape in (model, frozen))
    config = dataclasses.replace(config, dtype="float32", dropout=0.0)
    assert_first_micro_batch_is_the_same(Drill(one_block, config, kept_block), bound_float32.gradient, relative_error)


@pytest.mark.parametrize(("model", "config", "frozen"), CASES)
def test_every_parameter_and_slot_is_the_same_after_50_updates(model, config, frozen, float64, bound, relative_error):
    drill = Drill(model, config, frozen)
    for number in range(100):
        assert_near(*drill.train(number), bound.trajectory, relative_error)
    assert int(drill.pair.ours.opt_state.gradient_step) == drill.pair.theirs.updates == 50
    assert max(drill.pair.errors(relative_error).values()) <= bound.trajectory


@pytest.mark.parametrize(("model", "config", "frozen"), [case for case in CASES if case.values[2] is not None])
def test_what_is_frozen_has_no_gradient_and_does_not_change(model, config, frozen, float64):
    drill = Drill(model, config, frozen)
    pair = drill.pair
    ours_before = jax.device_get(pair.ours_frozen)
    theirs_before = {name: leaf.clone() for name, leaf in pair.theirs_frozen.state_dict().items()}
    for number in range(4):
        drill.train(number)
    assert int(pair.ours.opt_state.gradient_step) == pair.theirs.updates == 2
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, ours_before, jax.device_get(pair.ours_frozen))))
    for name, leaf in pair.theirs_frozen.named_parameters():
        assert torch.equal(leaf, theirs_before[name])
        assert not leaf.requires_grad
        assert leaf.grad is None


def test_in_lora_the_adapters_alone_are_trained(float64):
    pair = Pair(SMALL, LORA, frozen=SMALL)
    expected = adapter_shapes(SMALL, LORA.lora).keys()
    for trees in pair.trees():
        assert gradients_of(trees).keys() == expected
    assert pair.theirs.trained.keys() == expected
