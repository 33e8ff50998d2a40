"""A server that answers the chat page by a script: what it sends, where it waits and where it breaks off.

Only the standard library, so that bytes leave exactly as the script cuts them.
"""

import json
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from minigpt_jax.serving.chat_page import chat_page

LOST = "lost"
"""In a script: the connection breaks here."""

UNTIL_LEFT = "until left"
"""In a script: nothing more comes until the browser hangs up."""

Piece = bytes | threading.Event | str


@dataclass
class Reply:
    """The answer to one question."""

    pieces: Iterable[Piece] = ()
    """Bytes of the body; an Event is waited for."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "text/event-stream"})


def event(value: Any) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def delta(**parts: Any) -> bytes:
    """A piece of an answer: content, reasoning_content or tool_calls."""
    return event({"choices": [{"index": 0, "delta": parts, "finish_reason": None}]})


def ending(reason: str = "stop", tokens: int = 12) -> bytes:
    end = event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    return end + event({"choices": [], "usage": {"completion_tokens": tokens}}) + b"data: [DONE]\n\n"


def refusal(status: int, message: str, **headers: str) -> Reply:
    body = json.dumps({"error": {"message": message}}).encode()
    return Reply([body], status, {"Content-Type": "application/json", **headers})


class ScriptedServer(ThreadingHTTPServer):
    """Serves the page, and each question with the next reply."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.begin()

    def begin(self) -> None:
        """Forget what an earlier test left."""
        self.replies: deque[Reply] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.was_left = threading.Event()

    def will(self, *pieces: Piece) -> None:
        """Answer the next question so."""
        self.replies.append(Reply(pieces))


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/":
            html, policy = chat_page()
            headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": policy}
            self._send(Reply([html.encode()], headers=headers))
        elif self.path == "/v1/models":
            models = json.dumps({"object": "list", "data": [{"id": "scripted"}]}).encode()
            self._send(Reply([models], headers={"Content-Type": "application/json"}))
        else:
            self._send(Reply(status=404))

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.keys.append(self.headers["Authorization"])
        self._send(self.server.replies.popleft())

    def _send(self, reply: Reply) -> None:
        self.close_connection = True
        self.send_response(reply.status)
        for name, value in {**reply.headers, "Transfer-Encoding": "chunked", "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        for piece in reply.pieces:
            if isinstance(piece, bytes):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            elif isinstance(piece, threading.Event):
                assert piece.wait(10)
            elif piece == LOST:
                return
            else:
                assert self.connection.recv(1) == b""  # the other side has hung up
                self.server.was_left.set()
                return
        self.wfile.write(b"0\r\n\r\n")


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
