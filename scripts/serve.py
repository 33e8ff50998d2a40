"""Serve a model to programs and people: `python scripts/serve.py out/sft-tiny`, then open http://127.0.0.1:8998."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from minigpt_jax.cli import run
from minigpt_jax.config import Backend, DType
from minigpt_jax.errors import UserError

KEY_VARIABLE = "MINIGPT_API_KEY"


@dataclass(frozen=True)
class Command:
    """Answer OpenAI's API (/v1/chat/completions, /v1/completions, /v1/models), and a browser with a page to chat at."""

    model: tyro.conf.Positional[str] = ""
    """A run directory (its best checkpoint), a Hugging Face directory, a .safetensors or a .pth file."""
    host: str = "127.0.0.1"
    """Address to listen at: this machine alone by default; 0.0.0.0 for all that reach it, which wants an --api-key."""
    port: int = 8998
    """Port to listen at; 0 takes any free one."""
    api_key: str | None = None
    """What a request has to bring as its key. Others on this machine can read a command line: the environment variable
    MINIGPT_API_KEY does the same unseen."""
    model_name: str | None = None
    """Name by which the model is asked for; the last part of its path by default."""
    rows: int = 8
    """Requests that run at the same time. Each takes memory for up to twice --context tokens."""
    max_waiting: int = 64
    """Requests that may wait for a row; those beyond are told to come again."""
    context: int = 2048
    """The most tokens of a conversation or text; beyond it the oldest turns go, whole. What a model was not trained on
    (rows of 512 by default) it handles worse."""
    max_request_bytes: int = 1 << 20
    """The largest body of a request."""
    lora: str | None = None
    """An adapter, applied without merging it: a run of --stage lora, a PEFT directory or MiniMind's .pth."""
    backend: Backend = "jax"
    """Framework that computes: jax, or torch (the twin)."""
    dtype: DType = "float32"
    """Precision of the computation."""
    int8: bool = False
    """Hold the weights of linear layers as 8-bit integers, a quarter of their float32 bytes; the numbers are a little
    off."""


def main(command: Command) -> None:
    """Take the address, load the model, and serve until Ctrl-C."""
    _check(command)
    api_key = command.api_key or os.environ.get(KEY_VARIABLE) or None
    if api_key is not None and (not api_key.isprintable() or api_key != api_key.strip()):
        raise UserError("the API key (--api-key or MINIGPT_API_KEY) begins or ends with white space, or is no text")
    from minigpt_jax.serving.app import make_app
    from minigpt_jax.serving.batcher import Batcher
    from minigpt_jax.serving.served_model import ServedModel
    from minigpt_jax.serving.server import Server, address_of, is_loopback, listening_socket, local_names

    with listening_socket(command.host, command.port) as listening:
        from minigpt_bridge.decoders import open_decoder

        ready = open_decoder(
            command.model, backend=command.backend, dtype=command.dtype, int8=command.int8, adapter=command.lora
        )
        if ready.note is not None:
            print(ready.note, file=sys.stderr)
        rows, waiting = command.rows, command.max_waiting
        context = min(command.context, ready.config.max_position_embeddings)
        # A file name need not be text.
        name = (command.model_name or Path(os.path.abspath(command.model)).name).encode("utf-8", "replace").decode()
        model = ServedModel(name, ready.tokenizer, context=context, most_choices=rows + waiting)
        batcher = Batcher(ready.decoder, ready.tokenizer, rows=rows, context=context, max_waiting=waiting)
        if api_key is None and not is_loopback(command.host):
            print(f"whoever reaches {command.host} can use this server; --api-key asks for a key", file=sys.stderr)
        hosts = local_names(command.host)
        app = make_app(model, batcher, api_key=api_key, hosts=hosts, max_request_bytes=command.max_request_bytes)
        url = address_of(command.host, listening)
        print(f"{name} is served at {url} (a page) and {url}/v1 (OpenAI's API); Ctrl-C stops it", flush=True)
        Server(app, batcher).run_until_told(listening)
    print(f"stopped; requests answered: {batcher.load.served}")


def _check(command: Command) -> None:
    if not command.model:
        raise UserError("name a model: a run directory, a Hugging Face directory, a .safetensors or a .pth file")
    for name, least in (("rows", 1), ("max_waiting", 0), ("context", 2), ("max_request_bytes", 1)):
        if getattr(command, name) < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(command, name)}")
    if not 0 <= command.port <= 65535:
        raise UserError(f"--port must lie between 0 and 65535, got {command.port}")
    for name in ("host", "api_key", "model_name"):
        if getattr(command, name) == "":
            raise UserError(f"--{name.replace('_', '-')} is empty")


if __name__ == "__main__":
    run(main, Command)
