"""What a person did wrong, and the commands that a message tells them to type."""

import os
import shutil
import sys
from pathlib import Path


class UserError(Exception):
    """What a person did wrong, in one line: what, where, how to mend it.

    Scripts print the message after "error:" and exit with code 2, without a traceback.
    """


def missing_extra(what: str, extra: str) -> UserError:
    """The error for `what` where the packages of an extra of pyproject.toml are not installed."""
    return UserError(f"{what} takes the extra {extra}: {python()} -m pip install -c constraints.txt -e '.[{extra}]'")


def python() -> str:
    """How this interpreter is typed in the shell: python where its environment is active, else its path."""
    found = shutil.which("python")
    if found is not None and Path(found).absolute() == Path(sys.executable).absolute():
        return "python"
    relative = os.path.relpath(sys.executable)
    return sys.executable if relative.startswith("..") else relative
