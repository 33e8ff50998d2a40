"""Which layers get a low-rank adapter, and how strong it is. Framework-free."""

import math
from dataclasses import dataclass

from minigpt_jax.errors import UserError

TARGETS = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
"""The linear layers of a block, in the order of the forward pass, and the room that each is in."""


DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")


@dataclass(frozen=True)
class LoraConfig:
    """The low-rank update scale * A B of each targeted kernel (Hu et al., 2021).

    Raises:
        UserError: a value that cannot work, or a target that no block has.
    """

    rank: int = 8
    """Columns of A and rows of B."""
    alpha: float = 16.0
    """Strength of the update: it is multiplied by alpha / rank."""
    dropout: float = 0.05
    """Probability with which an element of an adapter's input is dropped in training."""
    targets: tuple[str, ...] = DEFAULT_TARGETS
    """The linear layers that get an adapter, in every block; kept in the order of the forward pass."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"LoRA rank must be at least 1, got {self.rank}")
        if not 0 < self.alpha < math.inf:
            raise UserError(f"LoRA alpha must be positive and finite, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"LoRA dropout must be at least 0 and below 1, got {self.dropout}")
        if not self.targets:
            raise UserError(f"LoRA targets: none is named; choose from {', '.join(TARGETS)}")
        for target in self.targets:
            if target not in TARGETS:
                raise UserError(f"LoRA targets: there is no {target!r} in a block; choose from {', '.join(TARGETS)}")
            if self.targets.count(target) > 1:
                raise UserError(f"LoRA targets: it names {target} twice")
        object.__setattr__(self, "targets", tuple(target for target in TARGETS if target in self.targets))

    @property
    def scale(self) -> float:
        """What A B is multiplied by."""
        return self.alpha / self.rank
