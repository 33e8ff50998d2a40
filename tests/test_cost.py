"""Costs by formula against what XLA counts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from small_runs import write_documents

from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.cost import (
    parameter_count,
    rows_of_example,
    trained_parameter_count,
    training_bytes,
    training_flops_per_token,
)
from minigpt_jax.data.corpus import load_corpus
from minigpt_jax.defaults import resolve
from minigpt_jax.dry_run import SAMPLE_SIZES, expected_cost, rows_expected
from minigpt_jax.initialization import initial_parameters
from minigpt_jax.model import model_graph
from minigpt_jax.objective import BatchArrays, summed_loss
from minigpt_jax.tokenizer import load_tokenizer


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_parameter_formula_counts_what_is_drawn(qk_norm, tied):
    config = ModelConfig(
        vocab_size=30, hidden_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=10, intermediate_size=14,
        qk_norm=qk_norm, tie_word_embeddings=tied,
    )  # fmt: skip
    drawn = initial_parameters(config, initializer="xavier", seed=0)
    assert parameter_count(config) == sum(leaf.size for leaf in jax.tree.leaves(drawn))


@pytest.mark.parametrize("time", [16, 256])
def test_the_flops_formula_is_what_xla_counts_for_forward_and_backward(time):
    config = ModelConfig(vocab_size=1000, hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2)
    graph = model_graph(config, dtype=jnp.float32, kernel="reference")
    parameters = initial_parameters(config, initializer="xavier", seed=0)
    integers = jnp.zeros((2, time), jnp.int32)
    batch = BatchArrays(integers, integers, jnp.ones((2, time)), integers, integers)
    lowered = jax.jit(jax.grad(lambda tree: summed_loss(graph, tree, batch))).lower(parameters)
    counted = lowered.cost_analysis()["flops"] / (2 * time)
    # The reference kernel multiplies the masked half too: each position meets all `time` keys, and that is what the
    # formula gives for a row of 2 * time - 1. Above it XLA counts norms, activations, softmax: a few operations for
    # each element against 2 * 256 and more for each of a product.
    assert 1 < counted / training_flops_per_token(config, time=2 * time - 1) < 1.06


def test_the_memory_of_a_larger_batch_is_larger():
    sizes = [
        training_bytes(ModelConfig(), TrainConfig(dtype="float32", batch_size=batch_size)) for batch_size in (1, 2, 8)
    ]
    assert sizes == sorted(set(sizes))


def test_the_memory_holds_at_least_parameters_gradients_accumulator_and_two_moments():
    assert training_bytes(ModelConfig(), TrainConfig(batch_size=1)) > 5 * 4 * parameter_count(ModelConfig())


def test_a_stage_holds_moments_of_what_it_trains_and_one_copy_of_what_it_does_not():
    model = ModelConfig()
    trains = {stage: TrainConfig(stage=stage, batch_size=1) for stage in ("sft", "lora", "dpo", "distill")}
    trains["dpo"] = replace(trains["dpo"], reference="copy")
    teachers = {"distill": model}
    of_stage = {stage: training_bytes(model, train, teacher=teachers.get(stage)) for stage, train in trains.items()}
    copy = 4 * parameter_count(model)
    assert trained_parameter_count(model, TrainConfig(stage="lora")) == 458_752
    assert of_stage["distill"] == of_stage["sft"] + copy
    two_rows = training_bytes(model, TrainConfig(stage="sft", batch_size=2))
    assert of_stage["dpo"] == two_rows + copy
    assert of_stage["sft"] - of_stage["lora"] == 4 * copy - 5 * 4 * 458_752


@pytest.mark.usefixtures("run_environment")
@pytest.mark.parametrize(
    ("stage", "batching"),
    [(stage, batching) for stage in ("pretrain", "sft") for batching in ("packed", "bucketed", "padded")]
    + [("dpo", "bucketed"), ("dpo", "padded")],
)
def test_the_size_of_the_sample_is_that_of_one_pass_over_it(stage, batching):
    init_from = None if stage == "pretrain" else "out/base"
    train = resolve(TrainConfig(stage=stage, init_from=init_from, batching=batching), accelerator=None)
    tokenizer = load_tokenizer()
    source = load_corpus(train, tokenizer, model_vocab_size=tokenizer.vocab_size).training
    tokens, records = SAMPLE_SIZES[train.record_form]
    expected = rows_expected(train, tokens=tokens / rows_of_example(train), records=records)
    tolerance = 0.3 if batching == "bucketed" else 0.05  # what of bucketed rows is real is a guess
    assert expected == pytest.approx(source.batches_per_epoch * train.batch_size, rel=tolerance)


@pytest.mark.parametrize("name", ["DATA.JSONL", "data.txt"])
def test_a_file_that_is_no_archive_costs_its_own_size(tmp_path, name):
    def updates(name: str) -> int:
        data = str(write_documents(tmp_path / name, count=400))
        config = TrainConfig(data=(data,), batch_size=1, max_seq_len=32)
        cost = expected_cost(config, accelerator=None, matmul_flops=lambda dtype: 1e9, open_model=lambda _: None)
        return cost["updates"]

    assert updates(name) == updates("data.jsonl")
