"""From the command line to a config: parse with tyro, one line for what a person typed wrong.

Framework-free. Every script is `run(main, Config)`: a dataclass, a call, a print.
"""

import contextlib
import errno
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from minigpt_jax.errors import UserError, missing_extra

Config = TypeVar("Config")

_EXTRAS = {"torch": "torch", "transformers": "hf", "fastapi": "serve", "uvicorn": "serve"}
"""Packages without which a command cannot do its work, and the extra that has them."""

_BOX_DRAWING = re.compile("[\u2500-\u257f]+")


def run(main: Callable[[Config], None], config_type: type[Config]) -> None:
    """Parse `sys.argv` into `config_type` and call `main` with it.

    Exits with code 2 and one line "error: ..." on stderr for a mistake, and with 130 when interrupted.
    """
    run_with(main, lambda: parse(config_type, sys.argv[1:]))


def run_with(main: Callable[[Config], None], make_config: Callable[[], Config]) -> None:
    """As `run`, for a script that makes its config from the command line in its own way."""
    for stream in (sys.stdout, sys.stderr):
        # A file name need not be text.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _send_again
    try:
        main(make_config())
    except UserError as error:
        fail(str(error))
    except BrokenPipeError:
        # Whoever read the output has left; what Python would still write at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        fail(f"{error.filename}: {error.strerror}; choose a shorter name")
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        fail(str(missing_extra("this command", extra)))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _terminate(*_: Any) -> None:
    """Leave as after Ctrl-C: what is half-written is removed on the way out."""
    print("terminated", file=sys.stderr)
    sys.exit(128 + signal.SIGTERM)


def _send_again(dropped: "sys.UnraisableHookArgs") -> None:
    """Send a signal again whose exception came where exceptions are dropped, such as JAX's hook of the collector."""
    if isinstance(dropped.exc_value, KeyboardInterrupt | SystemExit):
        number = signal.SIGINT if isinstance(dropped.exc_value, KeyboardInterrupt) else signal.SIGTERM
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    else:
        sys.__unraisablehook__(dropped)


def parse(config_type: type[Config], arguments: Sequence[str], *, default: Config | None = None) -> Config:
    """`config_type` from command-line arguments, starting from `default`.

    Raises:
        UserError: an unknown flag, a missing or malformed value.
        SystemExit: with code 0, after --help was printed.
    """
    import tyro

    said = io.StringIO()
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(config_type, args=list(arguments), **options)
    except SystemExit as error:
        if not error.code:
            raise
        raise UserError(_in_one_line(said.getvalue())) from error


def _in_one_line(parser_message: str) -> str:
    """What tyro says in a box over many lines, without the box, the title and the repeated help text."""
    text = " ".join(_BOX_DRAWING.sub(" ", parser_message).split())
    mismatch = re.match(r".*Error parsing (--\S+): .* could be instantiated from \['(.*?)'\]", text)
    if mismatch:
        return f"{mismatch[1]} cannot be {mismatch[2]!r} (--help lists every option)"
    text = re.split(r" Argument helptext:| For full helptext", text)[0]
    for title in ("Parsing error ", "Value error ", "Invalid choice ", "Unrecognized options ", "Required options "):
        text = text.removeprefix(title)
    # What is not given is None; nobody types it.
    text = text.replace("'None', ", "").replace(", 'None'", "")
    return f"{text} (--help lists every option)"


def fail(message: str) -> NoReturn:
    """Print `message` as one line "error: ..." on stderr and exit with code 2."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
