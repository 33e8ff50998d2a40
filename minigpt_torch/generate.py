"""Generation in PyTorch, written to be read: the twin of minigpt_jax/generate.py, with a loop in place of compilation.

minigpt_jax/generation.py drives it.

B rows  T tokens read at once  N tokens of one decoding call  V vocabulary
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minigpt_jax.generation import GenerationConfig
from minigpt_torch.kv_cache import CachedAttention, KVCache, empty_cache
from minigpt_torch.lora import LayerAdapters
from minigpt_torch.model import Transformer
from minigpt_torch.sampling import Sampling, looked_up, sample


class Rows(NamedTuple):
    """What is known of each row."""

    cache: KVCache
    ids: Tensor  # int64 [B, L] tokens read, and beyond them whatever was there
    lengths: Tensor  # int64 [B] how many
    scores: Tensor  # float [B, V] of the token after them
    seen: Tensor  # bool [B, V] ids among the tokens read


class TorchDecoder:
    """Rows of tokens that a model reads and continues: minigpt_jax/generation.py's `Decoder` in PyTorch.

    Args:
        model: with its weights.
        adapters: minigpt_torch/lora.py's `layer_adapters`, beside the weights.
    """

    def __init__(self, model: Transformer, *, adapters: Sequence[LayerAdapters] | None = None):
        self._model, self._adapters = model, adapters
        self._rows: Rows | None = None
        self.passes = 0
        """Passes through the model that decoding has taken, reading not counted."""

    @property
    def lengths(self) -> list[int]:
        """Tokens that each row holds."""
        return [int(length) for length in self._known.lengths]

    @property
    def _known(self) -> Rows:
        assert self._rows is not None, "start comes first"
        return self._rows

    @property
    def _device(self) -> torch.device:
        return self._model.embed_tokens.weight.device

    def start(self, *, rows: int, slots: int) -> None:
        """Empty rows, with room for at least `slots` tokens each."""
        model, device = self._model, self._device
        shape = (rows, model.config.vocab_size)
        self._rows = Rows(
            empty_cache(model.config, rows=rows, slots=slots, dtype=model.dtype, device=device),
            torch.zeros((rows, slots), dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.promote_types(model.dtype, torch.float32), device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
        )

    @torch.no_grad()
    def read(self, tokens: Sequence[Sequence[int]]) -> None:
        """Append tokens to each row; rows may get unlike numbers of them, also none."""
        counts = torch.tensor([len(row) for row in tokens], device=self._device)
        block = torch.zeros(len(tokens), int(counts.max()), dtype=torch.int64, device=self._device)
        for number, row in enumerate(tokens):
            block[number, : len(row)] = torch.tensor(row)
        if not block.numel():
            return
        rows, hidden = self._forward(self._known, block, counts)
        last = hidden[torch.arange(len(counts), device=self._device), counts.clamp(min=1) - 1]  # [B, D]
        self._rows = _advanced(rows, block, counts, self._model.logits(last))

    def _forward(self, rows: Rows, tokens: Tensor, counts: Tensor) -> tuple[Rows, Tensor]:
        """Hidden states [B, T, D] of tokens that come next; keys, values and ids are in their slots, no more."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        positions = rows.lengths[:, None] + places
        is_real = places < counts[:, None]
        attention = CachedAttention(rows.cache, positions=positions, is_real=is_real)
        hidden = self._model(
            tokens,
            segment_ids=is_real.long(),
            positions=positions,
            adapters=self._adapters,
            attends=[attention.of_layer(number) for number in range(self._model.config.num_layers)],
        )
        row, column = is_real.nonzero(as_tuple=True)
        rows.ids[row, positions[row, column]] = tokens[row, column]
        return rows, hidden.reshape(*tokens.shape, -1)

    def keep(self, lengths: Sequence[int]) -> None:
        """Forget what each row holds after its first `lengths` tokens; at least one more is read before decoding."""
        rows = self._known
        kept = torch.minimum(rows.lengths, torch.tensor(lengths, device=self._device))
        row, slot = (torch.arange(rows.ids.shape[1], device=self._device) < kept[:, None]).nonzero(as_tuple=True)
        seen = torch.zeros_like(rows.seen)
        seen[row, rows.ids[row, slot]] = True
        self._rows = rows._replace(lengths=kept, seen=seen)

    def repeat(self, times: int) -> None:
        """Each row `times` times over, one beside the other."""
        cache, *rest = self._known
        repeated = [each.repeat_interleave(times, dim=0) for each in rest]
        keys, values = (tuple(each.repeat_interleave(times, dim=0) for each in layers) for layers in cache)
        self._rows = Rows(KVCache(keys, values), *repeated)

    @torch.no_grad()
    def extend(
        self,
        configs: Sequence[GenerationConfig],
        *,
        uniforms: NDArray[np.float32],  # [B, N]
        stop_ids: Sequence[int],
        is_active: Sequence[bool],
    ) -> list[list[int]]:
        """New ids of the rows that are active: one for each column of `uniforms`, or up to the first stop id.

        A stop id is the last of its row's ids, and is not read: the row does not hold it.
        """
        rows, device = self._known, self._device
        sampling = sampling_of(configs, dtype=rows.scores.dtype, device=device)
        numbers = torch.from_numpy(uniforms).to(device, rows.scores.dtype)
        guesses = max(config.guesses for config in configs)
        stops = torch.tensor(list(stop_ids), device=device)
        active = torch.tensor(is_active, device=device)
        batch, steps = numbers.shape
        every, new = torch.arange(batch, device=device), [list[int]() for _ in configs]
        counts = torch.zeros(batch, dtype=torch.int64, device=device)

        def choose(scores: Tensor, seen: Tensor, places: Tensor) -> Tensor:
            return sample(scores, seen, sampling, numbers[every, places.clamp(max=steps - 1)])

        while (writes := active & (counts < steps)).any():
            first = choose(rows.scores, rows.seen, counts)
            active = active & ~(writes & torch.isin(first, stops)) & (rows.lengths < rows.cache.slots)
            reads = writes & active
            room = torch.minimum(steps - counts - 1, rows.cache.slots - rows.lengths - 1)
            guess, size = looked_up(rows.ids, rows.lengths, first, guesses)
            size = torch.where(reads, torch.minimum(size, room), 0)
            tokens = torch.cat([first[:, None], guess], dim=1)  # [B, 1 + guesses]
            rows, hidden = self._forward(rows, tokens, torch.where(reads, 1 + size, 0))
            scores = self._model.logits(hidden.reshape(-1, hidden.shape[-1])).reshape(*tokens.shape, -1)
            # A guess counts when it is what would have been chosen in its place.
            right, seen = torch.zeros_like(counts), _marked(rows.seen, first[:, None], reads[:, None])
            for number in range(guesses):
                chosen = choose(scores[:, number], seen, counts + 1 + number)
                is_right = (right == number) & (number < size) & (chosen == guess[:, number])
                is_right &= ~torch.isin(chosen, stops)
                right = right + is_right
                seen = _marked(seen, chosen[:, None], is_right[:, None])
            for row, ids, writing, taken in zip(new, tokens.tolist(), writes.tolist(), right.tolist(), strict=True):
                row += ids[: 1 + taken] if writing else []
            rows = _advanced(rows, tokens, torch.where(reads, 1 + right, 0), scores[every, right])
            counts = counts + writes * (1 + right)
            self.passes += 1
        self._rows = rows
        return new


def _advanced(rows: Rows, tokens: Tensor, counts: Tensor, scores: Tensor) -> Rows:
    """The rows once the first `counts` of `tokens` [B, T] count as read, with the scores [B, V] of what follows."""
    is_read = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
    return rows._replace(
        lengths=rows.lengths + counts,
        scores=torch.where(counts[:, None] > 0, scores, rows.scores),
        seen=_marked(rows.seen, tokens, is_read),
    )


def _marked(seen: Tensor, tokens: Tensor, is_real: Tensor) -> Tensor:
    """`seen` [B, V] with the real ones of `tokens` [B, T]."""
    row, column = is_real.nonzero(as_tuple=True)
    marked = seen.clone()
    marked[row, tokens[row, column]] = True
    return marked


def sampling_of(configs: Sequence[GenerationConfig], *, dtype: torch.dtype, device: torch.device) -> Sampling:
    """The settings of each row as tensors."""

    def column(name: str, dtype: torch.dtype) -> Any:
        return torch.tensor([getattr(config, name) for config in configs], dtype=dtype, device=device)

    return Sampling(
        repetition_penalty=column("repetition_penalty", dtype),
        temperature=column("temperature", dtype),
        top_k=column("top_k", torch.int64),
        top_p=column("top_p", dtype),
        min_p=column("min_p", dtype),
    )
