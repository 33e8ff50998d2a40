"""Generation in PyTorch, written to be read: the twin of minigpt_jax/generate.py, with a loop in place of compilation.

A call computes the rows that take part in it alone. minigpt_jax/generation.py drives it.

B rows  R rows that take part  T tokens read at once  N tokens of one decoding call  G guesses
L slots of a row  D hidden  V vocabulary
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minigpt_jax.generation import Extension, GenerationConfig
from minigpt_jax.logprobs import TokenLogprob, token_logprobs
from minigpt_torch.kv_cache import CachedAttention, KVCache, empty_cache
from minigpt_torch.lora import LayerAdapters
from minigpt_torch.model import Transformer
from minigpt_torch.sampling import Sampling, logprobs_of, looked_up, sample


class Rows(NamedTuple):
    """What is known of each row."""

    cache: KVCache
    ids: Tensor  # int64 [B, L] tokens read, and beyond them whatever was there
    lengths: Tensor  # int64 [B] how many
    scores: Tensor  # float [B, V] of the token after them
    seen: Tensor  # bool [B, V] ids among the tokens read


Choose = Callable[[Tensor, Tensor, int], Tensor]
"""(scores [R, V], seen [R, V], which of a pass's tokens) -> the ids [R] that are chosen."""


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
        lengths: list[int] = self._known.lengths.tolist()
        return lengths

    @property
    def _known(self) -> Rows:
        assert self._rows is not None, "start comes first"
        return self._rows

    @property
    def _device(self) -> torch.device:
        return self._model.embed_tokens.weight.device

    def start(self, *, rows: int, slots: int) -> None:
        """Empty rows, which may come to hold `slots` tokens each."""
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
        numbers = [number for number, row in enumerate(tokens) if row]
        if not numbers:
            return
        counts = torch.tensor([len(tokens[number]) for number in numbers], device=self._device)
        block = torch.zeros(len(numbers), int(counts.max()), dtype=torch.int64, device=self._device)
        for into, number in zip(block, numbers, strict=True):
            into[: len(tokens[number])] = torch.tensor(tokens[number])
        rows, hidden = self._forward(_taken(self._known, numbers), block, counts)
        last = hidden[torch.arange(len(counts), device=self._device), counts - 1]  # [R, D]
        self._put_back(_advanced(rows, block, counts, self._model.logits(last)), numbers)

    def _put_back(self, part: Rows, numbers: list[int]) -> None:
        """Have the rows that were taken in their places again."""
        if len(numbers) == len(self._known.lengths):
            self._rows = part
            return
        for leaf, new in zip(_leaves(self._known), _leaves(part), strict=True):
            leaf[numbers] = new

    def _forward(self, rows: Rows, tokens: Tensor, counts: Tensor) -> tuple[Rows, Tensor]:
        """Hidden states [R, T, D] of tokens that come next; keys, values and ids are in their slots, no more."""
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
        """Forget what each row holds after its first `lengths` tokens; those that do read at least one more."""
        rows = self._known
        kept = torch.minimum(rows.lengths, torch.tensor(lengths, device=self._device))
        row, slot = (torch.arange(rows.ids.shape[1], device=self._device) < kept[:, None]).nonzero(as_tuple=True)
        seen = torch.zeros_like(rows.seen)
        seen[row, rows.ids[row, slot]] = True
        self._rows = rows._replace(lengths=kept, seen=seen)

    def repeat(self, times: int) -> None:
        """Each row `times` times over, one beside the other."""
        self._rows = _changed(self._known, lambda leaf: leaf.repeat_interleave(times, dim=0))

    @torch.no_grad()
    def extend(
        self,
        configs: Sequence[GenerationConfig],
        *,
        uniforms: NDArray[np.float32],  # [B, N]
        stop_ids: Sequence[int],
        is_active: Sequence[bool],
        num_logprobs: int | None = None,
    ) -> Extension:
        """New ids of the rows that are active: one for each column of `uniforms`, or up to the first stop id.

        A stop id is the last of its row's ids, and is not read: the row does not hold it. With `num_logprobs` each new
        id comes with its log-probability, and with those of that many likeliest ids.
        """
        numbers = [number for number, active in enumerate(is_active) if active]
        rows, device = _taken(self._known, numbers), self._device
        sampling = sampling_of([configs[number] for number in numbers], dtype=rows.scores.dtype, device=device)
        draws = torch.from_numpy(uniforms[numbers]).to(device, rows.scores.dtype)
        guesses = max(config.guesses for config in configs)
        stops = torch.tensor(list(stop_ids), device=device)
        batch, steps = draws.shape
        every, new = torch.arange(batch, device=device), [list[int]() for _ in configs]
        logprobs = [list[TokenLogprob]() for _ in configs]
        active = torch.ones(batch, dtype=torch.bool, device=device)
        counts = torch.zeros(batch, dtype=torch.int64, device=device)

        def choose(scores: Tensor, seen: Tensor, number: int, *, counts: Tensor) -> Tensor:
            return sample(scores, seen, sampling, draws[every, (counts + number).clamp(max=steps - 1)])

        def write(ids: Tensor, scores: Tensor, is_new: Tensor) -> None:
            columns = () if num_logprobs is None else logprobs_of(scores, ids)
            for place in is_new.nonzero()[:, 0].tolist():
                own = [int(ids[place])]
                new[numbers[place]] += own
                if num_logprobs is not None:
                    each = (column[place, None].cpu().numpy() for column in columns)
                    logprobs[numbers[place]] += token_logprobs(own, *each, number=num_logprobs)

        while (writes := active & (counts < steps)).any():
            first = choose(rows.scores, rows.seen, 0, counts=counts)
            write(first, rows.scores, writes)
            active = active & ~(writes & torch.isin(first, stops))
            reads = writes & active
            guess, size = looked_up(rows.ids, rows.lengths, first, guesses)
            size = torch.where(reads, torch.minimum(size, steps - counts - 1), 0)
            tokens = torch.cat([first[:, None], guess], dim=1)  # [R, 1 + G]
            rows, hidden = self._forward(rows, tokens, torch.where(reads, 1 + size, 0))
            scores = self._model.logits(hidden.reshape(-1, hidden.shape[-1])).reshape(*tokens.shape, -1)
            seen = _marked(rows.seen, first[:, None], reads[:, None])
            right = _right_guesses(guess, size, scores, seen, stops, partial(choose, counts=counts))
            for number in range(guesses):
                write(guess[:, number], scores[:, number], number < right)
            rows = _advanced(rows, tokens, torch.where(reads, 1 + right, 0), scores[every, right])
            counts = counts + writes * (1 + right)
            self.passes += 1
        self._put_back(rows, numbers)
        return Extension(new, logprobs)


def _right_guesses(
    guess: Tensor,  # int64 [R, G]
    size: Tensor,  # int64 [R] how many there are
    scores: Tensor,  # float [R, 1 + G, V] of what stands in their places, and of what follows them
    seen: Tensor,  # bool [R, V]
    stop_ids: Tensor,
    choose: Choose,
) -> Tensor:  # int64 [R]
    """How many guesses are what is chosen in their places, up to the first that is not, or is a stop id."""
    right = torch.zeros_like(size)
    for number in range(guess.shape[1]):
        chosen = choose(scores[:, number], seen, 1 + number)
        is_right = (right == number) & (number < size) & (chosen == guess[:, number]) & ~torch.isin(chosen, stop_ids)
        right = right + is_right
        seen = _marked(seen, chosen[:, None], is_right[:, None])
    return right


def _changed(rows: Rows, change: Callable[[Tensor], Tensor]) -> Rows:
    cache, *rest = rows
    keys, values = (tuple(map(change, layers)) for layers in cache)
    return Rows(KVCache(keys, values), *map(change, rest))


def _leaves(rows: Rows) -> Iterator[Tensor]:
    cache, *rest = rows
    return chain(*cache, rest)


def _taken(rows: Rows, numbers: list[int]) -> Rows:
    """These rows of every tensor, or all."""
    return rows if len(numbers) == len(rows.lengths) else _changed(rows, lambda leaf: leaf[numbers])


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
