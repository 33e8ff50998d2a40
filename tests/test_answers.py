"""An answer told apart: reasoning, content, calls; however it is cut on its way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigpt_jax.serving.answers import AnswerSplitter, Content, Reasoning, ToolCall

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = ToolCall("add", '{"a": 1}')


def parts_of(*pieces, is_thinking=False, reads_calls=True):
    """The parts of an answer that came in these pieces, neighbours of one kind joined."""
    splitter = AnswerSplitter(is_thinking=is_thinking, reads_calls=reads_calls)
    joined = []
    for part in [*(part for piece in pieces for part in splitter.push(piece)), *splitter.finish()]:
        if isinstance(part, Content | Reasoning) and joined and isinstance(joined[-1], type(part)):
            joined[-1] = type(part)(joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        (" Hello \n", [Content(" Hello \n")]),
        ("<think>\nso\n</think>\n\nHello", [Reasoning("so"), Content("Hello")]),
        ("<think>\n\n</think>\n\nHello", [Content("Hello")]),
        ("Well <think>hm</think> yes", [Content("Well"), Reasoning("hm"), Content("yes")]),
        ("<think>never ends ", [Reasoning("never ends ")]),
        ("no end</think>", [Content("no end</think>")]),
        (CALL, [ADD]),
        (f"I add.\n{CALL}\n{CALL} Done", [Content("I add."), ADD, ADD, Content("Done")]),
        (f"<think>a call</think>\n{CALL}", [Reasoning("a call"), ADD]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [ToolCall("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"城": "é"}}</tool_call>', [ToolCall("f", '{"城": "é"}')]),
        ("a < b, <thin, <tool_call", [Content("a < b, <thin, <tool_call")]),
    ],
)
def test_an_answer_is_told_apart(text, parts):
    assert parts_of(text) == parts


@pytest.mark.parametrize(
    "body",
    [
        "not JSON",
        "[1]",
        '{"arguments": {}}',
        '{"name": 1}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f", "arguments": ' + "[" * 5000 + "]" * 5000 + "}",
    ],
)
def test_what_looks_like_a_call_and_is_none_stays_text(body):
    text = f"See:\n <tool_call>{body}</tool_call>\nend"
    assert parts_of(text) == [Content(text)]


def test_a_call_that_was_cut_stays_text():
    text = 'See:\n<tool_call>{"name": "f"'
    assert parts_of(text) == [Content(text)]


def test_without_tools_a_call_is_text():
    assert parts_of(f"I add.\n{CALL}", reads_calls=False) == [Content(f"I add.\n{CALL}")]


def test_reasoning_that_the_prompt_opened_goes_on():
    assert parts_of("\nso\n</think>\n\nHello", is_thinking=True) == [Reasoning("so"), Content("Hello")]


def test_text_is_given_out_as_soon_as_it_can_be_no_mark():
    splitter = AnswerSplitter(is_thinking=False, reads_calls=True)
    given_out = [splitter.push(piece) for piece in ("Hello <th", "ere <", "think>so", " far", "</th", "ink>", "\nyes")]
    assert given_out == [
        [Content("Hello")],
        [Content(" <there")],
        [Reasoning("so")],
        [Reasoning(" far")],
        [],
        [],
        [Content("yes")],
    ]


FRAGMENTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    "\n",
    " ",
    "<",
    "t",
    "hello",
    "世",
    '{"name": "f"}',
]


@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12), data=st.data(),
    is_thinking=st.booleans(), reads_calls=st.booleans(),
)  # fmt: skip
def test_the_parts_do_not_depend_on_where_the_text_was_cut(fragments, data, is_thinking, reads_calls):
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    options = {"is_thinking": is_thinking, "reads_calls": reads_calls}
    whole = parts_of(text, **options)
    assert parts_of(*pieces, **options) == parts_of(*text, **options) == whole
