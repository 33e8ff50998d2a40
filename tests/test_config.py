"""Presets, validation, JSON."""

import json
import math
import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigpt_jax import initialization
from minigpt_jax.config import PRESETS, ModelConfig, TrainConfig, preset
from minigpt_jax.config_json import from_json, to_json
from minigpt_jax.cost import parameter_count
from minigpt_jax.errors import UserError
from minigpt_jax.files import read_json_object
from minigpt_jax.initialization import initial_parameters

PARAMETERS = {"tiny": 1_606_784, "minimind2-small": 25_829_888, "minimind2": 104_030_976, "minimind-3": 63_912_192}

# --- Presets ---


class Zeros:
    """Stands for a random generator where only shapes matter: the large presets are slow to draw."""

    def standard_normal(self, shape):
        return np.broadcast_to(np.float32(0), shape)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_drawn_parameters_of_a_preset_have_the_released_size(name, monkeypatch):
    monkeypatch.setattr(initialization, "_generator", lambda seed, name: Zeros())
    drawn = initial_parameters(PRESETS[name], initializer="scaled_normal", seed=0)
    assert sum(leaf.size for leaf in jax.tree.leaves(drawn)) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_counted_parameters_of_a_preset_have_the_released_size(name):
    assert parameter_count(PRESETS[name]) == PARAMETERS[name]


def test_every_preset_has_its_size_in_this_file():
    assert PRESETS.keys() == PARAMETERS.keys()


def test_the_feed_forward_width_of_the_2_series_is_two_thirds_of_four_times_the_hidden_size_rounded_up_to_64():
    widths = {hidden: ModelConfig(hidden_size=hidden).intermediate_size for hidden in (512, 640, 768)}
    assert widths == {512: 1408, 640: 1728, 768: 2048}


def test_an_unknown_preset_is_answered_with_those_there_are():
    with pytest.raises(UserError, match=r"no model preset 'tyni'; choose one of tiny, minimind2-small, minimind2, min"):
        preset("tyni")


# --- Validation ---

BAD_MODELS = [
    ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ({"vocab_size": -1}, "vocab_size must be at least 1, got -1"),
    ({"head_dim": -2}, "head_dim must not be negative, got -2"),
    ({"num_heads": 8, "num_kv_heads": 3}, "num_heads 8 is not a multiple of num_kv_heads 3"),
    ({"hidden_size": 100}, "hidden_size 100 is not a multiple of num_heads 8; give head_dim too"),
    ({"head_dim": 7}, "head_dim must be even for rotary positions, got 7"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps must be positive, got 0.0"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps must be positive, got nan"),
    ({"rope_theta": -1.0}, "rope_theta must be positive and finite, got -1.0"),
]
BAD_RUNS = [
    ({"steps": 3, "epochs": 1.0}, "give --steps or --epochs, not both"),
    ({"steps": 0}, "--steps must be at least 1, got 0"),
    ({"max_seq_len": 1}, "--max-seq-len must be at least 2, got 1"),
    ({"accumulation_steps": 0}, "--accumulation-steps must be at least 1, got 0"),
    ({"warmup_steps": -1}, "--warmup-steps must be at least 0, got -1"),
    ({"learning_rate": math.inf}, "--learning-rate must be positive and finite, got inf"),
    ({"learning_rate": math.nan}, "--learning-rate must be positive and finite, got nan"),
    ({"grad_clip": -1.0}, "--grad-clip must be 0 or more and finite, got -1.0"),
    ({"beta2": 1.0}, "--beta2 must be at least 0 and below 1, got 1.0"),
    ({"dropout": math.nan}, "--dropout must be at least 0 and below 1, got nan"),
    ({"min_lr_ratio": 1.5}, "--min-lr-ratio must lie between 0 and 1, got 1.5"),
    ({"model": "gpt2"}, "there is no model preset 'gpt2'; choose one of " + ", ".join(PRESETS)),
]


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [(ModelConfig, *case) for case in BAD_MODELS] + [(TrainConfig, *case) for case in BAD_RUNS],
)
def test_a_value_that_cannot_work_is_named_with_what_it_should_be(kind, fields, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        kind(**fields)


def test_a_head_size_that_is_given_frees_the_hidden_size_from_the_number_of_heads():
    assert ModelConfig(hidden_size=100, num_heads=8, head_dim=16).head_dim == 16


# --- JSON ---

NAMES = st.characters(codec="utf-8", exclude_characters="\0")
MODELS = st.builds(
    ModelConfig,
    hidden_size=st.integers(1, 64).map(lambda half: 16 * half),
    num_layers=st.integers(1, 30),
    intermediate_size=st.integers(0, 999),
    rms_norm_eps=st.floats(1e-9, 1e-3),
    qk_norm=st.booleans(),
    tie_word_embeddings=st.booleans(),
)
RUNS = st.builds(
    TrainConfig,
    model=st.none() | st.sampled_from(sorted(PRESETS)),
    data=st.lists(st.text(NAMES, min_size=1), max_size=3).map(tuple),
    steps=st.none() | st.integers(1, 10**9),
    learning_rate=st.none() | st.floats(1e-9, 1.0),
    dtype=st.sampled_from([None, "float32", "bfloat16", "float64"]),
    optimizer=st.sampled_from(["adamw", "muon"]),
    resume=st.booleans(),
)


@given(config=MODELS | RUNS)
def test_a_config_survives_json_unchanged(config):
    text = json.dumps(to_json(config))
    assert from_json(type(config), json.loads(text), where="config.json") == config


def test_missing_fields_take_their_defaults():
    assert from_json(TrainConfig, {"steps": 7}, where="config.json") == TrainConfig(steps=7)


def test_a_whole_number_will_do_for_a_float_field():
    assert from_json(TrainConfig, {"epochs": 2, "dropout": 0}, where="c.json") == TrainConfig(epochs=2.0, dropout=0.0)


BAD_FIELDS = [
    (ModelConfig, {"hiden_size": 4}, "unknown field hiden_size; known are vocab_size, hidden_size, num_layers"),
    (ModelConfig, {"num_layers": "8"}, "num_layers must be int, got '8'"),
    (ModelConfig, {"num_layers": 8.0}, "num_layers must be int, got 8.0"),
    (ModelConfig, {"num_layers": True}, "num_layers must be int, got True"),
    (ModelConfig, {"num_layers": None}, "num_layers must be int, got None"),
    (ModelConfig, {"qk_norm": 1}, "qk_norm must be bool, got 1"),
    (ModelConfig, {"rope_theta": False}, "rope_theta must be float, got False"),
    (TrainConfig, {"steps": "9"}, "steps must be int or null, got '9'"),
    (TrainConfig, {"data": "a.jsonl"}, "data must be a list of strings, got 'a.jsonl'"),
    (TrainConfig, {"data": [1]}, "data must be a list of strings, got [1]"),
    (TrainConfig, {"dtype": "float16"}, "dtype must be one of float32, bfloat16, float64, got 'float16'"),
    (TrainConfig, {"schedule": None}, "schedule must be one of cosine, wsd, constant, minimind, got None"),
    (ModelConfig, {"num_layers": 0}, "num_layers must be at least 1, got 0"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), BAD_FIELDS)
def test_a_field_that_does_not_fit_is_named_with_its_file(kind, fields, message):
    with pytest.raises(UserError, match=f"^{re.escape('my.json: ' + message)}"):
        from_json(kind, fields, where="my.json")


def test_a_file_that_is_not_json_is_named(tmp_path):
    (tmp_path / "a.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.json is not JSON: "):
        read_json_object(tmp_path / "a.json")


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*b\.json: No such file"):
        read_json_object(tmp_path / "b.json")


def test_a_file_that_holds_a_list_is_named(tmp_path):
    (tmp_path / "c.json").write_text("[]", encoding="utf-8")
    with pytest.raises(UserError, match=r"c\.json must hold one JSON object, not list"):
        read_json_object(tmp_path / "c.json")
