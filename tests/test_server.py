"""The server as programs meet it: a socket, the official client, and clients that leave.

What the model says is a script, so every byte of an answer is known; scripts/serve.py with a real model is at the end.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scripted_decoder import BROKEN, ENDLESS, ScriptedDecoder
from small_runs import as_typed

from minigpt_jax.config import ModelConfig
from minigpt_jax.errors import UserError
from minigpt_jax.formats.hugging_face import write_hugging_face
from minigpt_jax.formats.names import to_outside
from minigpt_jax.initialization import initial_parameters
from minigpt_jax.serving.app import make_app
from minigpt_jax.serving.batcher import Batcher
from minigpt_jax.serving.chat_page import chat_page
from minigpt_jax.serving.fields import RequestError
from minigpt_jax.serving.responses import ChatAnswer
from minigpt_jax.serving.served_model import ServedModel
from minigpt_jax.serving.server import Server, listening_socket, local_names
from minigpt_jax.tokenizer import Tokenizer, load_tokenizer

openai = pytest.importorskip("openai", reason="the official client is not installed: it comes with the extra dev")

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
ADD = '{"name": "add", "arguments": {"a": 1}}'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ANSWERS = {
    "think": "<think>\nfirst so\n</think>\n\nThen so.",
    "add": f"I add.\n<tool_call>\n{ADD}\n</tool_call>",
    "emoji": "Ja \U0001f600 世界",
}


def answer_to(question):
    return ANSWERS.get(question, f"You said {question}.")


class Served:
    """A server that runs in a thread of its own."""

    def __init__(self, tokenizer, *, rows=4, max_waiting=8, context=100_000, api_key=None, max_request_bytes=10_000):
        self.decoder = ScriptedDecoder(tokenizer, answer_to)
        self.batcher = Batcher(self.decoder, tokenizer, rows=rows, context=context, max_waiting=max_waiting)
        self.model = ServedModel("scripted", tokenizer, context=context, most_choices=rows + max_waiting)
        app = make_app(
            self.model,
            self.batcher,
            api_key=api_key,
            hosts=local_names("127.0.0.1"),
            max_request_bytes=max_request_bytes,
        )
        self._server = Server(app, self.batcher)
        listening = listening_socket("127.0.0.1", 0)
        self.address = listening.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]})
        self._thread.start()
        until(lambda: self._server.started)

    def stop(self):
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.batcher.close()

    def load(self):
        return self.get("/health")[1]

    def get(self, path, **headers):
        return self.send(path, None, **headers)

    def send(self, path, body, *, method=None, **headers):
        """(status, JSON of the answer, its headers)"""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.loads(answer.read()), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read()), error.headers

    def raw(self, body):
        """A connection that has sent this question."""
        connection = socket.create_connection(self.address, timeout=30)
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection


def until(condition):
    """Wait for what is about to happen."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ask(question, **options):
    return {"messages": [{"role": "user", "content": question}], **options}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture
def serve(tokenizer):
    """Starts servers, and stops them."""
    with contextlib.ExitStack() as stack:

        def started(**options):
            served = Served(**{"tokenizer": tokenizer, **options})
            stack.callback(served.stop)
            return served

        yield started


@pytest.fixture(scope="module")
def served(tokenizer):
    running = Served(tokenizer)
    yield running
    assert running.load()["rows_in_use"] == running.load()["waiting"] == 0
    running.stop()


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client, question, **options):
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(model="scripted", messages=messages, **options)


# --- The official client ---


def test_a_question_is_answered(client, tokenizer):
    done = chat(client, "hello")
    (choice,) = done.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant", "You said hello.", "stop",
    )  # fmt: skip
    assert done.usage.completion_tokens == len(tokenizer.encode("You said hello."))
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.model == "scripted"


@pytest.mark.parametrize("question", ["hello", "think", "add", "emoji"])
def test_a_stream_is_the_whole_answer_in_pieces(client, question):
    whole = chat(client, question, tools=[TOOL])
    pieces = list(chat(client, question, tools=[TOOL], stream=True, stream_options={"include_usage": True}))
    assert pieces[0].choices[0].delta.role == "assistant"
    deltas = [piece.choices[0].delta for piece in pieces[:-1]]
    message = whole.choices[0].message
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    reasoning = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
    assert reasoning == getattr(message, "reasoning_content", "")
    calls = [dict(call.function) for delta in deltas for call in delta.tool_calls or ()]
    assert calls == [dict(call.function) for call in message.tool_calls or ()]
    assert [piece.choices[0].finish_reason for piece in pieces[-2:-1]] == [whole.choices[0].finish_reason]
    assert (pieces[-1].choices, pieces[-1].usage) == ([], whole.usage)
    assert len({piece.id for piece in pieces}) == 1


def test_reasoning_is_beside_the_answer(client):
    message = chat(client, "think").choices[0].message
    assert (message.reasoning_content, message.content) == ("first so", "Then so.")


def test_a_call_has_an_id_a_name_and_arguments(client):
    choice = chat(client, "add", tools=[TOOL]).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments, call.type) == ("add", '{"a": 1}', "function")
    assert (choice.message.content, choice.finish_reason) == ("I add.", "tool_calls")
    assert call.id


@pytest.mark.parametrize("options", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_nothing_is_called(client, options):
    choice = chat(client, "add", **options).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (ANSWERS["add"], None)
    assert choice.finish_reason == "stop"


def test_an_answer_ends_at_a_stop_string_or_with_its_tokens(client):
    assert chat(client, "hello", stop=["said", "never"]).choices[0].message.content == "You "
    cut = chat(client, "hello", max_tokens=2)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 2)


def test_choices_are_numbered(client):
    done = chat(client, "hello", n=3)
    said = [(choice.index, choice.message.content) for choice in done.choices]
    assert said == [(number, "You said hello.") for number in range(3)]
    pieces = list(chat(client, "hello", n=3, stream=True))
    texts = ["", "", ""]
    for piece in pieces:
        texts[piece.choices[0].index] += piece.choices[0].delta.content or ""
    assert texts == ["You said hello."] * 3


def test_log_probabilities_are_those_of_every_token(client, tokenizer):
    ids = tokenizer.encode(answer_to("emoji"))
    content = chat(client, "emoji", logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [bytes(each.bytes) for each in content] == [tokenizer.token_bytes(id) for id in ids]
    # JSON has no infinity.
    assert {(each.logprob, *(top.logprob for top in each.top_logprobs)) for each in content} == {(-0.5, -0.5, -9999)}
    pieces = list(chat(client, "emoji", logprobs=True, top_logprobs=2, stream=True))
    assert [
        each for piece in pieces if piece.choices[0].logprobs for each in piece.choices[0].logprobs.content
    ] == content
    assert chat(client, "emoji").choices[0].logprobs is None


def test_texts_go_on(client, tokenizer):
    done = client.completions.create(model="scripted", prompt=["one", "two"], n=2, max_tokens=50, logprobs=2)
    assert [choice.text for choice in done.choices] == ["You said one."] * 2 + ["You said two."] * 2
    first = done.choices[0].logprobs
    assert first.tokens == [tokenizer.decode([id]) for id in tokenizer.encode("You said one.")]
    assert first.text_offset == [len("".join(first.tokens[:place])) for place in range(len(first.tokens))]
    assert first.token_logprobs == [-0.5] * len(first.tokens)
    assert first.top_logprobs == [{token: -0.5, "<|im_start|>": -9999} for token in first.tokens]
    ids = [tokenizer.bos_id, *tokenizer.encode("one")]
    assert client.completions.create(model="scripted", prompt=ids, max_tokens=50).choices[0].text == "You said one."


def test_a_text_is_repeated_before_its_continuation_where_asked(client):
    def create(**options):
        return client.completions.create(model="scripted", prompt="one", echo=True, max_tokens=50, **options)

    assert create().choices[0].text == "oneYou said one."
    assert "".join(piece.choices[0].text for piece in create(stream=True)) == "oneYou said one."


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").owned_by == "minigpt"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_a_refusal_names_the_field(client):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "hello", presence_penalty=1.0)
    assert (caught.value.param, caught.value.type) == ("presence_penalty", "invalid_request_error")


def test_our_own_settings_go_through_extra_body(client):
    assert chat(client, "hello", extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}).choices
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "hello", extra_body={"top_k": -5})
    assert caught.value.param == "top_k"


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_fails_is_an_error(client, streams, caplog):
    with pytest.raises(openai.APIError, match="the answer failed: RuntimeError: the script says so"):
        list(chat(client, BROKEN, stream=streams))
    assert chat(client, "hello").choices[0].message.content == "You said hello."


# --- What is no good request ---


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"temperature": NaN}', "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_json"),
        (b'{"messages":' + b"[" * 3000 + b"]" * 3000 + b"}", "invalid_json"),
        (b"[]", "invalid_type"),
        (b'{"model": "scripted"}', "missing_required_parameter"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_malformed_body_is_an_error_of_openais_form(served, path, body, code):
    status, answer, _ = served.send(path, body)
    assert (status, set(answer["error"])) == (400, {"message", "type", "param", "code"})
    assert answer["error"]["code"] == code


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/v1/nothing", "GET", 404), ("/nothing", "POST", 404), ("/v1/models", "POST", 405), ("/", "DELETE", 405)],
)
def test_an_unknown_address_or_method_is_an_error_of_openais_form(served, path, method, status):
    answered, answer, _ = served.send(path, {} if method == "POST" else None, method=method)
    assert (answered, set(answer["error"])) == (status, {"message", "type", "param", "code"})


def test_a_body_that_is_too_large_is_refused(served):
    whole = json.dumps(ask("hello")).encode()
    assert served.send("/v1/chat/completions", whole.ljust(10_000))[0] == 200
    for size in (10_001, 100_000):
        status, answer, _ = served.send("/v1/chat/completions", whole.ljust(size))
        assert (status, answer["error"]["code"]) == (413, "request_too_large")


def test_a_body_without_end_is_refused_before_its_end(served):
    with socket.create_connection(served.address, timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(17):
            connection.sendall(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_an_unexpected_fault_is_told_without_its_traceback(served, monkeypatch, caplog):
    def fail(body):
        raise KeyError("secret")

    monkeypatch.setattr(served.model, "_require_known", fail)
    status, answer, _ = served.send("/v1/chat/completions", ask("hello"))
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "secret" not in json.dumps(answer)
    until(lambda: "secret" in caplog.text)


def test_an_unexpected_fault_in_a_stream_is_told_without_its_traceback(client, monkeypatch, caplog):
    def fail(self, number, event):
        raise KeyError("secret")

    monkeypatch.setattr(ChatAnswer, "take", fail)
    with pytest.raises(openai.APIError, match="something went wrong in the server; its log says what"):
        list(chat(client, "hello", stream=True))
    assert "secret" in caplog.text


def test_a_template_that_writes_nothing_is_no_fault_of_the_server(serve, tokenizer):
    served = serve(tokenizer=Tokenizer(tokenizer._definition, chat_template="{# nothing #}"))
    status, answer, _ = served.send("/v1/chat/completions", ask("hello"))
    assert (status, answer["error"]["message"]) == (400, "a prompt is empty")


# --- Who may ask ---


def test_a_key_is_asked_for_where_there_is_one(serve):
    served = serve(api_key="schlüssel")
    right = "Bearer schlüssel".encode().decode("latin-1")
    for wrong in ({}, {"Authorization": "Bearer schlussel"}, {"Authorization": right.replace("Bearer", "Basic")}):
        status, answer, headers = served.send("/v1/chat/completions", ask("hello"), **wrong)
        assert (status, answer["error"]["code"], headers["WWW-Authenticate"]) == (401, "invalid_api_key", "Bearer")
        assert served.get("/v1/models", **wrong)[0] == 401
    assert served.send("/v1/chat/completions", ask("hello"), Authorization=right)[0] == 200
    assert served.get("/health")[0] == 200


def test_a_name_that_only_a_rebinding_page_would_use_is_refused(served):
    port = served.address[1]
    for name in ("evil.example", "127.0.0.1.evil.example", f"evil.example:{port}", ""):
        assert served.get("/v1/models", Host=name)[1]["error"]["code"] == "wrong_host"
    for name in ("localhost", f"LOCALHOST:{port}", f"[::1]:{port}"):
        assert served.get("/v1/models", Host=name)[0] == 200


def test_pages_of_other_sites_cannot_ask(served):
    for site in ("cross-site", "same-site"):
        status, answer, headers = served.send("/v1/chat/completions", ask("hello"), Sec_Fetch_Site=site)
        assert (status, answer["error"]["code"]) == (403, "cross_site")
    assert served.send("/v1/chat/completions", ask("hello"), Sec_Fetch_Site="same-origin")[0] == 200
    assert "Access-Control-Allow-Origin" not in headers


def test_the_page_comes_with_its_policy(served):
    with urllib.request.urlopen(served.url + "/", timeout=30) as answer:
        page = answer.read().decode()
    assert (page, answer.headers["Content-Security-Policy"]) == chat_page()


# --- Many at once, and some that leave ---


def test_sixteen_clients_get_what_each_gets_alone(served):
    def content(number):
        options = {"stream": True} if number % 2 else {}
        with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=9) as client:
            done = chat(client, f"word {number}", **options)
            if number % 2:
                return "".join(piece.choices[0].delta.content or "" for piece in done)
            return done.choices[0].message.content

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(content, range(16)))
    assert together == [f"You said word {number}." for number in range(16)]


def test_a_full_queue_asks_to_come_again(serve):
    served = serve(rows=1, max_waiting=1)
    with served.raw(ask(ENDLESS)):
        until(lambda: served.load()["rows_in_use"] == 1)
        with served.raw(ask(ENDLESS)):
            until(lambda: served.load()["waiting"] == 1)
            status, answer, headers = served.send("/v1/chat/completions", ask("hello"))
            assert (status, answer["error"]["type"], answer["error"]["code"]) == (429, "rate_limit_error", "queue_full")
            assert int(headers["Retry-After"]) > 0
    # Those that left have made room.
    until(lambda: served.load()["cancelled"] == 2)
    assert served.send("/v1/chat/completions", ask("hello"))[0] == 200


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_frees_its_row(serve, streams):
    served = serve(rows=1)
    connection = served.raw(ask(ENDLESS, stream=streams))
    until(lambda: served.load()["rows_in_use"] == 1)
    if streams:
        assert b"200 OK" in connection.recv(1000)
    connection.close()
    until(lambda: served.load()["rows_in_use"] == 0)
    assert (served.load()["cancelled"], served.load()["served"]) == (1, 0)
    assert served.send("/v1/chat/completions", ask("hello"))[0] == 200


def test_a_client_that_leaves_the_queue_is_not_answered(serve):
    served = serve(rows=1)
    with served.raw(ask(ENDLESS)):
        until(lambda: served.load()["rows_in_use"] == 1)
        served.raw(ask("hello", stream=True)).close()
        until(lambda: served.load()["cancelled"] == 1)
        assert served.load()["waiting"] == 0
    assert not any("hello" in prompt for prompt in served.decoder.prompts)


def test_a_client_that_leaves_before_its_body_is_whole_is_forgotten(serve, caplog):
    served = serve()
    with socket.create_connection(served.address, timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
    assert served.send("/v1/chat/completions", ask("hello"))[0] == 200
    served.stop()
    assert caplog.text == ""


@pytest.mark.parametrize("streams", [False, True])
def test_requests_that_run_when_the_server_stops_fail_in_bounded_time(serve, monkeypatch, streams):
    monkeypatch.setattr("minigpt_jax.serving.server.GRACE_SECONDS", 0.2)
    served = serve(context=10_000_000)
    with served.raw(ask(ENDLESS, stream=streams)) as connection:
        until(lambda: served.load()["rows_in_use"] == 1)
        served.stop()
        with connection.makefile("rb") as answer:
            assert b"the answer failed: the batcher was closed" in answer.read()


def test_a_client_that_sends_half_of_its_request_does_not_keep_a_server_that_stops(serve, monkeypatch):
    monkeypatch.setattr("minigpt_jax.serving.server.GRACE_SECONDS", 0.2)
    served = serve()
    with socket.create_connection(served.address, timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        assert served.load()["rows_in_use"] == 0  # answered after the half request was taken
        served.stop()


# --- The socket ---


def test_an_address_that_cannot_be_had_is_one_sentence(served):
    with pytest.raises(UserError, match=f"port {served.address[1]} of 127.0.0.1 is in use; choose another --port"):
        listening_socket("127.0.0.1", served.address[1])
    for host in ("no.such.host.invalid", "two..dots", "192.0.2.1"):
        with pytest.raises(UserError, match=rf"--host '?{host}'? is (no|not an) address"):
            listening_socket(host, 0)


@pytest.mark.parametrize(
    ("host", "is_open"), [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("::", True)]
)
def test_only_a_loopback_address_knows_its_names(host, is_open):
    assert (local_names(host) is None) == is_open


# --- scripts/serve.py ---


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1,
        intermediate_size=64,
    )  # fmt: skip
    parameters = initial_parameters(config, initializer="xavier", seed=2)
    parameters["embed_tokens"]["embedding"] *= 20
    directory = tmp_path_factory.mktemp("model") / "little"
    directory.mkdir()
    write_hugging_face(directory, config, to_outside(parameters, config), tokenizer)
    return directory


def test_the_script_serves_what_generate_writes(model):
    arguments = ("--chat", "--prompt", "Hello", "--temperature", "0", "--max-new-tokens", "24", "--json", "out.json")
    done = as_typed(SCRIPTS / "generate.py", str(model), *arguments, cwd=model.parent)
    assert done.returncode == 0, done.stderr
    (expected,) = json.loads((model.parent / "out.json").read_text())
    assert len(expected["ids"]) == 24
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "serve.py"), str(model), "--port", "0", "--rows", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "MINIGPT_API_KEY": "hidden"},
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        url = line.split(" is served at ")[1].split()[0]
        with openai.OpenAI(base_url=url + "/v1", api_key="hidden", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="none").models.list()
            assert [listed.id for listed in client.models.list()] == ["little"]
            answer = client.chat.completions.create(
                model="little", messages=[{"role": "user", "content": "Hello"}], temperature=0, max_tokens=24
            )
        assert answer.choices[0].message.content == expected["text"]
    finally:
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest, errors) == (0, "stopped; requests answered: 1\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "error: name a model: a run directory, "),
        (("no-model", "--port", "0"), "error: "),
        (("m", "--port", "65536"), "error: --port must lie between 0 and 65535, got 65536"),
        (("m", "--rows", "0"), "error: --rows must be at least 1, got 0"),
        (("m", "--host", ""), "error: --host is empty"),
        (("m", "--api-key", ""), "error: --api-key is empty"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, arguments, message):
    done = as_typed(SCRIPTS / "serve.py", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(message)


def test_a_port_in_use_is_one_line(served, tmp_path):
    done = as_typed(SCRIPTS / "serve.py", "m", "--port", str(served.address[1]), cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is in use; choose another --port" in done.stderr


def test_without_fastapi_the_extra_is_named(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("fastapi", "minigpt_jax.serving.app"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    done = as_typed(SCRIPTS / "serve.py", "m", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the extra serve" in done.stderr


def test_an_error_is_written_as_openai_writes_it():
    error = RequestError("no", param="a", code="b", status=429)
    assert error.body == {"error": {"message": "no", "type": "rate_limit_error", "param": "a", "code": "b"}}
