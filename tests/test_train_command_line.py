"""Options of scripts/train.py, a config file beneath them, and MiniMind's names."""

import json

import pytest

from minigpt_jax.errors import UserError
from minigpt_jax.train_command import read_command_line


def test_options_take_dashes_or_underscores_and_are_known_as_given():
    request = read_command_line(["--max_seq_len", "64", "--batch-size=4", "--resume"])
    assert (request.command.max_seq_len, request.command.batch_size, request.command.resume) == (64, 4, True)
    assert request.given == {"max_seq_len", "batch_size", "resume"}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--data_path a.jsonl", {"data": ("a.jsonl",)}),
        ("--from_weight out/run", {"init_from": "out/run"}),
        ("--from_weight none", {"init_from": None}),
        ("--from_resume 1", {"resume": True}),
        ("--from_resume 0", {"resume": False}),
        ("--use_wandb", {"tracker": "wandb"}),
        ("--use_moe 0", {"model": None}),
        ("--hidden_size 256 --num_hidden_layers 3", {"hidden_size": 256, "num_layers": 3}),
        ("--accumulation_steps 4 --save_interval 50", {"accumulation_steps": 4, "save_interval": 50}),
    ],
)
def test_names_that_minimind_uses_mean_the_same(theirs, ours):
    command = read_command_line(theirs.split()).command
    assert {name: getattr(command, name) for name in ours} == ours


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--data a.jsonl --data b.jsonl", "--data is there twice"),
        ("--stage sft --mix-data a.jsonl --mix_data b.jsonl", "--mix-data is there twice"),
        ("--initializer xavier --init-from out/run", "--init-from brings some"),
        ("--data a\0b", "--data has a NUL"),
    ],
)
def test_what_would_be_overlooked_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        read_command_line(arguments.split(" "))


def test_what_minimind_has_and_this_version_has_not_is_refused():
    with pytest.raises(UserError, match="no mixture of experts"):
        read_command_line(["--use_moe", "1"])


def test_the_command_line_overrides_the_config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"epochs": 2, "learning_rate": 1e-3, "data": ["a.jsonl", "b.jsonl"]}))
    request = read_command_line(["--config", str(path), "--steps", "5"])
    command = request.command
    assert (command.steps, command.epochs, command.learning_rate) == (5, None, 1e-3)
    assert command.data == ("a.jsonl", "b.jsonl")
    assert request.given == {"steps", "epochs", "learning_rate", "data"}


def test_a_config_file_may_have_options_of_the_stage_that_the_command_line_names(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"lora_rank": 4}))
    command = read_command_line(["--config", str(path), "--stage", "lora"]).command
    assert (command.stage, command.lora_rank) == ("lora", 4)


def test_figures_for_machines_belong_to_the_dry_run():
    with pytest.raises(UserError, match="add --dry-run"):
        read_command_line(["--json", "cost.json"])
