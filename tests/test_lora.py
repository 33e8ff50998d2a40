"""Low-rank adapters: what gets one, the branch in the model, the merge, and the files of PEFT and MiniMind."""

import dataclasses
import json
import re
from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from minigpt_jax import objective
from minigpt_jax.adapter_tree import adapted_modules, adapter_count, adapter_shapes, merge
from minigpt_jax.config import PRESETS, ModelConfig, TrainConfig
from minigpt_jax.cost import parameter_count
from minigpt_jax.errors import UserError
from minigpt_jax.formats.adapters import Adapter, from_minimind, read_peft, to_minimind, without_factor, write_peft
from minigpt_jax.formats.names import flatten, map_leaves, table, unflatten
from minigpt_jax.initialization import initial_adapters, initial_parameters
from minigpt_jax.lora import adapter_masks, layer_adapters
from minigpt_jax.lora_config import TARGETS, LoraConfig
from minigpt_jax.model import model_graph

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=10, intermediate_size=32
)
SQUARE = dataclasses.replace(CONFIG, num_kv_heads=4, head_dim=6)
"""q, k, v and o are square here, as MiniMind wants them for an adapter."""
LORA = LoraConfig(rank=3, alpha=5.0, dropout=0.3, targets=tuple(TARGETS))
FEW = dataclasses.replace(LORA, targets=("o_proj", "down_proj"))
"""Two layers with inputs of unlike width: every mask takes a while to compile."""


def noisy(tree, *, dtype="float32", seed=0):
    """The tree moved by noise, so that no B is 0."""
    rng = np.random.default_rng(seed)
    return map_leaves(lambda leaf: (leaf + 0.1 * rng.standard_normal(leaf.shape)).astype(dtype), tree)


def adapters_of(model=CONFIG, lora=LORA, *, dtype="float32", seed=0):
    return noisy(initial_adapters(model, lora, seed=seed, dtype="float64"), dtype=dtype, seed=seed)


def base_of(model=CONFIG, *, dtype="float32"):
    return noisy(initial_parameters(model, initializer="scaled_normal", seed=0, dtype="float64"), dtype=dtype)


@cache
def compiled_logits(lora, dtype):
    graph = model_graph(CONFIG, dtype=jnp.dtype(dtype), kernel="reference")

    def forward(parameters, adapters, key):
        model, tokens = nnx.merge(graph, parameters), jnp.arange(18).reshape(2, 9)
        low_rank = None if adapters is None else layer_adapters(adapters, lora, dropout_key=key)
        options = {"segment_ids": jnp.ones_like(tokens), "positions": tokens % 9, "adapters": low_rank}
        return model.logits(model(tokens, **options))

    return jax.jit(forward)


def logits(parameters, *, adapters=None, lora=LORA, dtype="float32", key=None):
    """[S, V] of two rows of nine tokens; compiled, so that the tree arrives as JAX orders it."""
    return compiled_logits(lora, dtype)(map_leaves(jnp.asarray, parameters), adapters, key)


def assert_same(ours, theirs):
    ours, theirs = flatten(ours), flatten(theirs)
    assert ours.keys() == theirs.keys()
    assert [path for path, leaf in ours.items() if leaf.tobytes() != theirs[path].tobytes()] == []


# --- Config ---


def test_the_default_trains_458752_parameters_beside_minimind2_small():
    model = PRESETS["minimind2-small"]
    assert adapter_count(model, LoraConfig()) == 458_752
    assert round(100 * adapter_count(model, LoraConfig()) / parameter_count(model), 2) == 1.78


def test_every_linear_layer_of_a_block_is_a_target():
    config = dataclasses.replace(CONFIG, qk_norm=True, tie_word_embeddings=False)
    kernels = [entry.path.removesuffix(".kernel") for entry in table(config) if entry.path.endswith(".kernel")]
    assert [*adapted_modules(config.num_layers, tuple(TARGETS)), "lm_head"] == kernels


def test_targets_are_kept_in_the_order_of_the_forward_pass():
    assert LoraConfig(targets=("down_proj", "q_proj")) == LoraConfig(targets=("q_proj", "down_proj"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "LoRA rank must be at least 1, got 0"),
        ({"alpha": 0.0}, "LoRA alpha must be positive and finite, got 0.0"),
        ({"alpha": float("nan")}, "LoRA alpha must be positive and finite, got nan"),
        ({"alpha": float("inf")}, "LoRA alpha must be positive and finite, got inf"),
        ({"dropout": 1.0}, "LoRA dropout must be at least 0 and below 1, got 1.0"),
        ({"dropout": -0.1}, "LoRA dropout must be at least 0 and below 1, got -0.1"),
        ({"targets": ()}, "LoRA targets: none is named; choose from q_proj, "),
        ({"targets": ("q_proj", "lm_head")}, "LoRA targets: there is no 'lm_head' in a block; choose from q_proj, "),
        ({"targets": ("q_proj", "q_proj")}, "LoRA targets: it names q_proj twice"),
    ],
)
def test_a_value_that_cannot_work_is_refused(fields, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        LoraConfig(**fields)


def test_a_rank_above_a_side_of_a_target_is_refused():
    lora = LoraConfig(rank=21, targets=("q_proj", "k_proj"))
    with pytest.raises(
        UserError, match=r"rank 21 is larger than a side of layers.0.self_attn.k_proj, which is 24 x 20"
    ):
        adapter_count(CONFIG, lora)


# --- First adapters ---


def test_first_adapters_are_drawn_as_peft_draws_them():
    drawn = flatten(initial_adapters(PRESETS["tiny"], LORA, seed=0))
    assert {path: leaf.shape for path, leaf in drawn.items()} == adapter_shapes(PRESETS["tiny"], LORA)
    assert all(leaf.dtype == np.float32 for leaf in drawn.values())
    a = drawn["layers.1.mlp.down_proj.lora_a"]
    assert 0.99 * 384**-0.5 < np.abs(a).max() <= np.float32(384**-0.5)
    assert abs(a.mean()) < 4 * 384**-0.5 / np.sqrt(3 * a.size)
    assert not any(leaf.any() for path, leaf in drawn.items() if path.endswith("lora_b"))


def test_an_adapter_is_drawn_alike_whatever_others_there_are():
    few = flatten(initial_adapters(CONFIG, dataclasses.replace(LORA, targets=("up_proj",)), seed=3))
    every = flatten(initial_adapters(CONFIG, LORA, seed=3))
    assert_same(few, {path: every[path] for path in few})
    assert not np.array_equal(every["layers.0.mlp.up_proj.lora_a"], every["layers.1.mlp.up_proj.lora_a"])


# --- In the model ---


def test_first_adapters_change_no_logit_even_under_dropout():
    base, first = base_of(), initial_adapters(CONFIG, FEW, seed=0)
    expected = logits(base)
    np.testing.assert_array_equal(logits(base, adapters=first, lora=FEW), expected)
    np.testing.assert_array_equal(logits(base, adapters=first, lora=FEW, key=jax.random.key(0)), expected)


@pytest.mark.parametrize("target", TARGETS)
def test_each_adapter_acts_on_its_own_matrix(target, float64):
    base, every = base_of(dtype="float64"), flatten(adapters_of(dtype="float64"))
    alone = unflatten(
        {path: leaf if target in path or path.endswith("a") else 0 * leaf for path, leaf in every.items()}
    )
    ours = logits(base, adapters=alone, dtype="float64")
    np.testing.assert_allclose(ours, logits(merge(base, alone, LORA), dtype="float64"), rtol=0, atol=1e-13)
    assert np.abs(ours - logits(base, dtype="float64")).max() > 1e-4


def test_dropout_acts_only_with_a_key_and_a_rate():
    base, adapters = base_of(), adapters_of(lora=FEW)
    plain, key = logits(base, adapters=adapters, lora=FEW), jax.random.key(1)
    assert np.abs(logits(base, adapters=adapters, lora=FEW, key=key) - plain).max() > 1e-4
    without = dataclasses.replace(FEW, dropout=0.0)
    np.testing.assert_array_equal(logits(base, adapters=adapters, lora=without, key=key), plain)


def test_each_adapter_has_a_mask_of_its_own():
    masks = adapter_masks(CONFIG, FEW, num_positions=500, dropout_key=jax.random.key(0))
    assert [mask.shape for mask in masks] == [(500, 40), (500, 32), (500, 40), (500, 32)]
    assert all(abs(mask.mean() - 0.7) < 5 * np.sqrt(0.21 / mask.size) for mask in masks)
    assert len({np.asarray(mask).tobytes() for mask in masks}) == len(masks)


def test_model_and_adapters_do_not_draw_the_same_numbers(monkeypatch):
    keys = {}
    monkeypatch.setattr(
        objective, "layer_adapters", lambda tree, lora, *, dropout_key: keys.update(adapters=dropout_key)
    )
    monkeypatch.setattr(
        objective, "summed_loss", lambda *_, dropout_key, **__: keys.update(model=dropout_key) or jnp.zeros(())
    )
    arrays = objective.BatchArrays(*[jnp.zeros((1, 4), jnp.int32)] * 5)
    objective.make_objective(None, TrainConfig(stage="lora"))({}, {}, arrays, jax.random.key(0))
    of_masks = [jax.random.key_data(key) for key in jax.random.split(keys["model"], 64)]
    assert not any((jax.random.key_data(keys["adapters"]) == each).all() for each in of_masks)


def test_the_branch_computes_in_the_compute_dtype():
    tree = map_leaves(jnp.asarray, adapters_of())
    adapter = layer_adapters(tree, LORA)[1]["up_proj"]
    assert adapter.a.dtype == jnp.float32
    x = jnp.ones((4, 24), jnp.bfloat16)
    a, b = adapter.a.astype(jnp.bfloat16), adapter.b.astype(jnp.bfloat16)
    assert adapter(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(adapter(x), x @ a @ b * LORA.scale)


# --- Merge ---


def test_merged_float32_weights_give_the_logits_of_base_and_adapter():
    base, adapters = base_of(), adapters_of()
    ours, theirs = logits(merge(base, adapters, LORA)), logits(base, adapters=adapters)
    assert np.abs(ours - theirs).max() / max(1, np.abs(theirs).max()) <= 2e-6


def test_merge_sums_in_float32_and_casts_once():
    base = map_leaves(lambda leaf: leaf.astype(ml_dtypes.bfloat16), base_of())
    adapters = adapters_of()
    merged = merge(base, adapters, LORA)["layers"][1]["mlp"]["up_proj"]["kernel"]
    kernel, pair = base["layers"][1]["mlp"]["up_proj"]["kernel"], adapters["layers"][1]["mlp"]["up_proj"]
    exact = kernel.astype(np.float64) + LORA.scale * pair["lora_a"].astype(np.float64) @ pair["lora_b"]
    assert merged.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(merged, exact.astype(ml_dtypes.bfloat16))


def test_merge_leaves_the_base_alone():
    base = base_of()
    before = map_leaves(np.copy, base)
    merged = merge(base, adapters_of(), LORA)
    assert_same(base, before)
    assert merged["norm"]["weight"] is base["norm"]["weight"]


def test_adapters_merged_one_after_the_other_add_up():
    few = LoraConfig(rank=2, alpha=1.0, targets=("v_proj", "up_proj"))
    base, first, second = base_of(dtype="float64"), adapters_of(dtype="float64"), adapters_of(lora=few, dtype="float64")
    both = flatten(merge(merge(base, first, LORA), second, few))
    once, twice = flatten(merge(base, first, LORA)), flatten(merge(base, second, few))
    for path, kernel in flatten(base).items():
        np.testing.assert_allclose(both[path], once[path] + twice[path] - kernel, rtol=0, atol=1e-14)


# --- PEFT's directories ---


def written(directory, *, lora=LORA, fields=None, tensors=None):
    """A PEFT directory whose config has other `fields` and whose tensors went through `tensors`."""
    directory.mkdir(exist_ok=True)
    write_peft(directory, Adapter("here", lora, adapters_of(lora=lora), base="the base"))
    config, weights = directory / "adapter_config.json", directory / "adapter_model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | (fields or {})))
    if tensors is not None:
        save_file(tensors(load_file(weights)), weights)
    return directory


@pytest.mark.parametrize("lora", [LORA, LoraConfig(rank=2, targets=("v_proj",))])
def test_a_peft_directory_is_read_back_bit_for_bit(tmp_path, lora):
    read = read_peft(written(tmp_path / "adapter", lora=lora))
    assert (read.lora, read.base) == (lora, "the base")
    assert_same(read.tree, adapters_of(lora=lora))
    read.require_fit(CONFIG)


def test_peft_holds_a_and_b_transposed_under_its_names(tmp_path):
    tensors = load_file(written(tmp_path / "adapter") / "adapter_model.safetensors")
    pair = adapters_of()["layers"][1]["self_attn"]["o_proj"]
    prefix = "base_model.model.model.layers.1.self_attn.o_proj"
    np.testing.assert_array_equal(tensors[f"{prefix}.lora_A.weight"], pair["lora_a"].T)
    np.testing.assert_array_equal(tensors[f"{prefix}.lora_B.weight"], pair["lora_b"].T)


def test_rank_stabilised_lora_has_its_own_factor(tmp_path):
    read = read_peft(written(tmp_path / "adapter", fields={"use_rslora": True}))
    assert read.lora.scale == pytest.approx(5 / np.sqrt(3), rel=1e-15)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported; 'LORA' is"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS' is not supported; 'CAUSAL_LM' is"),
        ({"bias": "all"}, "bias 'all' is not supported; 'none' is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        ({"use_dora": True}, "use_dora True is not supported; adapters here have none"),
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out True is not supported"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern {'q_proj': 4} is not supported"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern {'q_proj': 4} is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save ['lm_head'] is not supported"),
        ({"layers_to_transform": [0]}, "layers_to_transform [0] is not supported"),
        ({"of_next_year": 1}, "of_next_year 1 is not supported"),
        ({"target_modules": "all-linear"}, "target_modules must be a list of names (q_proj, "),
        ({"target_modules": None}, "target_modules must be a list of names (q_proj, "),
        ({"target_modules": ["q_proj", "lm_head"]}, "LoRA targets: there is no 'lm_head' in a block"),
        ({"r": "3"}, "r must be an integer, got '3'"),
        ({"r": 3.0}, "r must be an integer, got 3.0"),
        ({"r": -1, "use_rslora": True}, "LoRA rank must be at least 1, got -1"),
        ({"use_rslora": "no"}, "use_rslora must be true or false, got 'no'"),
        ({"lora_alpha": 10**400}, "r or lora_alpha is beyond any float"),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path must be a string, got 5"),
        ({"lora_alpha": True}, "lora_alpha must be a number, got True"),
        ({"lora_alpha": 0}, "LoRA alpha must be positive and finite, got 0"),
    ],
)
def test_a_peft_config_that_cannot_be_honoured_is_refused(tmp_path, fields, message):
    with pytest.raises(UserError, match=re.escape(f"adapter_config.json: {message}")) as error:
        read_peft(written(tmp_path / "adapter", fields=fields))
    assert "\n" not in str(error.value)


NAME = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), f"{NAME} is missing"),
        (lambda t: (t.clear(), t.update(stray=np.zeros((1, 1), np.float32))), "stray is unexpected"),
        (
            lambda t: t.update({NAME.replace(".1.", ".2."): t[NAME]}),
            r"layers\.2\.self_attn\.q_proj\.lora_A\S* is missing",
        ),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[NAME]}), r"lm_head\S* is unexpected"),
        (lambda t: t.update({NAME: t[NAME][:2]}), rf"{NAME} is \[2, 24\], not \[3, 24\]"),
        (lambda t: t.update({NAME: t[NAME][:, :5]}), rf"{NAME} is \[3, 5\], not \[3, 24\]"),
        (lambda t: t.update({NAME: t[NAME][0]}), rf"{NAME} is \[24\], not a matrix"),
        (lambda t: t.update({NAME: t[NAME] * np.nan}), f"{NAME} holds values that are not finite"),
        (lambda t: t.update({NAME: t[NAME].astype(np.int32)}), f"{NAME} is int32"),
    ],
)
def test_peft_tensors_that_are_not_those_of_the_config_are_refused(tmp_path, change, message):
    def changed(tensors):
        change(tensors)
        return tensors

    with pytest.raises(UserError, match=message) as error:
        read_peft(written(tmp_path / "adapter", tensors=changed))
    assert "\n" not in str(error.value)


def test_fewer_targets_in_the_config_than_in_the_file_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"does not fit an adapter of rank 3 for q_proj in every block: .*unexpected"):
        read_peft(written(tmp_path / "adapter", fields={"target_modules": ["q_proj"]}))


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_peft_directory_with_half_of_it_is_refused(tmp_path, missing):
    written(tmp_path / "adapter")
    (tmp_path / "adapter" / missing).unlink()
    with pytest.raises(UserError, match=f"cannot read .*{missing}"):
        read_peft(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3}, "here does not fit the model: layers.2.self_attn.q_proj.lora_a is missing"),
        ({"num_layers": 1}, "here does not fit the model: layers.1.self_attn.q_proj.lora_a is unexpected"),
        (
            {"hidden_size": 48},
            r"here does not fit the model: layers.0.self_attn.q_proj.lora_a is \[24, 3\], not \[48, 3\]",
        ),
        ({"hidden_size": 2}, "here does not fit the model: rank 3 is larger than a side of layers.0.self_attn.q_proj"),
    ],
)
def test_an_adapter_of_another_model_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        Adapter("here", LORA, adapters_of()).require_fit(dataclasses.replace(CONFIG, **change))


# --- MiniMind's files ---


MINIMIND = LoraConfig(rank=3, alpha=7.0, targets=("q_proj", "o_proj"))


def minimind_tensors():
    return to_minimind(Adapter("here", MINIMIND, adapters_of(SQUARE, MINIMIND)))


@pytest.mark.parametrize("prefix", ["", "model.", "module.", "_orig_mod.model."])
def test_a_minimind_file_is_the_same_update_without_a_factor(prefix):
    tree = adapters_of(SQUARE, MINIMIND)
    read = from_minimind({prefix + name: tensor for name, tensor in minimind_tensors().items()}, where="lora.pth")
    assert (read.lora.scale, read.lora.targets, read.lora.rank) == (1.0, MINIMIND.targets, 3)
    base = base_of(SQUARE)
    ours, theirs = flatten(merge(base, read.tree, read.lora)), flatten(merge(base, tree, MINIMIND))
    for path, kernel in theirs.items():
        np.testing.assert_allclose(ours[path], kernel, rtol=0, atol=1e-6)


def test_a_minimind_file_has_its_names_and_layout():
    tensors, pair = minimind_tensors(), adapters_of(SQUARE, MINIMIND)["layers"][0]["self_attn"]["q_proj"]
    assert len(tensors) == 8
    np.testing.assert_array_equal(tensors["layers.0.self_attn.q_proj.lora.A.weight"], pair["lora_a"].T)
    scaled = pair["lora_b"].T * np.float32(7 / 3)
    np.testing.assert_array_equal(tensors["layers.0.self_attn.q_proj.lora.B.weight"], scaled)


def test_a_factor_of_1_is_written_and_read_bit_for_bit():
    adapter = without_factor(Adapter("here", MINIMIND, adapters_of(SQUARE, MINIMIND)))
    assert_same(from_minimind(to_minimind(adapter), where="here").tree, adapter.tree)


def test_what_minimind_would_leave_out_is_not_written():
    message = "here: MiniMind has adapters for square layers alone, and layers.0.self_attn.q_proj is 24 x 40"
    with pytest.raises(UserError, match=message):
        to_minimind(Adapter("here", LORA, adapters_of()))


A = "layers.1.self_attn.o_proj.lora.A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({A: None}, f"lora.pth does not fit an adapter of rank 3 for q_proj, o_proj in every block: {A} is missing"),
        ({A: np.ones((2, 24), np.float32)}, rf"{A} is \[2, 24\], not \[3, 24\]"),
        ({"layers.0.self_attn.q_proj.weight": np.ones((24, 24), np.float32)}, r"q_proj.weight is unexpected"),
    ],
)
def test_a_minimind_file_that_is_not_whole_is_refused(change, message):
    tensors = {name: tensor for name, tensor in (minimind_tensors() | change).items() if tensor is not None}
    with pytest.raises(UserError, match=message):
        from_minimind(tensors, where="lora.pth")


@pytest.mark.parametrize("first", [None, np.float32(3)])
def test_a_minimind_file_without_a_matrix_a_is_refused(first):
    tensors = {name: tensor for name, tensor in minimind_tensors().items() if not name.endswith(".A.weight")}
    tensors |= {} if first is None else {A: np.asarray(first)}
    with pytest.raises(UserError, match=r"lora.pth is no whole adapter: a lora.A.weight of shape \[rank, in\] is miss"):
        from_minimind(tensors, where="lora.pth")


def test_a_model_is_no_minimind_adapter():
    with pytest.raises(UserError, match=r"model.pth holds no adapter: it has no tensor that is named like layers.0"):
        from_minimind({"model.norm.weight": np.ones(3, np.float32)}, where="model.pth")
