"""Named sets of training options: the released MiniMind, and three public write-ups of how to train it.

Framework-free. A recipe holds what its source states and this system can do; what it does not hold is chosen as
without a recipe. docs/recipes.md has the values side by side, where they contradict each other, and what of each
source cannot be had here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from minigpt_jax.config import Stage

RecipeName = Literal["default", "minimind", "writeup-a", "writeup-b", "writeup-c"]

Fields = Mapping[str, Any]
"""Values of fields of TrainConfig, by name."""


@dataclass(frozen=True)
class Recipe:
    """What a source says about training."""

    every_stage: Fields = field(default_factory=dict)
    of_stage: Mapping[Stage, Fields] = field(default_factory=dict)
    """What it says of one stage alone; it wins over `every_stage`."""


_MINIMIND = Recipe(
    every_stage={
        "schedule": "minimind",
        "min_lr_ratio": 0.1,
        "warmup_steps": 0,
        "optimizer": "adamw",
        # torch's defaults, for every parameter.
        "beta1": 0.9,
        "beta2": 0.999,
        "adam_eps": 1e-8,
        "weight_decay": 0.01,
        "decay": "all",
        "grad_clip": 1.0,
        "dropout": 0.0,
        "max_seq_len": 512,
        "batching": "padded",
        "drop_last": False,
        "save_interval": 100,
    },
    of_stage={
        "pretrain": {"learning_rate": 5e-4, "batch_size": 32, "accumulation_steps": 8, "epochs": 1.0},
        "sft": {
            "learning_rate": 5e-7,
            "batch_size": 16,
            "accumulation_steps": 1,
            "epochs": 2.0,
            "chat_mask": "minimind",
            "over_long": "cut",
        },
        "lora": {
            "learning_rate": 1e-4,
            "epochs": 50.0,
            "chat_mask": "minimind",
            "over_long": "cut",
            # Its adapters are on square matrices only, and have no factor: alpha / rank = 1.
            "lora_targets": ("q_proj", "o_proj"),
            "lora_rank": 8,
            "lora_alpha": 8.0,
            "lora_dropout": 0.0,
        },
    },
)

_WRITEUP_A = Recipe(
    every_stage={
        "schedule": "cosine",
        "steps": 1000,
        "warmup_steps": 100,
        "optimizer": "adamw",
        "weight_decay": 0.01,
        "grad_clip": 1.0,
        "dropout": 0.1,
        "max_seq_len": 512,
        "batch_size": 4,
        "accumulation_steps": 4,
        "drop_last": True,
        "save_interval": 100,
    },
    of_stage={"pretrain": {"learning_rate": 5e-4}, "sft": {"over_long": "drop"}},
)

_WRITEUP_B = Recipe(
    every_stage={
        "schedule": "cosine",
        "warmup_steps": 100,
        "optimizer": "adamw",
        "weight_decay": 0.1,
        "grad_clip": 1.0,
        "dropout": 0.1,
        "max_seq_len": 512,
        "batch_size": 4,
        "accumulation_steps": 4,
        "save_interval": 100,
    },
    of_stage={
        "pretrain": {"learning_rate": 6e-4, "initializer": "xavier"},
        "sft": {"over_long": "cut"},
        "lora": {
            "learning_rate": 1e-4,
            "steps": 1000,
            "over_long": "cut",
            "lora_targets": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"),
            "lora_rank": 8,
            "lora_alpha": 16.0,
            "lora_dropout": 0.05,
        },
    },
)

_WRITEUP_C = Recipe(
    every_stage={
        "warmup_steps": 100,
        "weight_decay": 0.1,
        "grad_clip": 1.0,
        "max_seq_len": 512,
        "batch_size": 8,
        "batching": "padded",
        "save_interval": 50,
        # The best checkpoint is the best of those that were validated.
        "eval_interval": 50,
    },
    of_stage={"pretrain": {"learning_rate": 5e-4, "epochs": 1.0}, "sft": {"over_long": "cut"}},
)

RECIPES: Mapping[RecipeName, Recipe] = {
    "default": Recipe(),
    "minimind": _MINIMIND,
    "writeup-a": _WRITEUP_A,
    "writeup-b": _WRITEUP_B,
    "writeup-c": _WRITEUP_C,
}


def recipe_fields(name: RecipeName, stage: Stage) -> dict[str, Any]:
    """What recipe `name` sets in a run of `stage`, by field of TrainConfig."""
    recipe = RECIPES[name]
    return {**recipe.every_stage, **recipe.of_stage.get(stage, {})}
