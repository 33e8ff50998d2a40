"""The model with linear layers whose weights are 8-bit integers (minigpt_jax/quantization.py), written to be read.

The twin of minigpt_jax/int8.py: the same numbers and names. It turns a whole matrix into floats for each product, which
saves memory and no time.

S positions  I inputs of a linear layer  O its outputs  V vocabulary  D hidden
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt_jax.config import ModelConfig
from minigpt_jax.formats.names import Parameters, flatten
from minigpt_torch.attention import Kernel
from minigpt_torch.model import Linear, Transformer
from minigpt_torch.weights import as_own, as_tensor


class Int8Linear(nn.Module):
    """x @ (weight * scale)^T, in the dtype of x."""

    weight: Tensor  # int8 [O, I]
    scale: Tensor  # [O]

    def __init__(self, linear: Linear):
        super().__init__()
        self.register_buffer("weight", torch.zeros_like(linear.weight, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(linear.out_features))

    def forward(self, x: Tensor) -> Tensor:  # [S, I] -> [S, O]
        return F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)


class Int8Transformer(Transformer):
    """`Transformer` with 8-bit linear layers and a head of its own, which may be a copy of the embedding table."""

    lm_head: Any  # Int8Linear

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, kernel: Kernel):
        super().__init__(replace(config, tie_word_embeddings=False), dtype=dtype, kernel=kernel)
        for room in list(self.modules()):
            for name, module in list(room.named_children()):
                if isinstance(module, Linear):
                    setattr(room, name, Int8Linear(module))

    @property
    def head(self) -> Tensor:
        """The output head as a [V, D] table of floats."""
        return self.lm_head.weight * self.lm_head.scale[:, None]

    def logits(self, hidden: Tensor) -> Tensor:  # [S, D] -> [S, V]
        """Scores over the vocabulary, in at least float32."""
        return self.lm_head(hidden).to(torch.promote_types(hidden.dtype, torch.float32))


def make_int8_model(
    config: ModelConfig,
    parameters: Parameters,
    *,
    dtype: torch.dtype,
    kernel: Kernel = "reference",
    device: str | torch.device = "cpu",
) -> Int8Transformer:
    """A model that holds these `int8_parameters` and computes in `dtype`."""
    with torch.device("meta"):
        model = Int8Transformer(config, dtype=dtype, kernel=kernel)
    scales = {path: as_tensor(leaf, device) for path, leaf in flatten(parameters).items() if path.endswith(".scale")}
    model.load_state_dict({**as_own(parameters, model.config, device=device), **scales}, assign=True)
    return model
