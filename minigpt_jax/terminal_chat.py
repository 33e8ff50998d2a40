"""A conversation at a terminal. Framework-free.

A line is a message, or a command that begins with a slash. Ctrl-C stops the answer, not the program; Ctrl-D leaves.
"""

import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path

from minigpt_jax.chat_session import ChatSession
from minigpt_jax.errors import UserError
from minigpt_jax.files import replace_file
from minigpt_jax.generation import GenerationConfig

COMMANDS = """/reset        forget the conversation
/save FILE    write it as one line of JSON, as sft reads it
/params       show how answers are chosen; /params temperature=0 changes it
/help         this list
/exit         leave, as Ctrl-D does"""


def chat(session: ChatSession, config: GenerationConfig) -> None:
    """Read messages and print answers until the person leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  the arrow keys: earlier messages, and moving within one
    print("Write a message. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line in ("/exit", "/quit"):
            return
        try:
            if line.startswith("/"):
                config = _obey(line, session, config)
            elif line:
                _answer(line, session, config)
        except UserError as error:
            print(error)


def _answer(line: str, session: ChatSession, config: GenerationConfig) -> None:
    forgotten, begin = session.num_forgotten, time.perf_counter()
    try:
        done = session.answer(line, config, on_text=_show)
    except KeyboardInterrupt:
        print("\n(stopped)")
        return
    seconds = time.perf_counter() - begin
    print()
    notes = [f"{len(done.ids)} tokens, {len(done.ids) / seconds:.0f} a second"]
    if done.finish_reason == "length":
        notes.append("cut: the answer may go on")
    if session.num_forgotten > forgotten:
        notes.append(f"the oldest {session.num_forgotten} messages no longer fit")
    print(f"({'; '.join(notes)})")


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _obey(line: str, session: ChatSession, config: GenerationConfig) -> GenerationConfig:
    """Do what a command says; returns the settings that hold from now on."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    if command == "/help":
        print(COMMANDS)
    elif command == "/reset":
        session.reset()
        print("the conversation is forgotten")
    elif command == "/save":
        _save(session, rest)
    elif command == "/params":
        config = _changed(config, rest)
        print("  ".join(f"{field.name}={getattr(config, field.name)}" for field in dataclasses.fields(config)))
    else:
        raise UserError(f"there is no command {command}; /help lists them")
    return config


def _save(session: ChatSession, name: str) -> None:
    if not name:
        raise UserError("name a file: /save FILE")
    if Path(name).exists():
        raise UserError(f"{name} exists already; choose another name")
    if not any(message["role"] == "assistant" for message in session.messages):
        raise UserError("there is nothing to save yet")
    try:
        line = json.dumps({"conversations": session.messages}, ensure_ascii=False)
        replace_file(Path(name), (line + "\n").encode("utf-8"))
    except OSError as error:
        raise UserError(f"cannot write {name}: {error.strerror}") from error
    print(f"saved {name}")


def _changed(config: GenerationConfig, assignments: str) -> GenerationConfig:
    fields = {field.name: field.type for field in dataclasses.fields(GenerationConfig) if field.name != "stop"}
    for assignment in assignments.split():
        name, equals, value = assignment.partition("=")
        name = name.replace("-", "_")
        if not equals or name not in fields:
            raise UserError(f"write NAME=VALUE with one of {', '.join(fields)}, not {assignment}")
        try:
            number = fields[name](value)  # type: ignore[operator]
        except ValueError:
            raise UserError(f"{name} must be a number, got {value!r}") from None
        config = dataclasses.replace(config, **{name: number})
    return config
