"""Requests that come at any time: each gets what it gets alone, and what happens to one harms no other."""

import random
import threading
from dataclasses import replace
from itertools import chain, count

import jax
import jax.numpy as jnp
import pytest

from minigpt_jax import generate as rooms
from minigpt_jax.config import ModelConfig
from minigpt_jax.errors import UserError
from minigpt_jax.generation import STREAMED_STEPS, Extension, GenerationConfig, generate
from minigpt_jax.initialization import initial_parameters
from minigpt_jax.logprobs import TokenLogprob
from minigpt_jax.serving.batcher import READ_AT_ONCE, Batcher
from minigpt_jax.serving.requests import Failed, Finished, GenerationRequest, Piece, QueueFull
from minigpt_jax.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("little_compiling")

SECONDS = 60
"""Nothing here takes as long; a test that waits so long has failed."""
GREEDY = GenerationConfig(max_new_tokens=20, temperature=0.0)
DRAWN = GenerationConfig(max_new_tokens=20, temperature=1.5, top_p=1.0)
ENDLESS = GenerationConfig(max_new_tokens=10**6, temperature=0.0)
TEXT = "The river 尼罗河 is long. 😀 It ends here, not there."


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


class Invention:
    """A decoder whose next id follows from all that a row holds, and from the number that draws it."""

    def __init__(self, following=None):
        self._following = following or self._any_word
        self.calls = []
        self.before_call = lambda: None

    @staticmethod
    def _any_word(row, number):
        return 300 + hash((tuple(row), number)) % 5000

    @property
    def lengths(self):
        return [len(row) for row in self.rows]

    def start(self, *, rows, slots):
        self.calls.append(("start",))
        self.before_call()
        self.rows, self._slots, self._is_stale = [[] for _ in range(rows)], slots, [True] * rows

    def read(self, tokens):
        self.calls.append(("read", {number: len(row) for number, row in enumerate(tokens) if row}))
        for number, part in enumerate(tokens):
            self.rows[number] += part
            self._is_stale[number] &= not part

    def keep(self, lengths):
        for number, length in enumerate(lengths):
            self._is_stale[number] |= length < len(self.rows[number])
            del self.rows[number][length:]

    def extend(self, configs, *, uniforms, stop_ids, is_active, num_logprobs=None):
        self.calls.append(("extend", {number for number, active in enumerate(is_active) if active}))
        self.before_call()
        ids, logprobs = [[] for _ in self.rows], [[] for _ in self.rows]
        for number, row in enumerate(self.rows):
            for uniform in uniforms[number].tolist() if is_active[number] else ():
                assert not self._is_stale[number]
                new = self._following(row, uniform if configs[number].temperature else 0.0)
                top = tuple((new + place, -float(place)) for place in range(num_logprobs or 0))
                ids[number].append(new)
                logprobs[number] += [] if num_logprobs is None else [TokenLogprob(new, -float(len(row)), top)]
                if new in stop_ids:
                    break
                row.append(new)
            assert len(row) <= self._slots
        return Extension(ids, logprobs)

    def tokens_read(self):
        return sum(chain.from_iterable(call[1].values() for call in self.calls if call[0] == "read"))


def reciting(ids):
    """What follows a row that opens with one token: these ids in turn."""
    return lambda row, _: ids[(len(row) - 1) % len(ids)]


class Listener:
    """Keeps what it is told, and can wait for it."""

    def __init__(self, react=lambda number, event: None):
        self.events = []
        self._react, self._came = react, threading.Condition()

    def __call__(self, number, event):
        with self._came:
            self.events.append((number, event))
            self._came.notify_all()
        self._react(number, event)

    def wait(self, *, ends=0, pieces=0):
        """Until so many requests are at their end, or so many pieces came."""

        def is_there():
            return len(self.of(Finished, Failed)) >= ends and len(self.of(Piece)) >= pieces

        with self._came:
            assert self._came.wait_for(is_there, SECONDS)
        return self

    def of(self, *kinds, number=None):
        return [event for one, event in self.events if isinstance(event, kinds) and number in (None, one)]

    def text(self, number=0):
        return "".join(piece.text for piece in self.of(Piece, number=number))

    def ids(self, number=0):
        return list(chain.from_iterable(piece.ids for piece in self.of(Piece, number=number)))

    def reason(self, number=0):
        (end,) = self.of(Finished, Failed, number=number)
        return getattr(end, "reason", end)


@pytest.fixture
def make(tokenizer):
    made = []

    def make_batcher(decoder=None, *, rows=4, context=4000, max_waiting=100):
        made.append(Batcher(decoder or Invention(), tokenizer, rows=rows, context=context, max_waiting=max_waiting))
        return made[-1]

    yield make_batcher
    for batcher in made:
        batcher.close()


def request(prompt, config=GREEDY, **options):
    return GenerationRequest(tuple(prompt), config, **options)


def asked(batcher, requests):
    """The listener of requests once they are done."""
    listener = Listener()
    batcher.submit(requests, listener)
    return listener.wait(ends=len(requests))


def alone(decoder, tokenizer, one, *, context=4000):
    """What `generate` gives for a request, in the place of its stream of numbers."""
    prompts = [one.prompt] * (one.row + 1)
    return generate(decoder, tokenizer, prompts, one.config, context=context)[-1]


def require_as_alone(listener, decoder, tokenizer, requests, **options):
    for number, one in enumerate(requests):
        done = alone(decoder, tokenizer, one, **options)
        assert (listener.text(number), listener.ids(number), listener.reason(number)) == (
            done.text, done.ids, done.finish_reason,
        )  # fmt: skip


def some_prompts(number, *, vocab_size=5000, longest=40):
    generator = random.Random(number)
    return [[generator.randrange(3, vocab_size) for _ in range(generator.randrange(1, longest))] for _ in range(number)]


# --- As alone ---


@pytest.mark.parametrize("config", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("rows", [3, 16])
def test_requests_together_give_what_each_gives_alone(make, tokenizer, config, rows):
    requests = [request(prompt, config, row=number % 3) for number, prompt in enumerate(some_prompts(16))]
    require_as_alone(asked(make(rows=rows), requests), Invention(), tokenizer, requests)


def test_requests_of_unlike_settings_and_lengths_run_side_by_side(make, tokenizer):
    settings = [{"max_new_tokens": 1}, {"max_new_tokens": 37}, {"seed": 9}, {"temperature": 0.0}, {"top_k": 3}] * 2
    requests = [
        request(prompt, GenerationConfig(**{"max_new_tokens": 9, **own}))
        for prompt, own in zip(some_prompts(10), settings, strict=True)
    ]
    require_as_alone(asked(make(rows=8), requests), Invention(), tokenizer, requests)


SHAPE = ModelConfig(hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=12)


@pytest.fixture(scope="module")
def parameters():
    drawn = initial_parameters(SHAPE, initializer="xavier", seed=2)
    drawn["embed_tokens"]["embedding"] *= 50
    return jax.tree.map(jnp.asarray, drawn)


def test_a_model_gives_sixteen_requests_what_it_gives_each_alone(make, tokenizer, parameters):
    configs = replace(GREEDY, repetition_penalty=2.0), replace(DRAWN, temperature=20.0)
    prompts = some_prompts(16, vocab_size=6400)
    requests = [request(prompt, configs[number % 2]) for number, prompt in enumerate(prompts)]
    listener = asked(make(rooms.JaxDecoder(SHAPE, parameters), rows=16, context=100), requests)
    require_as_alone(listener, rooms.JaxDecoder(SHAPE, parameters), tokenizer, requests, context=100)
    assert len({listener.text(number) for number in range(16)}) > 12  # else constants would be compared


def test_a_random_sequence_of_requests_makes_few_compilations(make, tokenizer, parameters, monkeypatch):
    monkeypatch.setattr(rooms, "SLOT_MULTIPLE", 32)
    monkeypatch.setattr(rooms, "USUAL_SLOTS", 32)
    monkeypatch.setattr(rooms, "BUCKETS", (32, 16))
    decoder = rooms.JaxDecoder(SHAPE, parameters)
    batcher = make(decoder, rows=4, context=128)
    before = rooms._read._cache_size(), rooms._extend._cache_size()
    generator, told = random.Random(3), []
    for prompt in some_prompts(60, longest=115):
        config = GenerationConfig(max_new_tokens=generator.randrange(1, 9), temperature=generator.choice([0.0, 1.0]))
        told.append(Listener())
        batcher.submit([request(prompt, config)], told[-1])
        told[generator.randrange(len(told))].wait(ends=1)
    for listener in told:
        assert isinstance(listener.wait(ends=1).of(Finished, Failed)[0], Finished)
    # 32, 64 and 128 slots; of rows 1, 2 and 4, which read one at a time, in 2 buckets.
    assert decoder._known.cache.slots == 128
    assert rooms._read._cache_size() - before[0] <= 3 * 2
    assert rooms._extend._cache_size() - before[1] <= 3 * 3


# --- Coming and going ---


def test_a_request_that_comes_while_another_runs_does_not_wait_for_its_end(make, tokenizer):
    batcher, late = make(), Listener()
    requests = [request([5, 6, 7], GenerationConfig(max_new_tokens=2000)), request([8, 9])]
    early = Listener(lambda *_: late.events or len(early.events) > 1 or batcher.submit(requests[1:], late))
    batcher.submit(requests[:1], early)
    late.wait(ends=1)
    assert early.of(Finished) == []
    require_as_alone(early.wait(ends=1), Invention(), tokenizer, requests[:1])
    require_as_alone(late, Invention(), tokenizer, requests[1:])


def test_rows_that_rest_take_no_part_in_a_call(make):
    decoder = Invention()
    asked(make(decoder, rows=4), [request([5], GenerationConfig(max_new_tokens=40)), request([6], GREEDY)])
    together = [call[1] for call in decoder.calls if call[0] == "extend"]
    assert together == [{0, 1}] * 5 + [{0}] * 5


def test_when_cancel_returns_no_event_comes_and_the_row_is_free(make):
    decoder = Invention()
    batcher, first = make(decoder, rows=1), Listener()
    ticket = batcher.submit([request([5], ENDLESS)], first)
    second = Listener()
    batcher.submit([request([6])], second)
    first.wait(pieces=3)
    ticket.cancel()
    seen, calls = len(first.events), len(decoder.calls)
    assert second.wait(ends=1).reason() == "length"
    assert len(first.events) == seen
    # One call that was under way, then the second's prompt and its text.
    assert len(decoder.calls) - calls <= 1 + 1 + GREEDY.max_new_tokens // STREAMED_STEPS
    load = batcher.load
    assert (load.rows_in_use, load.waiting, load.served, load.cancelled) == (0, 0, 1, 1)


def test_cancel_waits_for_the_event_that_is_being_told(make):
    is_told, may_go = threading.Event(), threading.Event()
    log = []

    def react(*_):
        is_told.set()
        assert may_go.wait(SECONDS)
        log.append("told")

    ticket = make().submit([request([5], ENDLESS)], Listener(react))
    assert is_told.wait(SECONDS)
    canceller = threading.Thread(target=lambda: (ticket.cancel(), log.append("cancelled")))
    canceller.start()
    canceller.join(0.1)
    assert log == []
    may_go.set()
    canceller.join(SECONDS)
    assert log == ["told", "cancelled"]


def test_a_listener_may_cancel_there_and_then(make):
    listener = Listener(lambda *_: ticket.cancel())
    batcher, holds = make(rows=1), threading.Event()
    holder = Listener(lambda *_: holds.wait(SECONDS))
    batcher.submit([request([4], GenerationConfig(max_new_tokens=1))], holder)
    # Its end would be told next.
    ticket = batcher.submit([request([5], GenerationConfig(max_new_tokens=1)), request([6])], listener)
    holds.set()
    assert asked(batcher, [request([7])]).reason() == "length"
    assert len(listener.events) == 1
    assert batcher.load.cancelled == 1


def test_a_request_that_is_cancelled_while_it_waits_is_never_read(make):
    decoder = Invention()
    batcher, first, second = make(decoder, rows=1), Listener(), Listener()
    running = batcher.submit([request([5], ENDLESS)], first)
    first.wait(pieces=1)
    waiting = batcher.submit([request([6] * 10)], second)
    waiting.cancel()
    assert batcher.load.waiting == 0
    running.cancel()
    asked(batcher, [request([7])])
    assert second.events == []
    assert decoder.tokens_read() == 2


def test_a_listener_that_raises_is_cancelled_and_harms_no_other(make, tokenizer, caplog):
    def fail(*_):
        raise RuntimeError("gone")

    batcher, broken, other = make(rows=2), Listener(fail), Listener()
    requests = [request([6], GenerationConfig(max_new_tokens=300))]
    batcher.submit(requests, other)
    batcher.submit([request([5], ENDLESS)] * 3, broken)
    require_as_alone(other.wait(ends=1), Invention(), tokenizer, requests)
    assert asked(batcher, [request([7])] * 4).reason(3) == "length"
    assert len(broken.events) == 1
    assert (batcher.load.cancelled, batcher.load.served, batcher.load.failed) == (3, 5, 0)
    assert "a listener failed" in caplog.text


def test_requests_are_queued_all_or_none(make):
    batcher, running, waiting = make(rows=2, max_waiting=2), Listener(), Listener()
    tickets = [batcher.submit([request([5], ENDLESS)] * 2, running)]
    running.wait(pieces=2)
    tickets.append(batcher.submit([request([6])], waiting))
    with pytest.raises(QueueFull, match="3 requests would wait, and 2 may; try again later"):
        batcher.submit([request([7])] * 2, waiting)
    assert batcher.load.waiting == 1
    tickets.append(batcher.submit([request([7])], waiting))
    tickets[0].cancel()
    waiting.wait(ends=2)
    assert len(asked(batcher, [request([8])] * 4).of(Finished)) == 4


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "a prompt is empty"),
        ([5] * 10, "a prompt has 10 tokens, and there is room for 9; shorten it"),
        ([5, 6400], "a prompt has an id that is no token's; they go from 0 to 6399"),
        ([5, -1], "a prompt has an id that is no token's"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused_with_those_beside_it(make, prompt, message):
    decoder, listener = Invention(), Listener()
    batcher = make(decoder, context=10)
    with pytest.raises(UserError, match=message):
        batcher.submit([request([5]), request(prompt)], listener)
    assert asked(batcher, [request([6])]).reason() == "length"
    assert (listener.events, decoder.tokens_read()) == ([], 1)


@pytest.mark.parametrize("number", [-1, 21])
def test_a_number_of_alternatives_that_cannot_be_is_refused(number):
    with pytest.raises(UserError, match=f"log-probabilities of {number} tokens were asked for; 0 to 20 can be"):
        request([5], num_logprobs=number)


# --- Failures ---


@pytest.mark.parametrize("place", ["start", "extend"])
def test_a_decoder_that_raises_fails_what_runs_and_the_next_is_served(make, tokenizer, caplog, place):
    decoder, listener = Invention(), Listener()
    failures = iter([ValueError("no memory")])

    def fail_once():
        if decoder.calls[-1][0] == place:
            for failure in failures:
                raise failure

    decoder.before_call = fail_once
    batcher = make(decoder, rows=2)
    requests = [request([5, 6, number]) for number in range(4)]
    batcher.submit(requests, listener)
    listener.wait(ends=4)
    assert [listener.reason(number) for number in range(4)] == [Failed("ValueError: no memory")] * 2 + ["length"] * 2
    # What the rows held is not taken for known.
    assert decoder.calls.count(("start",)) == 2
    for number in (2, 3):
        assert listener.text(number) == alone(Invention(), tokenizer, requests[number]).text
    require_as_alone(asked(batcher, requests), Invention(), tokenizer, requests)
    assert (batcher.load.failed, batcher.load.served) == (2, 6)
    assert "decoding failed" in caplog.text


def test_closing_fails_what_runs_and_what_waits(make):
    batcher, listener = make(rows=1), Listener()
    batcher.submit([request([5], ENDLESS), request([6])], listener)
    listener.wait(pieces=1)
    batcher.close()
    assert [listener.reason(number) for number in range(2)] == [Failed("the batcher was closed")] * 2
    with pytest.raises(QueueFull, match="no more requests are taken"):
        batcher.submit([request([7])], listener)


# --- Ends ---


@pytest.mark.parametrize("stop", ["ends", "s h", " not", "河", "there.", "T"])
def test_a_stop_string_ends_a_text_in_the_middle_of_a_call(make, tokenizer, stop):
    following = reciting(tokenizer.encode(TEXT))
    requests = [request([5], GenerationConfig(stop=("never there", stop), max_new_tokens=200), num_logprobs=1)]
    listener = asked(make(Invention(following)), requests)
    require_as_alone(listener, Invention(following), tokenizer, requests)
    assert (listener.text(), listener.reason()) == (TEXT[: TEXT.index(stop)], "stop")
    logprobs = list(chain.from_iterable(piece.logprobs for piece in listener.of(Piece)))
    assert [each.id for each in logprobs] == listener.ids()


def test_an_end_mark_ends_a_text_and_is_not_counted(make, tokenizer):
    ids = tokenizer.encode("one two three")
    listener = asked(make(Invention(reciting([*ids, tokenizer.eos_id]))), [request([5], num_logprobs=0)])
    assert listener.events[-1] == (0, Finished("stop", prompt_tokens=1, completion_tokens=len(ids)))
    assert (listener.text(), listener.ids()) == ("one two three", ids)
    assert sum(len(piece.logprobs) for piece in listener.of(Piece)) == len(ids)


def test_pieces_are_whole_characters(make, tokenizer):
    ids = [*tokenizer.encode(TEXT), tokenizer.eos_id]
    listener = asked(make(Invention(reciting(ids))), [request([5], GenerationConfig(max_new_tokens=200))])
    assert listener.text() == TEXT
    assert len(listener.of(Piece)) > 4
    assert not [piece for piece in listener.of(Piece) if "\ufffd" in piece.text]


def test_a_row_may_have_room_for_one_token_only(make, tokenizer):
    context = 50
    requests = [request([5], GenerationConfig(max_new_tokens=1)), request(range(10, 9 + context), ENDLESS)]
    listener = asked(make(context=context), requests)
    require_as_alone(listener, Invention(), tokenizer, requests, context=context)
    assert [len(listener.ids(number)) for number in range(2)] == [1, 1]


# --- Prompts ---


def test_an_end_mark_is_not_taken_for_read(make, tokenizer):
    ids = [*tokenizer.encode("one two three"), tokenizer.eos_id]
    decoder = Invention(reciting(ids))
    batcher = make(decoder)
    asked(batcher, [request([5])])
    asked(batcher, [request([5, *ids, 9])])
    assert decoder.tokens_read() == 1 + 2


def test_the_next_turn_of_a_conversation_reads_only_the_rest(make, tokenizer):
    decoder = Invention()
    batcher = make(decoder, rows=2)
    first = request(range(10, 40))
    answer = asked(batcher, [first]).ids()
    asked(batcher, [request([7, 8])])
    before = decoder.tokens_read()
    turn = request([*first.prompt, *answer, 50, 51, 52])
    require_as_alone(asked(batcher, [turn]), Invention(), tokenizer, [turn])
    assert decoder.tokens_read() - before == 3
    # The same once more: its last token has to be read, for what follows it.
    before = decoder.tokens_read()
    require_as_alone(asked(batcher, [turn]), Invention(), tokenizer, [turn])
    assert decoder.tokens_read() - before == 1


def test_a_conversation_is_not_given_up_for_a_short_common_beginning(make):
    decoder = Invention()
    batcher = make(decoder, rows=2)
    first = request(range(10, 40))
    answer = asked(batcher, [first]).ids()
    asked(batcher, [request([10, 11, 99])])
    before = decoder.tokens_read()
    asked(batcher, [request([*first.prompt, *answer, 50])])
    assert decoder.tokens_read() - before == 1


def test_a_long_prompt_holds_up_neither_who_runs_nor_who_comes(make, tokenizer):
    decoder, late = Invention(), Listener()
    batcher, running = make(decoder, rows=3, context=10 * READ_AT_ONCE), Listener()
    ticket = batcher.submit([request([5], ENDLESS)], running)
    running.wait(pieces=1)
    requests = [request([6] * (3 * READ_AT_ONCE + 9)), request([7] * 20)]
    batcher.submit(requests, late)
    late.wait(ends=2)
    ticket.cancel()
    require_as_alone(late, Invention(), tokenizer, requests, context=10 * READ_AT_ONCE)
    assert late.of(Finished)[0].prompt_tokens == 20
    start = next(place for place, call in enumerate(decoder.calls) if call == ("read", {1: READ_AT_ONCE}))
    calls = decoder.calls[start : start + 9]
    # The short one is second, then reads what the long one leaves.
    assert [call[1] for call in calls] == [
        {1: READ_AT_ONCE}, {0},
        {2: 20}, {1: READ_AT_ONCE - 20}, {0, 2},
        {1: READ_AT_ONCE}, {0, 2},
        {1: 29}, {0, 1, 2},
    ]  # fmt: skip


# --- Log-probabilities ---


def test_each_request_gets_the_log_probabilities_it_asked_for(make):
    numbers = [None, 0, 3, 20, 1]
    requests = [request([5, 6, place], num_logprobs=number) for place, number in enumerate(numbers)]
    listener = asked(make(rows=5), requests)
    for place, number in enumerate(numbers):
        logprobs = list(chain.from_iterable(piece.logprobs for piece in listener.of(Piece, number=place)))
        if number is None:
            assert logprobs == []
            continue
        assert [each.id for each in logprobs] == listener.ids(place)
        # Invention's own: minus the tokens before it.
        assert [each.logprob for each, length in zip(logprobs, count(3), strict=False)] == [
            -float(length) for length in range(3, 3 + len(logprobs))
        ]
        assert {len(each.top) for each in logprobs} == {number}


def test_log_probabilities_are_computed_only_for_who_asks(make):
    decoder = Invention()
    wanted = []
    plain = decoder.extend
    decoder.extend = lambda *args, **options: wanted.append(options["num_logprobs"]) or plain(*args, **options)
    asked(make(decoder), [request([5]), request([6], GenerationConfig(max_new_tokens=STREAMED_STEPS), num_logprobs=2)])
    assert wanted == [2, None, None, None, None]
