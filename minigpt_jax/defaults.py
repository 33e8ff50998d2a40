"""What a run takes where nobody says: the model, precision, batch size, rate and length that fit the machine and data.

Framework-free. Chosen once at the start and written into the run's config.json, so a resumed run does not depend on
the machine.
"""

import dataclasses

from minigpt_jax.config import ModelConfig, Stage, TrainConfig, preset, preset_name
from minigpt_jax.errors import UserError

SAMPLE_EPOCHS: dict[Stage, float] = {"pretrain": 2.5, "sft": 4.0, "lora": 4.0, "dpo": 1.0, "distill": 4.0}
"""Passes over the sample corpus; docs/results.md has the time that each stage takes."""

RATE_OF_STAGE: dict[Stage, float] = {"pretrain": 1.0, "sft": 1 / 3, "lora": 1.0, "dpo": 1 / 100, "distill": 1 / 3}
"""Part of the pretraining rate. Chosen on the sample corpus, not searched for."""

BATCH_SIZE, SAMPLE_BATCH_SIZE = 8, 2
"""Rows of a micro-batch on a CPU; four times as many on an accelerator. The sample is so small that more updates are
worth more than larger ones."""


def require_model_to_start_from(config: TrainConfig) -> None:
    """Refuse a stage that improves a model, and is given none.

    Raises:
        UserError: it is.
    """
    if config.stage == "distill" and config.teacher is None:
        raise UserError("--stage distill learns from a model: name it with --teacher")
    # A student may start from nothing.
    if config.stage not in ("pretrain", "distill") and config.init_from is None:
        raise UserError(
            f"--stage {config.stage} starts from a model: name it with --init-from, for example out/pretrain-tiny, "
            "which `python scripts/train.py` makes"
        )


def resolve(config: TrainConfig, *, accelerator: str | None, source: ModelConfig | None = None) -> TrainConfig:
    """`config` with model, dtype, batch size, learning rate and length set.

    Args:
        config: as the person gave it.
        accelerator: "gpu", "tpu", ... or None on a machine that has only a CPU.
        source: the shape of the model that the run starts from. Where it is no preset's, `model` stays None.
    """
    chosen = ("minimind2-small" if accelerator else "tiny") if source is None else preset_name(source)
    model = config.model or chosen
    epochs = config.epochs
    if config.steps is None and epochs is None:
        epochs = 1.0 if config.data else SAMPLE_EPOCHS[config.stage]
    resolved = dataclasses.replace(
        config,
        model=model,
        epochs=epochs,
        batching=config.batching or ("bucketed" if config.stage == "dpo" else "packed"),
        dtype=config.dtype or ("bfloat16" if accelerator == "gpu" else "float32"),
        batch_size=config.batch_size or (BATCH_SIZE if config.data else SAMPLE_BATCH_SIZE) * (4 if accelerator else 1),
    )
    if resolved.learning_rate is None:
        shape = source or model_config(resolved)
        rate = RATE_OF_STAGE[config.stage] * default_learning_rate(shape)
        resolved = dataclasses.replace(resolved, learning_rate=rate)
    return resolved


def model_config(config: TrainConfig, *, source: ModelConfig | None = None) -> ModelConfig:
    """The model's shape: that of `source` where the run starts from a model, else the preset with its overrides.

    Raises:
        UserError: a width that the heads do not divide, rows longer than the model is meant for, or a shape asked for
            that `source` does not have.
    """
    shape = source or _preset_with_overrides(config)
    if source is not None:
        asked = _preset_with_overrides(config) if config.model is not None else source
        changes = {name: getattr(config, name) for name in ("hidden_size", "num_layers") if getattr(config, name)}
        wrong = [
            f"{name} {getattr(source, name)}, not {value}"
            for name, value in (dataclasses.asdict(asked) | changes).items()
            if getattr(source, name) != value
        ]
        if wrong:
            raise UserError(f"{config.init_from} holds another model ({'; '.join(wrong)}); leave --model out")
    longest = shape.max_position_embeddings
    if config.max_seq_len > longest:
        raise UserError(f"--max-seq-len {config.max_seq_len} is more than the model is meant for ({longest})")
    return shape


def _preset_with_overrides(config: TrainConfig) -> ModelConfig:
    assert config.model is not None
    shape = preset(config.model)
    if config.hidden_size is not None:
        unit = 2 * shape.num_heads  # heads of an even size, for the rotary pairs
        if config.hidden_size % unit:
            raise UserError(f"--hidden-size must be a multiple of {unit} for {config.model}, got {config.hidden_size}")
        # What the preset derives from its width follows the new one.
        shape = dataclasses.replace(shape, hidden_size=config.hidden_size, head_dim=0, intermediate_size=0)
    if config.num_layers is not None:
        shape = dataclasses.replace(shape, num_layers=config.num_layers)
    return shape


def default_learning_rate(model: ModelConfig) -> float:
    """3e-3 at width 128 (measured), falling with the square root of the width: 1.5e-3 at 512, 1.2e-3 at 768."""
    return 3e-3 * (128 / model.hidden_size) ** 0.5


def default_warmup(total_updates: int) -> int:
    """5 % of the run, at most 100 updates."""
    return min(100, total_updates // 20)
