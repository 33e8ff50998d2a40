"""What every script does with mistakes, signals and names that are not text."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minigpt_jax import errors
from minigpt_jax.errors import UserError, missing_extra, python
from minigpt_jax.files import require_writable

SCRIPT = """
import pathlib, signal, sys, time
from dataclasses import dataclass
from minigpt_jax.cli import run
signal.signal(signal.SIGINT, signal.default_int_handler)  # as at a terminal, in a background job too

@dataclass(frozen=True)
class Command:
    \"\"\"A command.\"\"\"

    what: str
    \"\"\"What it does.\"\"\"

def main(command):
    if command.what == "torch":
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    if command.what == "own":
        raise ModuleNotFoundError("No module named 'mine'", name="mine")
    if command.what == "wait":
        try:
            pathlib.Path("begun").touch()
            time.sleep(60)
        finally:
            pathlib.Path("cleaned").touch()
    print(command.what)

run(main, Command)
"""


def start(arguments, directory):
    (directory / "script.py").write_text(SCRIPT)
    root = Path(errors.__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "script.py", *arguments]
    return subprocess.Popen(command, cwd=directory, env=environment, stdout=-1, stderr=-1)


def test_a_package_that_is_not_installed_is_one_line(tmp_path):
    process = start(["--what", "torch"], tmp_path)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said.decode().startswith("error: this command takes the extra torch: ")
    assert said.count(b"\n") == 1


def test_a_missing_module_of_our_own_is_no_mistake_of_the_person(tmp_path):
    process = start(["--what", "own"], tmp_path)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"Traceback" in said


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_by_the_way_out(tmp_path, sent, code):
    process = start(["--what", "wait"], tmp_path)
    while not (tmp_path / "begun").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(sent)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.count(b"\n")) == (code, 1)
    assert (tmp_path / "cleaned").exists()


def test_a_name_that_is_not_text_can_be_printed(tmp_path):
    process = start(["--what", b"bad\xff"], tmp_path)
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, b"bad\\udcff\n")


def test_the_python_that_a_message_names_is_this_one(tmp_path, monkeypatch):
    binary = tmp_path / ".venv" / "bin" / "python"
    binary.parent.mkdir(parents=True)
    binary.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(binary))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert python() == ".venv/bin/python"
    monkeypatch.setenv("PATH", f"{binary.parent}:/usr/bin")
    assert python() == "python"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("PATH", "/usr/bin")
    assert python() == str(binary)
    assert (
        str(missing_extra("X", "hf")) == f"X takes the extra hf: {binary} -m pip install -c constraints.txt -e '.[hf]'"
    )


@pytest.mark.parametrize("name", ["", ".", "missing/a.json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--json"):
        require_writable(Path(name), option="--json")


def test_a_file_that_can_be_written_is_not_refused(tmp_path):
    require_writable(tmp_path / "a.json", option="--json")


SWALLOWS = """
import gc, signal, sys, time
from dataclasses import dataclass
from minigpt_jax.cli import run

@dataclass(frozen=True)
class Config:
    number: int = {number}

# A shell's background jobs are started with SIGINT ignored, and so would their children be.
signal.signal(signal.SIGINT, signal.default_int_handler)

def main(config):
    def send(phase, _):
        gc.callbacks.clear()
        signal.raise_signal(config.number)  # its exception is dropped here, and the work would go on
    gc.callbacks.append(send)
    gc.collect()
    time.sleep(20)
    print("not heard")

run(main, Config)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_a_signal_that_comes_where_exceptions_are_dropped_still_ends_the_command(number, code):
    script = SWALLOWS.format(number=int(number))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr


def test_output_that_nobody_reads_on_ends_a_command_without_a_traceback():
    script = (
        "from dataclasses import dataclass\nfrom minigpt_jax.cli import run\n"
        "@dataclass(frozen=True)\nclass Config:\n    pass\n"
        "run(lambda _: [print('line', flush=True) for _ in range(100_000)], Config)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
