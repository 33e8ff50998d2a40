"""What generation gives a person: text as it comes, where it ends, and the numbers that decide it."""

import numpy as np
import pytest

from minigpt_jax.errors import UserError
from minigpt_jax.generation import Extension, GenerationConfig, generate, uniform_numbers
from minigpt_jax.tokenizer import load_tokenizer

TEXT = "The river 尼罗河 is long. 😀 It ends here, not there."


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


class Recital:
    """A decoder whose rows go on with ids that were written down before."""

    def __init__(self, *rows):
        self._rows = [list(row) for row in rows]
        self.lengths = []

    def start(self, *, rows, slots):
        self.lengths = [0] * rows

    def read(self, tokens):
        self.lengths = [length + len(row) for length, row in zip(self.lengths, tokens, strict=True)]

    def repeat(self, times):
        self.lengths = [length for length in self.lengths for _ in range(times)]

    def extend(self, configs, *, uniforms, stop_ids, is_active, num_logprobs=None):
        new = []
        for number, (row, active) in enumerate(zip(self._rows, is_active, strict=True)):
            ids = row[: uniforms.shape[1]] if active else []
            cut = next((place + 1 for place, id in enumerate(ids) if id in stop_ids), len(ids))
            new.append(ids[:cut])
            del row[:cut]
            self.lengths[number] += cut
        return Extension(new, [])


def recited(tokenizer, *rows, context=1000, samples=1, **settings):
    pieces = [""] * len(rows)

    def note(row, piece):
        pieces[row] += piece

    config = GenerationConfig(**settings)
    options = {"context": context, "samples": samples}
    prompts = [[1]] * (len(rows) // samples)
    done = generate(Recital(*rows), tokenizer, prompts, config, on_text=note, **options)
    assert pieces == [completion.text for completion in done]
    silent = generate(Recital(*rows), tokenizer, prompts, config, **options)
    assert silent == done
    return done


def test_pieces_are_whole_characters_and_make_up_the_text(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert len(ids) > len(tokenizer.encode("The river is long. It ends here, not there."))
    (done,) = recited(tokenizer, [*ids, tokenizer.eos_id, 77])
    assert (done.text, done.ids, done.finish_reason) == (TEXT, ids, "stop")


def test_a_text_that_is_cut_inside_a_character_says_so_once(tokenizer):
    ids = tokenizer.encode("a 😀")
    assert len(ids) > 3
    (done,) = recited(tokenizer, ids, max_new_tokens=len(ids) - 1)
    assert (done.text, done.finish_reason) == ("a \ufffd", "length")


@pytest.mark.parametrize("stop", ["ends", "s h", " not", "河", "there.", "T"])
def test_a_stop_string_ends_the_text_before_it(tokenizer, stop):
    ids = tokenizer.encode(TEXT)
    (done,) = recited(tokenizer, [*ids, *ids], stop=("never there", stop))
    assert (done.text, done.finish_reason) == (TEXT[: TEXT.index(stop)], "stop")
    # Its ids go as far as the text needs them.
    assert stop in tokenizer.decode(done.ids)
    assert stop not in tokenizer.decode(done.ids[:-1])


def test_the_beginning_of_a_stop_string_is_given_out_when_something_else_follows(tokenizer):
    ids = tokenizer.encode("ab abc abd")
    (done,) = recited(tokenizer, [*ids, tokenizer.eos_id], stop=("abcd", "d!"))
    assert done.text == "ab abc abd"


def test_rows_end_on_their_own(tokenizer):
    first, second = tokenizer.encode("one two three four five six"), tokenizer.encode("seven")
    done = recited(tokenizer, first, [*second, tokenizer.eos_id], max_new_tokens=4)
    assert [completion.finish_reason for completion in done] == ["length", "stop"]
    assert (done[0].ids, done[1].ids) == (first[:4], second)


def test_the_context_bounds_a_row(tokenizer):
    ids = tokenizer.encode("one two three four five six")
    assert [done.ids for done in recited(tokenizer, ids, context=4)] == [ids[:3]]
    with pytest.raises(UserError, match="a prompt has 1 tokens, and there is room for 0"):
        recited(tokenizer, ids, context=1)


def test_samples_of_a_prompt_stand_side_by_side(tokenizer):
    rows = [[*tokenizer.encode(word), tokenizer.eos_id] for word in ("a", "b", "c", "d")]
    assert [done.text for done in recited(tokenizer, *rows, samples=2)] == ["a", "b", "c", "d"]


def test_special_tokens_are_not_shown(tokenizer):
    ids = [tokenizer.bos_id, *tokenizer.encode("hi")]
    assert recited(tokenizer, [*ids, tokenizer.eos_id])[0].text == "hi"


def test_numbers_are_the_same_for_ever_and_their_own_for_each_row_and_seed():
    numbers = uniform_numbers(42, row=0, count=1000)
    assert numbers[:3].tolist() == pytest.approx([0.8201981, 0.1892456, 0.8676608], abs=1e-7)
    assert numbers.dtype == np.float32
    assert 0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1
    np.testing.assert_array_equal(uniform_numbers(42, row=0, count=5), numbers[:5])
    for other in (uniform_numbers(42, row=1, count=1000), uniform_numbers(43, row=0, count=1000)):
        assert not np.isin(other, numbers).any(where=other != 0) or (other != numbers).mean() > 0.99


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "--max-new-tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "--temperature must be 0 or more, got -1.0"),
        ({"temperature": float("nan")}, "--temperature must be 0 or more, got nan"),
        ({"top_k": -1}, "--top-k must be at least 0, got -1"),
        ({"top_p": 0.0}, "--top-p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "--top-p must be above 0 and at most 1, got 1.1"),
        ({"min_p": -0.1}, "--min-p must lie between 0 and 1, got -0.1"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty must be positive and finite, got 0.0"),
        ({"seed": -1}, "--seed must be at least 0, got -1"),
        ({"stop": ("",)}, "--stop is an empty string"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        GenerationConfig(**settings)
