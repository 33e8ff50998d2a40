"""A conversation: each turn read once, whole turns forgotten, and what is left after an interruption."""

import pytest
from test_generation import Recital

from minigpt_jax.chat_session import ChatSession, fitting_prompt
from minigpt_jax.data.chat import ChatEncoder
from minigpt_jax.errors import UserError
from minigpt_jax.generation import GenerationConfig
from minigpt_jax.terminal_chat import chat
from minigpt_jax.tokenizer import load_tokenizer

CONFIG = GenerationConfig(max_new_tokens=20)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


class Answering(Recital):
    """Gives each prompt the next answer, and knows what its row holds."""

    def __init__(self, tokenizer, *answers):
        super().__init__([])
        self._answers = iter([*tokenizer.encode(answer), tokenizer.eos_id] for answer in answers)
        self.row, self.was_read = [], []

    def start(self, *, rows, slots):
        super().start(rows=rows, slots=slots)
        self.row = []

    def keep(self, lengths):
        assert lengths[0] <= len(self.row)
        self.row = self.row[: lengths[0]]
        self.lengths = list(lengths)

    def read(self, tokens):
        super().read(tokens)
        self.row += tokens[0]
        self.was_read.append(len(tokens[0]))
        self._rows = [next(self._answers)]

    def extend(self, *args, **options):
        new = super().extend(*args, **options)
        held = [id for id in new.ids[0] if id not in options["stop_ids"]]
        self.row += held
        self.lengths = [len(self.row)]
        return new


def test_a_turn_is_read_once_and_the_row_is_the_conversation(tokenizer):
    decoder = Answering(tokenizer, "Yes.", "No.", "Perhaps.")
    session = ChatSession(decoder, tokenizer, context=500, system="Be brief.")
    encoder, read = ChatEncoder(tokenizer), 0
    for question, answer in (("One?", "Yes."), ("Two?", "No."), ("Three?", "Perhaps.")):
        assert session.answer(question, CONFIG).text == answer
        read += session.num_read
        prompt = encoder.encode_prompt(session.messages[:-1])
        assert decoder.row == prompt + tokenizer.encode(answer)
    # The end mark of an answer is read with the next turn; nothing else twice.
    assert read + len(tokenizer.encode("Yes.No.")) <= len(prompt) + 2
    assert [message["content"] for message in session.messages[1:]] == [
        "One?",
        "Yes.",
        "Two?",
        "No.",
        "Three?",
        "Perhaps.",
    ]


def test_the_oldest_turns_go_whole_and_the_system_message_stays(tokenizer):
    decoder = Answering(tokenizer, *["Yes, of course it is."] * 12)
    session = ChatSession(decoder, tokenizer, context=120, system="Be brief.")
    for number in range(12):
        session.answer(f"Is {number} a number?", CONFIG)
        assert decoder.lengths[0] <= 120
        assert [message["role"] for message in session.messages[:3]] == ["system", "user", "assistant"]
        # The newest are there, one after the other.
        questions = [message["content"] for message in session.messages if message["role"] == "user"]
        assert questions == [f"Is {n} a number?" for n in range(number + 1 - len(questions), number + 1)]
    assert session.num_forgotten >= 12
    assert len(questions) >= 2


def test_a_message_that_alone_is_too_long_is_refused_and_forgotten(tokenizer):
    session = ChatSession(Answering(tokenizer, "Yes."), tokenizer, context=60)
    with pytest.raises(UserError, match=r"the message takes \d+ tokens, and there is room for 40; shorten it"):
        session.answer("word " * 100, CONFIG)
    assert session.messages == []
    assert session.answer("Well?", CONFIG).text == "Yes."


def test_an_interrupted_answer_stays_as_far_as_it_was_read(tokenizer):
    decoder = Answering(tokenizer, "One two three four five six seven.", "Yes.")
    session = ChatSession(decoder, tokenizer, context=500)
    seen = []

    def stop(piece):
        seen.append(piece)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.answer("Count.", CONFIG, on_text=stop)
    assert session.messages[-1] == {"role": "assistant", "content": "".join(seen)}
    assert session.answer("And?", CONFIG).text == "Yes."
    assert decoder.row[: decoder.was_read[-1]] == ChatEncoder(tokenizer).encode_prompt(session.messages[:-1])


def test_as_few_turns_go_as_have_to(tokenizer):
    encoder = ChatEncoder(tokenizer)
    turns = [{"role": role, "content": f"{n} words"} for n in range(6) for role in ("user", "assistant", "tool")]
    prompts = {start: encoder.encode_prompt(turns[start:]) for start in range(0, len(turns), 3)}
    for room in range(len(prompts[15]), len(prompts[0]) + 1):
        ids, forgotten = fitting_prompt(encoder, [], turns, room=room, most=room)
        assert ids == prompts[forgotten]
        assert forgotten == min(start for start, prompt in prompts.items() if len(prompt) <= room)


# --- At the terminal ---


def typed(monkeypatch, tokenizer, lines, *answers):
    """What the program prints when a person types these lines; an exception stands for a key."""
    rest = iter([*lines, EOFError])

    def line(_):
        following = next(rest)
        if isinstance(following, str):
            return following
        raise following

    monkeypatch.setattr("builtins.input", line)
    session = ChatSession(Answering(tokenizer, *answers), tokenizer, context=500)
    chat(session, CONFIG)
    return session


def test_lines_are_answered_and_commands_obeyed(monkeypatch, tokenizer, tmp_path, capsys):
    saved = tmp_path / "chat.jsonl"
    lines = ["Hello", "/params temperature=0 top-k=5", f"/save {saved}", f"/save {saved}", "/reset", "/save x", "Again"]
    session = typed(monkeypatch, tokenizer, lines, "Hi.", "Yes.")
    printed = capsys.readouterr().out
    for part in ("Hi.\n(3 tokens, ", "temperature=0.0", "top_k=5", "exists already", "there is nothing to save yet"):
        assert part in printed
    assert saved.read_text() == (
        '{"conversations": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]}\n'
    )
    assert [message["content"] for message in session.messages] == ["Again", "Yes."]


def test_mistakes_and_ctrl_c_do_not_end_the_program(monkeypatch, tokenizer, capsys):
    lines = [KeyboardInterrupt, "/colour", "/params heat=1", "/params top_p=x", "/params top_p=7", "/save", "Hello"]
    session = typed(monkeypatch, tokenizer, lines, "Hi.")
    printed = capsys.readouterr().out
    for part in (
        "there is no command /colour",
        "write NAME=VALUE",
        "top_p must be a number, got 'x'",
        "--top-p must be above 0",
        "name a file",
        "Hi.",
    ):
        assert part in printed
    assert len(session.messages) == 2
