"""A conversation with a model, which reads each turn once. Framework-free.

The cache keeps what earlier turns put into it: of a new turn's ids only those are read that are not there yet. When the
conversation outgrows the context, the oldest questions go with their answers, whole; the system message stays.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minigpt_jax.data.chat import ChatEncoder
from minigpt_jax.errors import UserError
from minigpt_jax.generation import Completion, Decoder, GenerationConfig, complete
from minigpt_jax.tokenizer import Tokenizer

Message = dict[str, Any]


class PromptTooLongError(UserError):
    """What the model is to answer leaves no room for an answer."""


class ChatSession:
    """One conversation.

    Args:
        decoder: its rows are this session's from now on.
        tokenizer: of the model.
        context: the most tokens of the conversation, answers included.
        system: a system message that opens it.

    Raises:
        UserError: the chat template is not Jinja.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, *, context: int, system: str | None = None):
        self._decoder, self._tokenizer, self._context = decoder, tokenizer, context
        self._encoder = ChatEncoder(tokenizer)
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[Message] = []
        self._read: list[int] = []  # what the decoder's row is known to hold
        self._has_row = False
        self.num_read = 0
        """Tokens that the last answer's prompt had to have read."""
        self.num_forgotten = 0
        """Messages that were left out for want of room, in all."""

    @property
    def messages(self) -> list[Message]:
        """The conversation as the model still has it."""
        return [*self._system, *self._turns]

    def reset(self) -> None:
        """Begin anew, with the same system message."""
        self._turns = []
        self.num_forgotten = 0

    def answer(
        self, text: str, config: GenerationConfig, *, on_text: Callable[[str], None] | None = None
    ) -> Completion:  # fmt: skip
        """The model's answer to a user's message; both become part of the conversation.

        When it is interrupted, the message and what was given out of the answer stay.

        Args:
            text: the message.
            config: of the answer.
            on_text: told what can be read so far.

        Raises:
            UserError: the message is empty, or alone leaves no room for an answer.
        """
        if not text.strip():
            raise UserError("the message is empty")
        before = self._turns
        self._turns = [*before, {"role": "user", "content": text}]
        try:
            ids = self._fitting_prompt(config)
        except UserError:
            self._turns = before
            raise
        said: list[str] = []

        def note(_: int, piece: str) -> None:
            said.append(piece)
            if on_text is not None:
                on_text(piece)

        known, self._read = self._read, []
        try:
            self._bring_to(ids, known)
            done = complete(self._decoder, self._tokenizer, config, context=self._context, on_text=note)[0]
        except BaseException:
            # What the row holds is not known now; the next answer reads everything again.
            self._has_row = False
            self._remember("".join(said))
            raise
        self._read = [*ids, *done.ids][: self._decoder.lengths[0]]
        self._remember(done.text)
        return done

    def _remember(self, answer: str) -> None:
        if answer.strip():
            self._turns.append({"role": "assistant", "content": answer})
        else:
            # A question without an answer is no turn that a template can go on from.
            self._turns.pop()

    def _fitting_prompt(self, config: GenerationConfig) -> list[int]:
        """The ids up to the answer, after as many of the oldest turns have gone as have to."""
        room = room_for_prompt(self._context, config.max_new_tokens)
        ids, forgotten = fitting_prompt(self._encoder, self._system, self._turns, room=room, most=room)
        self.num_forgotten += forgotten
        self._turns = self._turns[forgotten:]
        return ids

    def _bring_to(self, ids: list[int], known: list[int]) -> None:
        """Make the decoder's row hold `ids`, reading no more of them than it has to."""
        if not self._has_row:
            self._decoder.start(rows=1, slots=self._context)
            self._has_row, known = True, []
        same = next((place for place, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b), len(known))
        same = min(same, len(ids) - 1)  # the scores come from the last token that is read
        self._decoder.keep([same])
        self._decoder.read([ids[same:]])
        self.num_read = len(ids) - same


def room_for_prompt(context: int, max_new_tokens: int) -> int:
    """Tokens of `context` that a conversation may take: half of it at least, more where the answer needs less."""
    return context - min(max_new_tokens, context // 2)


def fitting_prompt(
    encoder: ChatEncoder,
    opening: Sequence[Message],
    turns: Sequence[Message],
    *,
    room: int,
    most: int,
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> tuple[list[int], int]:
    """The ids of a conversation up to the answer, and how many of its oldest messages had to go for them to fit.

    A question goes with all that was answered to it, and the latest one stays. As few go as have to; the number is
    found by halving, since a conversation may have thousands of turns.

    Args:
        encoder: of the model.
        opening: messages that stay.
        turns: what was said then.
        room: the most ids, as long as there is more than the latest question.
        most: the ids that the latest question may take with its answers and what stays.
        tools: as for `ChatEncoder.encode_prompt`.
        variables: as for `ChatEncoder.encode_prompt`.

    Raises:
        PromptTooLongError: the latest question does not fit.
        UserError: the template cannot render the conversation.
    """

    def ids_from(start: int) -> list[int]:
        return encoder.encode_prompt([*opening, *turns[start:]], tools, variables)

    ids = ids_from(0)
    if len(ids) <= room:
        return ids, 0
    starts = [0, *(number for number, turn in enumerate(turns) if number > 0 and turn["role"] == "user")]
    too_early, enough = 0, len(starts) - 1
    ids = ids_from(starts[enough])
    if len(ids) > most:
        raise PromptTooLongError(f"the message takes {len(ids)} tokens, and there is room for {most}; shorten it")
    while enough - too_early > 1:
        middle = (too_early + enough) // 2
        candidate = ids_from(starts[middle])
        if len(candidate) <= room:
            enough, ids = middle, candidate
        else:
            too_early = middle
    return ids, starts[enough]
