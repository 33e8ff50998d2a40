"""--recipe: what each sets in each stage, what overrides it, and a run of one."""

import dataclasses
import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from small_runs import write_documents

from minigpt_bridge.models import open_model
from minigpt_jax.config import ModelConfig, Stage, TrainConfig
from minigpt_jax.engine import JaxEngine
from minigpt_jax.errors import UserError
from minigpt_jax.launch import launch
from minigpt_jax.recipes import RECIPES, RecipeName
from minigpt_jax.run_directory import RunDirectory, resumed_config
from minigpt_jax.schedule import learning_rate_at
from minigpt_jax.train_command import read_command_line

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = TrainConfig()

MINIMIND = {
    "schedule": "minimind", "min_lr_ratio": 0.1, "warmup_steps": 0, "optimizer": "adamw", "beta1": 0.9, "beta2": 0.999,
    "adam_eps": 1e-8, "weight_decay": 0.01, "decay": "all", "grad_clip": 1.0, "dropout": 0.0, "max_seq_len": 512,
    "batching": "padded", "drop_last": False, "save_interval": 100,
}  # fmt: skip
A = {
    "schedule": "cosine", "steps": 1000, "warmup_steps": 100, "optimizer": "adamw", "weight_decay": 0.01,
    "grad_clip": 1.0, "dropout": 0.1, "max_seq_len": 512, "batch_size": 4, "accumulation_steps": 4, "drop_last": True,
    "save_interval": 100,
}  # fmt: skip
B = {
    "schedule": "cosine", "warmup_steps": 100, "optimizer": "adamw", "weight_decay": 0.1, "grad_clip": 1.0,
    "dropout": 0.1, "max_seq_len": 512, "batch_size": 4, "accumulation_steps": 4, "save_interval": 100,
}  # fmt: skip
C = {
    "warmup_steps": 100, "weight_decay": 0.1, "grad_clip": 1.0, "max_seq_len": 512, "batch_size": 8,
    "batching": "padded", "save_interval": 50, "eval_interval": 50,
}  # fmt: skip
QKVO_AND_FFN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
ADDED: dict[tuple[str, str], dict[str, object]] = {
    ("minimind", "pretrain"): {"learning_rate": 5e-4, "batch_size": 32, "accumulation_steps": 8, "epochs": 1.0},
    ("minimind", "sft"): {
        "learning_rate": 5e-7, "batch_size": 16, "accumulation_steps": 1, "epochs": 2.0, "chat_mask": "minimind",
        "over_long": "cut",
    },
    ("minimind", "lora"): {
        "learning_rate": 1e-4, "epochs": 50.0, "chat_mask": "minimind", "over_long": "cut", "lora_rank": 8,
        "lora_alpha": 8.0, "lora_dropout": 0.0, "lora_targets": ("q_proj", "o_proj"),
    },
    ("writeup-a", "pretrain"): {"learning_rate": 5e-4},
    ("writeup-a", "sft"): {"over_long": "drop"},
    ("writeup-b", "pretrain"): {"learning_rate": 6e-4, "initializer": "xavier"},
    ("writeup-b", "sft"): {"over_long": "cut"},
    ("writeup-b", "lora"): {
        "learning_rate": 1e-4, "steps": 1000, "over_long": "cut", "lora_rank": 8, "lora_alpha": 16.0,
        "lora_dropout": 0.05, "lora_targets": QKVO_AND_FFN,
    },
    ("writeup-c", "pretrain"): {"learning_rate": 5e-4, "epochs": 1.0},
    ("writeup-c", "sft"): {"over_long": "cut"},
}  # fmt: skip
EVERY_STAGE = {"default": {}, "minimind": MINIMIND, "writeup-a": A, "writeup-b": B, "writeup-c": C}


def asked(*arguments):
    request = read_command_line(list(arguments))
    return request.command.train_config(), request.given


@pytest.mark.parametrize("stage", get_args(Stage))
@pytest.mark.parametrize("recipe", get_args(RecipeName))
def test_a_recipe_sets_its_values_and_nothing_else(recipe, stage):
    config, given = asked("--stage", stage, "--recipe", recipe)
    expected = {**EVERY_STAGE[recipe], **ADDED.get((recipe, stage), {})}
    assert config == dataclasses.replace(DEFAULT, stage=stage, **expected)
    assert given == {"stage", *expected}


def test_every_name_has_a_recipe():
    assert set(RECIPES) == set(get_args(RecipeName))


def test_the_command_line_overrides_a_recipe():
    config, given = asked("--recipe", "writeup-a", "--weight-decay", "0.3", "--no-drop-last")
    assert (config.weight_decay, config.drop_last, config.dropout) == (0.3, False, 0.1)
    assert {"weight_decay", "drop_last", "dropout"} <= given


def test_a_config_file_overrides_a_recipe_and_the_command_line_both(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"weight_decay": 0.3, "dropout": 0.2, "data": ["a.jsonl"]}))
    config, _ = asked("--recipe", "writeup-a", "--config", str(path), "--dropout", "0.4")
    assert (config.weight_decay, config.dropout, config.learning_rate) == (0.3, 0.4, 5e-4)
    assert config.data == ("a.jsonl",)


@pytest.mark.parametrize(
    ("file", "arguments", "length"),
    [
        ({}, [], (1000, None)),
        ({}, ["--epochs", "2"], (None, 2.0)),
        ({"epochs": 3}, [], (None, 3.0)),
        ({"epochs": 3}, ["--steps", "5"], (5, None)),
    ],
)
def test_one_length_replaces_the_other(tmp_path, file, arguments, length):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(file))
    config, _ = asked("--recipe", "writeup-a", "--config", str(path), *arguments)
    assert (config.steps, config.epochs) == length


def test_the_stage_of_a_config_file_chooses_what_a_recipe_sets(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"stage": "lora"}))
    config, given = asked("--recipe", "writeup-b", "--config", str(path))
    assert (config.stage, config.learning_rate, config.initializer) == ("lora", 1e-4, "scaled_normal")
    assert "initializer" not in given


@pytest.mark.parametrize("stage", ["colour", [], None])
def test_a_config_file_with_a_stage_that_is_none_is_refused(tmp_path, stage):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"stage": stage}))
    with pytest.raises(UserError, match="stage must be one of"):
        asked("--recipe", "minimind", "--config", str(path))


def stored_run(path, *arguments):
    config, _ = asked(*arguments, "--out", str(path))
    path.mkdir()
    RunDirectory(path).write_config(ModelConfig(), config)
    return config


def test_a_run_is_resumed_by_its_own_recipe_without_naming_its_stage(tmp_path):
    stored = stored_run(tmp_path / "run", "--stage", "sft", "--recipe", "minimind")
    config, given = asked("--resume", "--recipe", "minimind", "--out", str(tmp_path / "run"))
    resumed = resumed_config(stored, config, given, where=tmp_path)
    assert resumed == dataclasses.replace(stored, resume=True)


def test_a_run_is_not_resumed_by_another_recipe(tmp_path):
    stored = stored_run(tmp_path / "run", "--recipe", "writeup-b")
    config, given = asked("--resume", "--recipe", "writeup-c", "--out", str(tmp_path / "run"))
    with pytest.raises(UserError, match="or the --config or --recipe that sets it"):
        resumed_config(stored, config, given, where=tmp_path)


def test_an_unknown_recipe_is_refused_with_the_names_of_those_there_are():
    with pytest.raises(UserError, match=r"'writeup-d' for argument '--recipe'.*minimind") as caught:
        asked("--recipe", "writeup-d")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("stage", "rate"), [("pretrain", 5e-4), ("sft", 5e-7)])
def test_the_minimind_rate_starts_above_its_peak_and_ends_at_a_tenth(stage, rate):
    config, _ = asked("--stage", stage, "--recipe", "minimind")
    rates = learning_rate_at(np.arange(10_001), config, total_updates=10_000)
    assert rates[0] == pytest.approx(1.1 * rate, rel=1e-6)
    assert rates[-1] == pytest.approx(0.1 * rate, rel=1e-6)


def documented_value(text):
    """(stage, value) of one part of a cell: a stage where the value is one stage's alone, and the value."""
    first, _, rest = text.partition(" ")
    stage, value = (first, rest) if first in get_args(Stage) else ("", text)
    try:
        return stage, float({"yes": "1", "no": "0"}.get(value, value))
    except ValueError:
        return stage, value


def test_the_documentation_has_every_value():
    lines = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    for column, name in enumerate(EVERY_STAGE):
        if name == "default":
            continue
        expected: dict[str, set[object]] = {}
        for stage, fields in [("", EVERY_STAGE[name]), *((s, ADDED.get((name, s), {})) for s in get_args(Stage))]:
            for field, value in fields.items():
                said = " ".join(value) if isinstance(value, tuple) else value
                expected.setdefault(field, set()).add((stage, said))
        documented = {
            row[0]: set(map(documented_value, row[column].split("; ")))
            for row in rows
            if row[0] in vars(DEFAULT) and row[column] != "-"
        }
        assert documented == expected, name


def test_the_documented_command_trains_with_the_values_of_its_recipe(tmp_path, run_environment, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    write_documents(tmp_path / "corpus" / "texts.jsonl", 80)
    lines = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if line.startswith("python scripts/train.py --recipe"))
    smaller = "--out run --model tiny --hidden-size 32 --num-layers 1 --max-seq-len 32 --batch-size 4 --steps 2"
    request = read_command_line([*line.split()[2:], *smaller.split()])
    config = request.command.train_config()
    result = launch(config, given=request.given, make_engine=JaxEngine, accelerator=None, open_model=open_model)
    assert (result.ending, result.step) == ("finished", 2)
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["train"]
    assert stored.items() >= {**MINIMIND, "learning_rate": 5e-4, "accumulation_steps": 8, "max_seq_len": 32}.items()
    assert (stored["steps"], stored["epochs"]) == (2, None)
    assert "recipe" not in stored
