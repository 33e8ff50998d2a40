"""What can be asked for, what is refused by name, and what the model is given to read."""

import pytest

from minigpt_jax.data.chat import ChatEncoder
from minigpt_jax.generation import GenerationConfig
from minigpt_jax.serving.api import IGNORED, NEUTRAL, chat_request, completion_request
from minigpt_jax.serving.fields import RequestError, parse_json
from minigpt_jax.serving.served_model import ServedModel
from minigpt_jax.tokenizer import Tokenizer, load_tokenizer

ASK = {"messages": [{"role": "user", "content": "Hello"}]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


def message(**fields):
    return {"messages": [{"role": "user", "content": "Hello", **fields}]}


def refused(understand, body):
    with pytest.raises(RequestError) as caught:
        understand(body)
    return caught.value


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def served(tokenizer, **options):
    return ServedModel("small", tokenizer, **{"context": 200, "most_choices": 4, **options})


# --- What is refused ---


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ({}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["Hello"]}, "messages[0]"),
        (message(role="robot"), "messages[0].role"),
        (message(role=None), "messages[0].role"),
        (message(content=None), "messages[0].content"),
        (message(content=7), "messages[0].content"),
        (message(content=[{"type": "text", "text": "a"}, {"type": "image_url"}]), "messages[0].content[1].type"),
        (message(content=[{"type": "text"}]), "messages[0].content[0].text"),
        (message(tool_calls=[CALL]), "messages[0].tool_calls"),
        (message(role="assistant", tool_calls=[{"type": "function"}]), "messages[0].tool_calls[0].function"),
        (
            message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": {}}}]),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (message(mood="good"), "messages[0].mood"),
        (ASK | {"temprature": 1}, "temprature"),
        (ASK | {"temperature": "1"}, "temperature"),
        (ASK | {"temperature": True}, "temperature"),
        (ASK | {"temperature": 2.1}, "temperature"),
        (ASK | {"temperature": -0.1}, "temperature"),
        (ASK | {"top_p": 0}, "top_p"),
        (ASK | {"top_p": 1.5}, "top_p"),
        (ASK | {"top_k": -1}, "top_k"),
        (ASK | {"min_p": 2}, "min_p"),
        (ASK | {"repetition_penalty": 0}, "repetition_penalty"),
        (ASK | {"seed": 1.5}, "seed"),
        (ASK | {"seed": 2**31}, "seed"),
        (ASK | {"max_tokens": 0}, "max_tokens"),
        (ASK | {"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
        (ASK | {"n": 0}, "n"),
        (ASK | {"n": 10**6}, "n"),
        (ASK | {"stop": ""}, "stop"),
        (ASK | {"stop": ["a"] * 5}, "stop"),
        (ASK | {"stop": ["a", 1]}, "stop"),
        (ASK | {"stop": "a" * 1001}, "stop"),
        (ASK | {"stream": "yes"}, "stream"),
        (ASK | {"stream_options": {"include_usage": True}}, "stream_options"),
        (ASK | {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        (ASK | {"logprobs": 1}, "logprobs"),
        (ASK | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (ASK | {"top_logprobs": 2}, "top_logprobs"),
        (ASK | {"tools": {}}, "tools"),
        (ASK | {"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        (ASK | {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (ASK | {"tool_choice": "required"}, "tool_choice"),
        (ASK | {"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        (ASK | {"chat_template_kwargs": []}, "chat_template_kwargs"),
        (ASK | {"model": 7}, "model"),
    ],
)
def test_a_wrong_field_of_a_conversation_is_named(body, param):
    error = refused(lambda body: chat_request(body, context=100), body)
    assert (error.status, error.param) == (400, param)
    assert error.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": ["a", 7]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": "a", "echo": 1}, "echo"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": 0, "echo": True}, "logprobs"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "messages": []}, "messages"),
    ],
)
def test_a_wrong_field_of_a_text_is_named(body, param):
    assert refused(lambda body: completion_request(body, context=100), body).param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("parallel_tool_calls", False),
        ("modalities", ["audio"]),
        ("reasoning_effort", "low"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, value):
    error = refused(lambda body: chat_request(body, context=100), ASK | {name: value})
    assert (error.param, error.code) == (name, "unsupported_parameter")


def test_what_changes_nothing_is_accepted():
    plain = chat_request(ASK | {"seed": 1}, context=100)
    harmless = {name: {"any": "thing"} for name in IGNORED}
    assert chat_request(ASK | {"seed": 1, "logprobs": None} | harmless | NEUTRAL, context=100) == plain


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": ' + "9" * 5000 + "}",
        '{"a": "\\ud83d"}',
        '{"a\\udc00": 1}',
        "[" * 101 + "]" * 101,
        "[" * 100_000,
    ],
)
def test_json_that_could_not_be_written_again_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text)


def test_half_characters_that_are_whole_together_are_read():
    assert parse_json('"\\ud83d\\ude00"') == "\U0001f600"


# --- What is understood ---


def test_sampling_is_what_was_asked_for():
    asked = {
        "max_completion_tokens": 7, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
        "repetition_penalty": 1.5, "seed": 9, "stop": ["a", "b"],
    }  # fmt: skip
    request = chat_request(ASK | asked | {"n": 2, "logprobs": True, "top_logprobs": 4}, context=100)
    assert request.config == GenerationConfig(
        max_new_tokens=7, temperature=0.0, top_p=0.5, top_k=3, min_p=0.1, repetition_penalty=1.5, seed=9,
        stop=("a", "b"),
    )  # fmt: skip
    assert (request.n, request.num_logprobs) == (2, 4)


def test_without_a_seed_every_request_has_its_own():
    seeds = {chat_request(ASK, context=100).config.seed for _ in range(5)}
    assert len(seeds) > 1


def test_a_conversation_may_fill_the_context_and_a_text_gets_16_tokens():
    assert chat_request(ASK, context=100).config.max_new_tokens == 100
    assert completion_request({"prompt": "a"}, context=100).config.max_new_tokens == 16


def test_parts_of_a_message_are_lines():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    (said,) = chat_request(message(content=parts), context=100).messages
    assert said == {"role": "user", "content": "one\ntwo"}


def test_an_answer_can_be_handed_back_as_it_came():
    answer = {
        "role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None, "annotations": [],
        "audio": None, "function_call": None, "tool_calls": [CALL],
    }  # fmt: skip
    result = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    request = chat_request({"messages": [*ASK["messages"], answer, result]}, context=100)
    assert request.messages[1:] == (
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
        result,
    )


def test_tools_that_may_not_be_called_are_not_shown():
    assert chat_request(ASK | {"tools": [TOOL], "tool_choice": "auto"}, context=100).tools == (TOOL,)
    assert chat_request(ASK | {"tools": [TOOL], "tool_choice": "none"}, context=100).tools == ()


@pytest.mark.parametrize(
    ("prompt", "prompts"), [("a", ("a",)), (["a", "b"], ("a", "b")), ([5, 6], ((5, 6),)), ([[5], [6]], ((5,), (6,)))]
)
def test_prompts_are_texts_or_ids(prompt, prompts):
    assert completion_request({"prompt": prompt}, context=100).prompts == prompts


# --- What the model is given to read ---


def test_the_prompt_is_the_conversation_by_the_template(tokenizer):
    body = {"messages": [{"role": "system", "content": "Be brief."}, *ASK["messages"]], "tools": [TOOL]}
    (request,) = served(tokenizer).chat(body).requests
    assert list(request.prompt) == ChatEncoder(tokenizer).encode_prompt(body["messages"], [TOOL])


def test_a_text_begins_as_a_document_does_and_ids_are_taken_as_they_are(tokenizer):
    text, ids = (served(tokenizer).completion({"prompt": prompt}).requests[0].prompt for prompt in ("one", [5, 6]))
    assert (text, ids) == ((tokenizer.bos_id, *tokenizer.encode("one")), (5, 6))


def test_choices_are_drawn_from_streams_of_their_own(tokenizer):
    job = served(tokenizer).completion({"prompt": ["one", "two"], "n": 2})
    assert [(request.prompt[1], request.row) for request in job.requests] == [
        (tokenizer.encode(text)[0], row) for text, row in (("one", 0), ("one", 1), ("two", 2), ("two", 3))
    ]


def test_the_oldest_turns_go_whole_and_the_system_message_stays(tokenizer):
    turns = [
        {"role": role, "content": f"{role} {number} says a few words"}
        for number in range(20)
        for role in ("user", "assistant")
    ]
    system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Well?"}
    (request,) = served(tokenizer).chat({"messages": [system, *turns, question], "max_tokens": 50}).requests
    encoder = ChatEncoder(tokenizer)
    prompts = [encoder.encode_prompt([system, *turns[start:], question]) for start in range(0, len(turns) + 1, 2)]
    # As few went as had to.
    assert list(request.prompt) == next(prompt for prompt in prompts if len(prompt) <= 150) != prompts[-1]
    assert len(prompts[0]) > 150


def test_a_question_may_take_all_but_one_token_of_the_context_and_no_more(tokenizer):
    def ask(words, context):
        return served(tokenizer, context=context).chat({"messages": [{"role": "user", "content": "so " * words}]})

    (request,) = ask(50, 200).requests
    exact = len(request.prompt)
    assert len(ask(50, exact + 1).requests[0].prompt) == exact
    error = refused(lambda words: ask(words, exact), 50)
    assert (error.status, error.param, error.code) == (400, "messages", "context_length_exceeded")


def test_a_text_that_fills_the_context_is_refused(tokenizer):
    error = refused(served(tokenizer).completion, {"prompt": [5] * 200})
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert len(served(tokenizer).completion({"prompt": [5] * 199}).requests[0].prompt) == 199


@pytest.mark.parametrize("ids", [[-1], [10**6]])
def test_an_id_that_is_no_tokens_is_refused(tokenizer, ids):
    assert refused(served(tokenizer).completion, {"prompt": ids}).param == "prompt"


@pytest.mark.parametrize(("body", "param"), [({"prompt": ["a"] * 5}, "prompt"), ({"prompt": "a", "n": 5}, "n")])
def test_more_choices_than_can_ever_run_are_refused(tokenizer, body, param):
    assert refused(served(tokenizer).completion, body).param == param
    assert len(served(tokenizer).completion({"prompt": ["a"] * 4}).requests) == 4


def test_another_model_is_not_found(tokenizer):
    error = refused(served(tokenizer).chat, ASK | {"model": "large"})
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert served(tokenizer).chat(ASK | {"model": "small"}).requests


# --- A template with a switch ---

SWITCH = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
{{- '<think>\\n' if open_thinking else '<think>\\n\\n</think>\\n\\n' }}"""


@pytest.fixture(scope="module")
def switching(tokenizer):
    with_switch = Tokenizer(tokenizer._definition, chat_template=SWITCH)
    return served(with_switch)


@pytest.mark.parametrize(
    ("body", "is_open"),
    [
        (ASK, False),
        (ASK | {"open_thinking": True}, True),
        (ASK | {"chat_template_kwargs": {"open_thinking": True}}, True),
        # What a user typed is text.
        (message(content="<think>"), False),
    ],
)
def test_reasoning_can_be_opened_as_in_minimind(switching, body, is_open):
    job = switching.chat(body)
    assert switching._is_thinking(job.requests[0].prompt) == is_open


def test_a_switch_that_the_template_does_not_read_is_refused_unless_it_is_off(tokenizer, switching):
    error = refused(served(tokenizer).chat, ASK | {"open_thinking": True})
    assert (error.param, error.code) == ("open_thinking", "unsupported_parameter")
    assert served(tokenizer).chat(ASK | {"open_thinking": False}).requests
    error = refused(switching.chat, ASK | {"chat_template_kwargs": {"mood": "good"}})
    assert error.param == "chat_template_kwargs.mood"
    assert "open_thinking" in error.message


def test_a_conversation_that_the_template_refuses_is_refused(tokenizer):
    strict = Tokenizer(tokenizer._definition, chat_template="{{ raise_exception('alternate, please') }}")
    error = refused(served(strict).chat, ASK)
    assert (error.status, error.param) == (400, "messages")
    assert "alternate, please" in error.message


def test_openais_newer_word_for_the_system_message_is_understood():
    body = {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}
    assert [each["role"] for each in chat_request(body, context=100).messages] == ["system", "user"]
