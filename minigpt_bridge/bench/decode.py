"""Greedy decoding: ours, the PyTorch twin and transformers' `generate`, on the same weights and prompts.

Everything from the prompt's ids to the answer's is in the time, reading the prompt as well. The bandwidth bound counts
the new tokens alone, so a little less than all of it can be reached. B rows.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from minigpt_bridge.bench.limits import Limits
from minigpt_bridge.bench.timing import Row, interleave, part_of, rates, seconds
from minigpt_jax.config import ModelConfig
from minigpt_jax.formats.hugging_face import write_hugging_face
from minigpt_jax.formats.names import Parameters, flatten, map_leaves, to_outside
from minigpt_jax.generate import JaxDecoder
from minigpt_jax.generation import Decoder, greedy
from minigpt_jax.quantization import int8_parameters
from minigpt_jax.tokenizer import Tokenizer
from minigpt_torch.generate import TorchDecoder
from minigpt_torch.weights import make_model

PROMPT_TOKENS = 32
NEW_TOKENS = 64
BATCHES = (1, 8, 32)

NEVER = -1
"""No end mark: every side adds as many tokens."""

Generate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""(prompts, number of new tokens) -> the new ids"""


def decode_rows(
    config: ModelConfig, parameters: Parameters, tokenizer: Tokenizer, limits: Limits, *, rounds: int
) -> Iterator[Row]:
    """Rates of one to many rows, the part of the bandwidth bound, the first token, and 8-bit weights.

    Args:
        config: the model's shape.
        parameters: float32, in the layout of minigpt_jax/initialization.py.
        tokenizer: goes into the export that transformers reads.
        limits: of the machine, measured in the same run.
        rounds: how often the sides take turns.
    """
    sides = _sides(config, parameters, tokenizer)
    for batch in BATCHES:
        prompts = _prompts(config, batch)
        taken = interleave({name: _run(side, prompts, NEW_TOKENS) for name, side in sides.items()}, rounds=rounds)
        work = batch * NEW_TOKENS
        for peer in ("transformers", "twin"):
            yield rates(f"decode, {_rows(batch)}, {peer}", taken["ours"], taken[peer], work=work, unit="tokens/s")
        int8 = f"decode, {_rows(batch)}, int8 against float32"
        yield rates(int8, taken["int8"], taken["ours"], work=work, unit="tokens/s")
        if batch == 1:
            name, most = "decode, 1 row, of the bandwidth bound", limits.read_gb_per_s * 1e9 / _bytes(parameters)
            yield part_of(name, taken["ours"], most, work=work, unit="tokens/s")
    first = interleave(
        {name: _run(sides[name], _prompts(config, 1), 1) for name in ("ours", "transformers")}, rounds=rounds
    )
    yield seconds(f"first token after {PROMPT_TOKENS}, transformers", first["ours"], first["transformers"])


def _sides(config: ModelConfig, parameters: Parameters, tokenizer: Tokenizer) -> dict[str, Generate]:
    def by(decoder: Decoder) -> Generate:
        return lambda prompts, count: greedy(decoder, prompts, max_new_tokens=count, stop_id=NEVER)

    twin = make_model(config, parameters, dtype=torch.float32, kernel="reference")
    return {
        "ours": by(JaxDecoder(config, map_leaves(jnp.asarray, parameters))),
        "int8": by(JaxDecoder(config, map_leaves(jnp.asarray, int8_parameters(parameters)), int8=True)),
        "twin": by(TorchDecoder(twin)),
        "transformers": _transformers(config, parameters, tokenizer),
    }


def _transformers(config: ModelConfig, parameters: Parameters, tokenizer: Tokenizer) -> Generate:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        write_hugging_face(Path(directory), config, to_outside(parameters, config), tokenizer)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_length=None,
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
        new: list[list[int]] = answer[:, ids.shape[1] :].tolist()
        return new

    return generate


def _run(side: Generate, prompts: list[list[int]], count: int) -> Callable[[], object]:
    return lambda: side(prompts, count)


def _prompts(config: ModelConfig, batch: int) -> list[list[int]]:
    prompts: list[list[int]] = np.random.default_rng(0).integers(0, config.vocab_size, (batch, PROMPT_TOKENS)).tolist()
    return prompts


def _bytes(parameters: Parameters) -> int:
    """What a token needs read: every weight once. A table that is tied is read as the head."""
    leaves = flatten(parameters)
    return sum(leaf.nbytes for path, leaf in leaves.items() if "lm_head.kernel" not in leaves or "embed" not in path)


def _rows(batch: int) -> str:
    return "1 row" if batch == 1 else f"{batch} rows"
