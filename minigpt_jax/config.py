"""What is trained and how: frozen dataclasses, validated once, and the model presets.

Framework-free. Each field's docstring is also its `--help` text. A value that cannot work raises
`UserError` here, before anything is built or written.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, get_args

from minigpt_jax.errors import UserError
from minigpt_jax.lora_config import DEFAULT_TARGETS, LoraConfig

Stage = Literal["pretrain", "sft", "lora", "dpo", "distill"]
Backend = Literal["jax", "torch"]
Batching = Literal["packed", "bucketed", "padded"]
DType = Literal["float32", "bfloat16", "float64"]
Initializer = Literal["scaled_normal", "xavier"]
Optimizer = Literal["adamw", "muon"]
ChatMask = Literal["assistant", "minimind"]
OverLong = Literal["cut", "drop"]
Schedule = Literal["cosine", "wsd", "constant", "minimind"]
Decay = Literal["matrices", "all"]
Reference = Literal["cached", "copy"]
TrackerName = Literal["none", "wandb", "tensorboard", "swanlab"]
NonFiniteAction = Literal["stop", "rollback"]


MOST_EPOCHS = 1_000_000


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


# --- Model ---


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder-only transformer.

    Raises:
        UserError: a size is not positive, or two sizes contradict each other.
    """

    vocab_size: int = 6400
    """Rows of the embedding table; at least the tokenizer's size."""
    hidden_size: int = 512
    """Width of the residual stream."""
    num_layers: int = 8
    """Number of transformer blocks."""
    num_heads: int = 8
    """Number of query heads."""
    num_kv_heads: int = 2
    """Number of key/value heads (grouped-query attention); divides num_heads."""
    head_dim: int = 0
    """Size of one head; 0 stands for hidden_size / num_heads."""
    intermediate_size: int = 0
    """Width inside the feed-forward layer; 0 stands for 64 * ceil(int(8 * hidden_size / 3) / 64)."""
    max_position_embeddings: int = 32768
    """Longest sequence that the model is meant for, in tokens."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square inside the root of every RMSNorm."""
    rope_theta: float = 1e6
    """Base of the rotary position frequencies."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotation (3-series)."""
    norm_weight_before_cast: bool = False
    """Multiply by the norm's weight in the high precision (3-series) or after the cast back (2-series)."""
    tie_word_embeddings: bool = True
    """Use the embedding table as the output head as well."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "max_position_embeddings"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("head_dim", "intermediate_size"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}",
        )
        if self.head_dim == 0:
            _require(
                self.hidden_size % self.num_heads == 0,
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; give head_dim too",
            )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.intermediate_size == 0:
            object.__setattr__(self, "intermediate_size", 64 * math.ceil(int(8 * self.hidden_size / 3) / 64))
        _require(self.head_dim % 2 == 0, f"head_dim must be even for rotary positions, got {self.head_dim}")
        _require(self.rms_norm_eps > 0, f"rms_norm_eps must be positive, got {self.rms_norm_eps}")
        _require(0 < self.rope_theta < math.inf, f"rope_theta must be positive and finite, got {self.rope_theta}")


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=384),
    "minimind2-small": ModelConfig(),
    "minimind2": ModelConfig(hidden_size=768, num_layers=16),
    "minimind-3": ModelConfig(
        hidden_size=768,
        num_kv_heads=4,
        intermediate_size=64 * math.ceil(math.pi * 768 / 64),
        qk_norm=True,
        norm_weight_before_cast=True,
        rms_norm_eps=1e-6,
    ),
}
"""The dense MiniMind shapes, by name; `tiny` is this project's own, for minutes on a CPU."""


def preset(name: str) -> ModelConfig:
    """The model shape called `name`.

    Raises:
        UserError: there is no such preset; the message lists those there are.
    """
    _require(name in PRESETS, f"there is no model preset {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def preset_name(shape: ModelConfig) -> str | None:
    """The name of the preset of this shape; None when there is none."""
    return next((name for name, known in PRESETS.items() if known == shape), None)


# --- Training ---


@dataclass(frozen=True)
class TrainConfig:
    """One training run. A value of None is chosen when the run starts and written into its config.json.

    Raises:
        UserError: a value that cannot work, or two that exclude each other.
    """

    stage: Stage = "pretrain"
    """What is trained: pretrain learns to continue text; sft to answer, from conversations; lora the same with small
    adapters beside a frozen model; dpo to prefer one answer to another; distill to answer as a teacher does."""
    model: str | None = None
    """Model preset: tiny, minimind2-small, minimind2 or minimind-3. On a GPU minimind2-small, else tiny."""
    hidden_size: int | None = None
    """Overrides the preset's width."""
    num_layers: int | None = None
    """Overrides the preset's number of blocks."""
    tokenizer: str | None = None
    """A tokenizer.json, or a directory that holds one; the shipped 6400-entry tokenizer when not given."""
    data: tuple[str, ...] = ()
    """Training data: JSONL files (also .gz, .zst), directories of them, or a cache that prepare_data.py made. A line
    is {"text"} in pretraining, {"chosen", "rejected"} in dpo, else {"conversations"}. The generated sample corpus when
    not given."""
    val_data: tuple[str, ...] = ()
    """Validation data in the same form; its first 200 documents are used. When not given, 1 document in 100 is held
    out of the training data."""
    mix_data: tuple[str, ...] = ()
    """sft, lora, distill: files of {"text"} lines that are trained on beside the conversations, against forgetting."""
    mix_fraction: float = 0.1
    """Part of the learned tokens that is taken from mix_data."""
    chat_mask: ChatMask = "assistant"
    """What of a conversation is learned. assistant: what the assistant writes and the end of its turn. minimind: the
    newline after that end too, as in the released MiniMind models."""
    over_long: OverLong = "cut"
    """A conversation longer than a row: cut keeps its beginning, drop leaves it out."""
    drop_last: bool = False
    """Leave out a pass's last batch when it is not full (when bucketed, that of each width)."""
    skip_bad_lines: bool = False
    """Count and report lines that are not valid records instead of stopping at the first."""
    init_from: str | None = None
    """Start from the weights of another model instead of fresh ones: a run directory (its best checkpoint), a Hugging
    Face directory, a .safetensors or a .pth file."""
    out: str | None = None
    """Run directory; out/<stage>-<model> when not given."""
    resume: bool = False
    """Continue the run in the run directory from its newest checkpoint, exactly where it stopped."""
    steps: int | None = None
    """Number of optimizer updates. Excludes epochs."""
    epochs: float | None = None
    """Passes over the training data. Excludes steps; 1 when neither is given (more on the small sample corpus)."""
    batch_size: int | None = None
    """Rows of one micro-batch; pairs in dpo, which are two rows each."""
    accumulation_steps: int = 1
    """Micro-batches that make one optimizer update."""
    max_seq_len: int = 512
    """Tokens of one row."""
    batching: Batching | None = None
    """packed: documents share rows without seeing each other. bucketed: rows of like length share a batch.
    padded: one document a row. packed when not given; in dpo, whose pairs are not packed, bucketed."""
    learning_rate: float | None = None
    """Peak learning rate."""
    schedule: Schedule = "cosine"
    """Course of the learning rate after warm-up: cosine to the floor, wsd (constant, then linear to the floor
    over the last fifth), constant, or minimind (a cosine on top of the floor: it starts above the peak)."""
    warmup_steps: int | None = None
    """Updates of linear warm-up; 5 % of the run, at most 100, when not given."""
    min_lr_ratio: float = 0.1
    """The schedule's floor as a fraction of the peak learning rate."""
    optimizer: Optimizer = "adamw"
    """adamw for everything, or muon for the matrices inside the blocks with adamw for the rest."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    adam_eps: float = 1e-8
    """AdamW's eps, outside the square root, after bias correction."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    decay: Decay = "matrices"
    """What is decayed: matrices, the embedding among them, or all parameters, the norms' too."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    dropout: float = 0.0
    """Probability with which the embedding and each sub-layer's output are dropped in training."""
    lora_rank: int = 8
    """lora: columns of each adapter's first matrix."""
    lora_alpha: float = 16.0
    """lora: an adapter's output is multiplied by alpha / rank."""
    lora_dropout: float = 0.05
    """lora: probability with which an element of an adapter's input is dropped in training."""
    lora_targets: tuple[str, ...] = DEFAULT_TARGETS
    """lora: the layers that get an adapter, among q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj."""
    dpo_beta: float = 0.1
    """dpo: how dearly moving away from the first model is paid for."""
    label_smoothing: float = 0.0
    """dpo: probability that a pair's labels are taken to be the wrong way round."""
    reference: Reference = "cached"
    """dpo: the first model's log-probabilities computed once and kept in the run directory (cached), or at every step
    from a second copy of the model in memory (copy)."""
    teacher: str | None = None
    """distill: the model to learn from, in any format that --init-from takes."""
    distill_alpha: float = 0.5
    """distill: weight of the cross entropy; that of the teacher's distribution is the rest."""
    distill_temperature: float = 2.0
    """distill: both models' logits are divided by this in the comparison."""
    initializer: Initializer = "scaled_normal"
    """How the first weights are drawn; docs/numerics.md has both rules."""
    dtype: DType | None = None
    """Compute precision. Parameters stay float32 under bfloat16. bfloat16 on a GPU, else float32."""
    seed: int = 42
    """Seed of everything random: weights, order of the data, dropout, the sample corpus."""
    save_interval: int = 100
    """Updates between checkpoints."""
    keep_checkpoints: int = 3
    """Newest checkpoints that are kept; the best by validation loss is kept besides."""
    eval_interval: int = 100
    """Updates between validations."""
    log_interval: int = 10
    """Updates between lines of metrics.jsonl."""
    max_non_finite_steps: int = 10
    """Stop after this many micro-batches in a row whose loss or gradient is not finite."""
    on_non_finite: NonFiniteAction = "stop"
    """What happens then: stop, or rollback to the newest checkpoint with half the learning rate."""
    tracker: TrackerName = "none"
    """Where metrics go besides metrics.jsonl and metrics.csv."""
    backend: Backend = "jax"
    """Framework that trains: jax, or torch (the twin: the same model, eager PyTorch). A run may change it on resume."""

    def __post_init__(self) -> None:
        _require(self.steps is None or self.epochs is None, "give --steps or --epochs, not both")
        for name, least in (
            ("steps", 1),
            ("batch_size", 1),
            ("accumulation_steps", 1),
            ("max_seq_len", 2),
            ("hidden_size", 1),
            ("num_layers", 1),
            ("warmup_steps", 0),
            ("save_interval", 1),
            ("keep_checkpoints", 1),
            ("eval_interval", 1),
            ("log_interval", 1),
            ("max_non_finite_steps", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            _require(value is None or value >= least, f"{_flag(name)} must be at least {least}, got {value}")
            _require(value is None or value < 2**32, f"{_flag(name)} must be below 2**32, got {value}")
        for name in ("epochs", "learning_rate", "adam_eps", "dpo_beta", "distill_temperature"):
            value = getattr(self, name)
            _require(value is None or 0 < value < math.inf, f"{_flag(name)} must be positive and finite, got {value}")
        for name in ("weight_decay", "grad_clip"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"{_flag(name)} must be 0 or more and finite, got {value}")
        for name in ("beta1", "beta2", "dropout"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"{_flag(name)} must be at least 0 and below 1, got {value}")
        _require(0 <= self.min_lr_ratio <= 1, f"--min-lr-ratio must lie between 0 and 1, got {self.min_lr_ratio}")
        _require(self.accumulation_steps < 2**31, f"--accumulation-steps {self.accumulation_steps} is too many")
        _require((self.epochs or 1) <= MOST_EPOCHS, f"--epochs must be at most {MOST_EPOCHS:,}, got {self.epochs}")
        _require((self.learning_rate or 0) <= 1, f"--learning-rate must be at most 1, got {self.learning_rate}")
        for name in ("data", "val_data", "mix_data", "out", "tokenizer", "init_from", "teacher"):
            value = getattr(self, name)
            names = value if isinstance(value, tuple) else (value,)
            _require("" not in names, f"{_flag(name)} is an empty name")
            _require(not any("\0" in each for each in names if each), f"{_flag(name)} has a NUL, which no name has")
        if self.model is not None:
            preset(self.model)
        _require(0 < self.mix_fraction < 1, f"--mix-fraction must lie between 0 and 1, got {self.mix_fraction}")
        _require(0 <= self.distill_alpha <= 1, f"--distill-alpha must lie between 0 and 1, got {self.distill_alpha}")
        _require(
            0 <= self.label_smoothing < 0.5,
            f"--label-smoothing must be 0 or more and below 0.5, got {self.label_smoothing}",
        )
        _ = self.lora
        for field in dataclasses.fields(self):
            stages = STAGES_OF_OPTION.get(field.name)
            # A run that is resumed knows its stage; there the options are compared with the run's.
            if (
                stages is not None
                and self.stage not in stages
                and not self.resume
                and getattr(self, field.name) != field.default
            ):
                raise UserError(f"{_flag(field.name)} is for --stage {' or '.join(stages)}, not {self.stage}")
        mixes = bool(self.mix_data) or self.mix_fraction == type(self).mix_fraction
        _require(mixes, "--mix-fraction is a part of --mix-data, which is not given")
        _require(
            self.stage != "dpo" or self.batching != "packed",
            "--batching packed is not for --stage dpo: a pair's two sides stand in rows of their own; choose bucketed "
            "or padded",
        )

    @property
    def record_form(self) -> Literal["pretrain", "sft", "dpo"]:
        """Form of the stage's records, by the name that minigpt_jax/data/records.py gives it."""
        return self.stage if self.stage in ("pretrain", "dpo") else "sft"

    @property
    def lora(self) -> LoraConfig:
        """Shape and strength of the adapters."""
        return LoraConfig(self.lora_rank, self.lora_alpha, self.lora_dropout, self.lora_targets)

    @property
    def holds_first_model(self) -> bool:
        """Whether every step computes with the model that the run was started from, which stays as it is."""
        return self.stage == "lora" or (self.stage == "dpo" and self.reference == "copy")

    @property
    def has_unlearned_tokens(self) -> bool:
        """Whether the data has tokens that are read and not learned, as conversations have."""
        return self.stage != "pretrain"

    @property
    def stage_number(self) -> int:
        """Place of the stage in `Stage`: with the seed it decides the order of the data and dropout."""
        return get_args(Stage).index(self.stage)


STAGES_OF_OPTION: dict[str, tuple[Stage, ...]] = {
    "mix_data": ("sft", "lora", "distill"),
    "mix_fraction": ("sft", "lora", "distill"),
    "over_long": ("sft", "lora", "dpo", "distill"),
    "chat_mask": ("sft", "lora", "dpo", "distill"),
    "lora_rank": ("lora",),
    "lora_alpha": ("lora",),
    "lora_dropout": ("lora",),
    "lora_targets": ("lora",),
    "dpo_beta": ("dpo",),
    "label_smoothing": ("dpo",),
    "reference": ("dpo",),
    "teacher": ("distill",),
    "distill_alpha": ("distill",),
    "distill_temperature": ("distill",),
    "initializer": ("pretrain", "distill"),
}
"""Options that mean nothing in the other stages, and are refused there rather than ignored."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
