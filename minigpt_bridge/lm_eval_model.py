"""A model for EleutherAI's lm-eval: `lm_eval.simple_evaluate(LanguageModel("out/x"), tasks=[...])`.

Takes the extra `eval`. Text begins with the mark that opens a document, as in training. Context and continuation are
encoded apart (lm-eval's own models encode them together and cut; the two differ where the tokenizer merges over the
border). Chat templates are not offered: lm-eval hands them over as text, in which a mark would be ordinary characters.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, get_args

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from minigpt_bridge.decoders import open_decoder, open_scorer
from minigpt_jax.config import Backend
from minigpt_jax.console import work_progress
from minigpt_jax.errors import UserError
from minigpt_jax.generation import Decoder, GenerationConfig, generate
from minigpt_jax.scoring import Row, TokenScores, continuation_row, score_rows


class LanguageModel(LM):
    """A model in any format that the other commands read.

    Args:
        source: a run directory, a Hugging Face directory, a .safetensors or a .pth file.
        backend: the framework that computes.
        dtype: of the computation.
        adapter: applied beside the weights.
        max_seq_len: tokens that are read at once; longer contexts lose their beginning.
        batch_size: rows that are read at once.

    Raises:
        UserError: as `open_scorer`.
    """

    def __init__(
        self,
        source: str,
        *,
        backend: Backend = "jax",
        dtype: str = "float32",
        adapter: str | None = None,
        max_seq_len: int = 512,
        batch_size: int = 16,
    ):
        super().__init__()
        if backend not in get_args(Backend):
            raise UserError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
        for name, value in (("max_seq_len", max_seq_len), ("batch_size", batch_size)):
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} must be a number of at least 1, got {value!r}")
        ready = open_scorer(source, backend=backend, dtype=dtype, adapter=adapter)
        self._scorer, self._tokenizer = ready.scorer, ready.tokenizer
        self._max_seq_len = min(max_seq_len, ready.config.max_position_embeddings)
        self._batch_size = batch_size
        self._source = source
        self._options: dict[str, Any] = {"backend": backend, "dtype": dtype, "adapter": adapter}
        self._decoder: Decoder | None = None

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """(sum of log-probabilities, whether greedy decoding would write it) of each request's continuation."""
        scores = self._score([self._row(*request.args) for request in requests])
        return [
            (float(found.log_probabilities.sum(dtype=np.float64)), bool(found.is_likeliest.all())) for found in scores
        ]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """The log-probability of each request's whole text, in windows of which the last reaches back for context."""
        rows: list[Row] = []
        counts = []
        for request in requests:
            pieces = get_rolling_token_windows(
                self._tokenizer.encode(request.args[0]), self._tokenizer.bos_id, self._max_seq_len, context_len=1
            )
            own = [continuation_row(*make_disjoint_window(piece)) for piece in pieces]
            rows += own
            counts.append(len(own))
        sums = iter([float(found.log_probabilities.sum(dtype=np.float64)) for found in self._score(rows)])
        return [sum(next(sums) for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The text that follows each request's context, up to a stop string."""
        if self._decoder is None:
            self._decoder = open_decoder(self._source, **self._options).decoder
        texts: list[str] = []
        with work_progress("generating") as report:
            for config, group in groupby(requests, key=lambda request: _generation_config(request.args[1])):
                room = self._max_seq_len - config.max_new_tokens
                if room < 1:
                    most = self._max_seq_len
                    raise UserError(f"max_gen_toks {config.max_new_tokens} leaves no room in {most} tokens")
                contexts = [self._context(request.args[0])[-room:] for request in group]
                for first in range(0, len(contexts), self._batch_size):
                    prompts = contexts[first : first + self._batch_size]
                    done = generate(self._decoder, self._tokenizer, prompts, config, context=self._max_seq_len)
                    texts += [completion.text for completion in done]
                    report(len(texts), len(requests))
        return texts

    def _context(self, text: str) -> list[int]:
        return [self._tokenizer.bos_id, *self._tokenizer.encode(text)]

    def _row(self, context: str, continuation: str) -> Row:
        # As lm-eval's own models: the tokenizer writes a space as part of the word behind it.
        text = context.rstrip()
        ids = self._tokenizer.encode(context[len(text) :] + continuation)
        room = self._max_seq_len + 1 - len(ids)
        if room < 1:
            raise UserError(f"a continuation has {len(ids)} tokens, and max_seq_len is {self._max_seq_len}")
        return continuation_row(self._context(text)[-room:], ids)

    def _score(self, rows: Sequence[Row]) -> list[TokenScores]:
        with work_progress("scoring") as report:
            return score_rows(
                self._scorer,
                rows,
                batch_size=self._batch_size,
                max_seq_len=self._max_seq_len,
                on_progress=lambda done: report(done, len(rows)),
            )


def _generation_config(options: dict[str, Any]) -> GenerationConfig:
    """lm-eval's options of a generation as ours.

    Raises:
        UserError: an option that is not known.
    """
    known = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")
    if unknown := set(options) - set(known):
        raise UserError(f"generation option {', '.join(sorted(unknown))} is not known; there are {', '.join(known)}")
    until = options.get("until") or ()
    samples = options.get("do_sample", False)
    return GenerationConfig(
        max_new_tokens=int(options.get("max_gen_toks", 256)),
        stop=tuple(filter(None, (until,) if isinstance(until, str) else until)),
        temperature=float(options.get("temperature", 1.0)) if samples else 0.0,
        top_k=int(options.get("top_k") or 0),
        top_p=float(options.get("top_p", 1.0)),
    )
