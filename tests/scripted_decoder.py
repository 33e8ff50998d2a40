"""A decoder that answers by a script, so that what a server does with an answer can be tested without a model."""

import itertools
import math
import re
import time

from minigpt_jax.generation import Extension
from minigpt_jax.logprobs import TokenLogprob

ENDLESS = "endless"
"""The question whose answer does not end by itself, and comes slowly."""

BROKEN = "broken"
"""The question at which the decoder fails."""


def last_question(text):
    """What the last user turn of a prompt says; a prompt without turns as it is."""
    return [text, *re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.DOTALL)][-1].removeprefix(
        "<|im_start|>"
    )


class ScriptedDecoder:
    """Goes on with `answer_to` the last question of each row's prompt, then with the end mark."""

    passes = 0

    def __init__(self, tokenizer, answer_to):
        self._tokenizer, self._answer_to = tokenizer, answer_to
        self.prompts = []
        """The text of every prompt that was answered."""

    def start(self, *, rows, slots):
        self._held = [[] for _ in range(rows)]
        self._rest = [iter(()) for _ in range(rows)]

    @property
    def lengths(self):
        return [len(held) for held in self._held]

    def keep(self, lengths):
        self._held = [held[:length] for held, length in zip(self._held, lengths, strict=True)]

    def read(self, tokens):
        for number, new in enumerate(tokens):
            if new:
                self._held[number] += new
                self._rest[number] = None

    def extend(self, configs, *, uniforms, stop_ids, is_active, num_logprobs=None):
        ids = [self._new(number, uniforms.shape[1]) if active else [] for number, active in enumerate(is_active)]
        likely = [[self._logprob(id, num_logprobs or 0) for id in row] for row in ids]
        for held, new in zip(self._held, ids, strict=True):
            held += [id for id in new if id not in stop_ids]
        return Extension(ids, likely if num_logprobs is not None else [[] for _ in ids])

    def _logprob(self, id, number):
        impossible = self._tokenizer.bos_id, -math.inf
        return TokenLogprob(id, -0.5, ((id, -0.5), impossible)[:number])

    def _new(self, number, count):
        if self._rest[number] is None:
            self._rest[number] = self._script(self._held[number])
        new = list(itertools.islice(self._rest[number], count))
        if self._tokenizer.eos_id in new:
            new = new[: new.index(self._tokenizer.eos_id) + 1]
        return new

    def _script(self, prompt):
        text = self._tokenizer.decode(prompt)
        self.prompts.append(text)
        question = last_question(text)
        if question == BROKEN:
            raise RuntimeError("the script says so")
        if question == ENDLESS:
            return self._endless()
        return iter([*self._tokenizer.encode(self._answer_to(question)), self._tokenizer.eos_id])

    def _endless(self):
        while True:
            time.sleep(0.001)
            yield from self._tokenizer.encode(" on")
