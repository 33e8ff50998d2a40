"""Continuous batching: requests that come at any time share one decoder, each in a row of its own. Framework-free.

Between two calls of the decoder the rows of finished and cancelled requests are free, and those that wait move in: no
request waits for the end of another. A request gets what `generate` gives for it alone, whatever runs beside it
(docs/numerics.md says up to which digit).

- A call adds STREAMED_STEPS tokens to each row; fewer, to all alike, where one of them has no room for more.
- Of prompts at most READ_AT_ONCE tokens are read between two calls, so that a long one does not hold up the others.
- A free row remembers its tokens. A prompt that begins with half of them or more, as the next turn of a conversation
  does, moves in there and has only the rest read; any other takes the row that has been free for longest.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from minigpt_jax.errors import UserError
from minigpt_jax.generation import STREAMED_STEPS, Decoder, RowIds, extend_rows, stop_ids_of, take
from minigpt_jax.logprobs import TokenLogprob
from minigpt_jax.row_text import RowText
from minigpt_jax.serving.requests import Event, Failed, Finished, GenerationRequest, OnEvent, Piece, QueueFull
from minigpt_jax.tokenizer import Tokenizer

READ_AT_ONCE = 512
"""Tokens of prompts that are read between two decoding calls."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Load:
    """What a batcher does and has done."""

    rows: int
    rows_in_use: int
    waiting: int
    served: int
    """Requests that were answered to the end."""
    cancelled: int
    failed: int
    tokens: int
    """New tokens of all requests."""


class Ticket:
    """Requests that were submitted together."""

    def __init__(self, on_event: OnEvent, withdraw: Callable[["Ticket"], None]):
        self._on_event, self._withdraw = on_event, withdraw
        # The thread that is told may cancel there and then.
        self._telling = threading.RLock()
        self.is_cancelled = False

    def cancel(self) -> None:
        """Nothing more of these requests: when this returns, no further event comes.

        It waits for an event that is being told, so a caller may hold no lock that its listener takes.
        """
        # First, so that the thread cannot tell one event after the other while this waits for its turn.
        self.is_cancelled = True
        with self._telling:
            self._withdraw(self)

    def tell(self, number: int, event: Event) -> None:
        """Pass an event on. A listener that fails is not told again, and what it asked for is cancelled."""
        with self._telling:
            if self.is_cancelled:
                return
            try:
                self._on_event(number, event)
            except Exception:
                _log.exception("a listener failed; its requests are cancelled")
                self.cancel()


class _Job:
    """One request on its way."""

    def __init__(self, request: GenerationRequest, ticket: Ticket, number: int, row: RowIds, text: RowText):
        self.request, self.row = request, row
        self.ticket, self._number, self._text = ticket, number, text
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def tell(self, event: Event) -> None:
        self.ticket.tell(self._number, event)

    def take(self, new: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Piece | None:
        """What can be read after a decoding call, if anything."""
        before = len(self.row.ids)
        text = take(self.row, self._text, self.row.take(new))
        ids = self.row.ids[before:]
        self._ids += ids
        if (most := self.request.num_logprobs) is not None:
            self._logprobs += [replace(each, top=each.top[:most]) for each in logprobs[: len(ids)]]
        if not text and not (self._ids and self.row.finish_reason):
            return None
        piece = Piece(text, tuple(self._ids), tuple(self._logprobs))
        self._ids, self._logprobs = [], []
        return piece


# --- The batcher ---


class Batcher:
    """One decoder, and the thread that alone uses it.

    Args:
        decoder: its rows are the batcher's from now on.
        tokenizer: of the model.
        rows: requests that run at the same time.
        context: the most tokens of a request, new ones included.
        max_waiting: requests that may wait while every row is taken.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, *, rows: int, context: int, max_waiting: int):
        self._decoder, self._tokenizer, self._stop_ids = decoder, tokenizer, stop_ids_of(tokenizer)
        self._num_rows, self._context, self._max_waiting = rows, context, max_waiting
        self._changed = threading.Condition()
        # All below is changed under the condition alone.
        self._waiting: deque[_Job] = deque()
        self._running: dict[int, _Job] = {}  # by row; those to be read first come first
        self._free = list(range(rows))  # in the order in which they became free
        self._is_closed = False
        self._served = self._cancelled = self._failed = self._tokens = 0
        # The thread's alone: what each row of the decoder holds, once there are any.
        self._held: list[list[int]] = [[] for _ in range(rows)]
        self._has_rows = False
        self._thread = threading.Thread(target=self._serve, name="batcher", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest], on_event: OnEvent) -> Ticket:
        """Queue requests, all or none.

        Args:
            requests: each runs in a row of its own.
            on_event: told of pieces and of the end of each, on the batcher's thread, which waits for it.

        Raises:
            UserError: a prompt is empty, has an id that is none, or leaves no room for a new token.
            QueueFull: too many wait already, or the batcher is closed.
        """
        ticket = Ticket(on_event, self._withdraw)
        jobs = [self._job(request, ticket, number) for number, request in enumerate(requests)]
        with self._changed:
            if self._is_closed:
                raise QueueFull("no more requests are taken")
            waiting = len(self._waiting) + len(jobs) - len(self._free)
            if waiting > self._max_waiting:
                raise QueueFull(f"{waiting} requests would wait, and {self._max_waiting} may; try again later")
            self._waiting += jobs
            self._changed.notify()
        return ticket

    def close(self) -> None:
        """Stop the thread; requests that wait or run fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    @property
    def load(self) -> Load:
        """What is going on, and what has been done so far."""
        with self._changed:
            return Load(
                rows=self._num_rows,
                rows_in_use=len(self._running),
                waiting=len(self._waiting),
                served=self._served,
                cancelled=self._cancelled,
                failed=self._failed,
                tokens=self._tokens,
            )

    def _job(self, request: GenerationRequest, ticket: Ticket, number: int) -> _Job:
        length, config = len(request.prompt), request.config
        if not length:
            raise UserError("a prompt is empty")
        if length >= self._context:
            raise UserError(f"a prompt has {length} tokens, and there is room for {self._context - 1}; shorten it")
        highest = self._tokenizer.vocab_size - 1
        if not 0 <= min(request.prompt) <= max(request.prompt) <= highest:
            raise UserError(f"a prompt has an id that is no token's; they go from 0 to {highest}")
        row = RowIds(config, length=length, context=self._context, row=request.row, stop_ids=self._stop_ids)
        return _Job(request, ticket, number, row, RowText(self._tokenizer, config.stop))

    def _withdraw(self, ticket: Ticket) -> None:
        with self._changed:
            left = deque(job for job in self._waiting if job.ticket is not ticket)
            self._cancelled += len(self._waiting) - len(left)
            self._waiting = left
            self._changed.notify()

    # --- The thread ---

    def _serve(self) -> None:
        while self._has_work():
            try:
                self._step()
            except Exception as error:
                # Whatever it was, the rows may be lost: the requests in them fail, those that wait get new rows.
                _log.exception("decoding failed")
                self._held, self._has_rows = [[] for _ in self._held], False
                self._fail(self._release(list(self._running)), f"{type(error).__name__}: {error}")
        with self._changed:
            waiting, self._waiting = self._waiting, deque()
        self._fail([*self._release(list(self._running)), *waiting], "the batcher was closed")

    def _has_work(self) -> bool:
        """Sleeps until there is; False when the batcher is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._waiting or self._running)
            return not self._is_closed

    def _step(self) -> None:
        """Let the waiting in, read some of what they ask, and go on with those that are read."""
        came = self._admit()
        if came and not self._has_rows:
            self._decoder.start(rows=self._num_rows, slots=self._context)
            self._has_rows = True
        elif came:
            self._decoder.keep([len(held) for held in self._held])
        self._read()
        self._extend()

    def _admit(self) -> bool:
        """Rows of cancelled requests become free; those that wait move into free ones. Whether any did."""
        with self._changed:
            cancelled = [number for number, job in self._running.items() if job.ticket.is_cancelled]
            self._cancelled += len(self._release(cancelled))
            came = bool(self._waiting and self._free)
            while self._waiting and self._free:
                job = self._waiting.popleft()
                prompt = job.request.prompt
                number = max(self._free, key=lambda number: _reusable(self._held[number], prompt))
                self._free.remove(number)
                self._running[number] = job
                # The scores come from the last token that is read.
                del self._held[number][min(_reusable(self._held[number], prompt), len(prompt) - 1) :]
        return came

    def _read(self) -> None:
        """Read on in the prompts, those first that have waited longest for it."""
        left = READ_AT_ONCE
        for number, job in list(self._running.items()):
            held, prompt = self._held[number], job.request.prompt
            part = prompt[len(held) :][:left]
            if part:
                # One at a time: as many passes as for each alone, and none of them waits for the padding of another.
                self._decoder.read([part if row == number else () for row in range(self._num_rows)])
                held += part
                left -= len(part)
            if part and len(held) < len(prompt):
                with self._changed:
                    self._running[number] = self._running.pop(number)

    def _extend(self) -> None:
        """Go on with the requests whose prompts are read."""
        going = {n: job for n, job in self._running.items() if len(self._held[n]) >= len(job.request.prompt)}
        if not going:
            return
        asked = [job.request.num_logprobs for job in going.values() if job.request.num_logprobs is not None]
        new = extend_rows(
            self._decoder,
            [going[number].row if number in going else None for number in range(self._num_rows)],
            most=STREAMED_STEPS,
            stop_ids=self._stop_ids,
            num_logprobs=max(asked, default=None),
        )
        for number, job in going.items():
            ids = new.ids[number]
            self._held[number] += [id for id in ids if id not in self._stop_ids]
            self._pass_on(number, job, job.take(ids, new.logprobs[number] if asked else []))

    def _pass_on(self, number: int, job: _Job, piece: Piece | None) -> None:
        reason, completion_tokens = job.row.finish_reason, len(job.row.ids)
        if reason is not None:
            self._release([number])
        with self._changed:
            self._tokens += 0 if piece is None else len(piece.ids)
            if reason is not None:
                self._served += not job.ticket.is_cancelled
                self._cancelled += job.ticket.is_cancelled
        if piece is not None:
            job.tell(piece)
        if reason is not None:
            job.tell(Finished(reason, len(job.request.prompt), completion_tokens))

    def _release(self, numbers: Sequence[int]) -> list[_Job]:
        """Free rows; returns who was in them."""
        with self._changed:
            self._free += numbers
            return [self._running.pop(number) for number in numbers]

    def _fail(self, jobs: Sequence[_Job], message: str) -> None:
        with self._changed:
            cancelled = sum(job.ticket.is_cancelled for job in jobs)
            self._cancelled += cancelled
            self._failed += len(jobs) - cancelled
        for job in jobs:
            job.tell(Failed(message))


def _reusable(held: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens both begin with; none where more of what is held would be lost than used."""
    pairs = enumerate(zip(held, prompt, strict=False))
    same = next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(held), len(prompt)))
    return same if 2 * same >= len(held) else 0
