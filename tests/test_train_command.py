"""scripts/train.py as a person types it: options, mistakes, and a run that is killed."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import as_typed, state_digest, timeless_metrics, write_documents

pytestmark = pytest.mark.usefixtures("run_environment")

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "train.py"


def run(arguments, *, cwd):
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


SMALL = [
    "--model", "tiny", "--hidden-size", "32", "--num-layers", "1", "--batch-size", "2", "--max-seq-len", "32",
    "--data", "data.jsonl", "--out", "run",
]  # fmt: skip


def test_help_explains_every_option(tmp_path):
    result = run(["--help"], cwd=tmp_path)
    assert result.returncode == 0
    for option in (
        "--stage",
        "--model",
        "--data",
        "--resume",
        "--accumulation-steps",
        "--dry-run",
        "--config",
        "--recipe",
    ):
        assert option in result.stdout


def test_dry_run_prints_what_training_would_take_and_writes_nothing(tmp_path):
    result = as_typed(SCRIPT, "--dry-run", "--model", "minimind2-small", "--json", "cost.json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "cost.json").read_text())
    assert figures["parameters"] == figures["active_parameters"] == 25_829_888
    assert figures["bytes_estimated"] > 4 * 4 * 25_829_888
    assert [path.name for path in tmp_path.iterdir()] == ["cost.json"]


def test_a_config_file_sets_options_and_the_command_line_overrides_it(tmp_path):
    write_documents(tmp_path / "data.jsonl")
    (tmp_path / "config.json").write_text(json.dumps({"steps": 50, "learning_rate": 1e-3, "data": ["data.jsonl"]}))
    result = as_typed(SCRIPT, *SMALL, "--config", "config.json", "--steps", "2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    train = json.loads((tmp_path / "run" / "config.json").read_text())["train"]
    assert (train["steps"], train["learning_rate"]) == (2, 1e-3)


def test_names_that_minimind_uses_are_understood(tmp_path):
    write_documents(tmp_path / "data.jsonl")
    arguments = (
        "--model tiny --hidden_size 32 --num_hidden_layers 1 --batch_size 2 --max_seq_len 32 --out run --steps 1"
    )
    result = as_typed(SCRIPT, *arguments.split(), "--data_path", "data.jsonl", cwd=tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "missing.jsonl"], "missing.jsonl"),
        (["--data", "bad.jsonl"], "bad.jsonl:2"),
        (["--data", "empty.jsonl"], "empty.jsonl"),
        (["--data"], "--data names no file"),
        (["--model", "huge"], "there is no model preset 'huge'; choose one of tiny"),
        (["--max-seq-len", "0"], "--max-seq-len must be at least 2, got 0"),
        (["--steps", "-5"], "--steps must be at least 1, got -5"),
        (["--steps", "5", "--epochs", "2"], "give --steps or --epochs, not both"),
        (["--steps", "many"], "--steps cannot be 'many'"),
        (["--learning-rate", "1e39"], "--learning-rate must be at most 1"),
        (["--hidden-size", "6"], "--hidden-size must be a multiple of 8 for tiny, got 6"),
        (["--learning-rate", "nan"], "--learning-rate must be positive and finite"),
        (["--batching", "sorted"], "'sorted'"),
        (["--no-such-option"], "--no-such-option"),
        (["--recipe", "writeup-d"], "invalid choice 'writeup-d' for argument '--recipe'"),
        (["--tokenizer", "bad.jsonl"], "bad.jsonl"),
        (["--config", "bad.jsonl"], "bad.jsonl is not JSON"),
        (["--config", "unknown.json"], "unknown.json: unknown field colour"),
        (["--config", "wrong.json"], "wrong.json: steps must be int or null, got 'five'"),
        (["--resume", "--out", "nowhere"], "nothing to resume: nowhere"),
        (["--out", "bad.jsonl"], "--out bad.jsonl is a file"),
        (["--out", "/proc/run", "--data", "good.jsonl"], "cannot write the run directory /proc/run"),
        (["--data", ""], "--data is an empty name"),
        (["--seed", "4294967296"], "--seed must be below 2**32"),
        (["--data", "good.jsonl", "--max-seq-len", "40000"], "--max-seq-len 40000 is more than"),
        (["--init-from", "nowhere"], "there is no model at nowhere"),
        (["--dtype", "float16"], "invalid choice 'float16' for argument '--dtype'. Expected one of ('"),
        (["--data", "empty.jsonl", "--dry-run"], "empty.jsonl is empty"),
        (["--dry-run", "--json", "nowhere/cost.json"], "--json nowhere/cost.json: the directory nowhere is missing"),
    ],
)
def test_a_mistake_gives_one_line_and_exit_code_2_and_leaves_nothing(tmp_path, arguments, message):
    write_documents(tmp_path / "good.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": \n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "unknown.json").write_text('{"colour": 3}')
    (tmp_path / "wrong.json").write_text('{"steps": "five"}')
    before = sorted(tmp_path.iterdir())
    result = as_typed(SCRIPT, *arguments, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert message in error
    assert "Traceback" not in result.stderr
    assert "None" not in error
    assert sorted(tmp_path.iterdir()) == before


def killed_and_resumed(directory, *, kills, options, seed):
    """Run until finished, killing the process with SIGKILL at `kills` random moments of its training."""
    generator = random.Random(seed)
    arguments = [*SMALL, *options]
    metrics = directory / "run" / "metrics.jsonl"
    for attempt in range(kills):
        command = [sys.executable, str(SCRIPT), *arguments, *(["--resume"] if attempt else [])]
        process = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL)
        already = len(metrics.read_bytes()) if metrics.exists() else 0
        # From the first metrics on the process trains and saves; before that there is nothing to break.
        while process.poll() is None and (not metrics.exists() or len(metrics.read_bytes()) <= already):
            time.sleep(0.01)
        checkpoints = directory / "run" / "checkpoints"
        while process.poll() is None and not any(path.name.isdigit() for path in checkpoints.glob("*")):
            time.sleep(0.01)
        time.sleep(generator.random() * 1.5)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    result = run([*arguments, "--resume"], cwd=directory)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_run_resumes_bit_for_bit(tmp_path, kills):
    steps = 400 * kills
    options = ["--steps", str(steps), "--save-interval", "20", "--eval-interval", "100", "--dropout", "0.1"]
    options += ["--accumulation-steps", "2"]
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        # The same path from both directories: it is part of what the data is known by.
        write_documents(tmp_path / name / "data.jsonl")
    whole = run([*SMALL, *options], cwd=tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    killed_and_resumed(tmp_path / "killed", kills=kills, options=options, seed=kills)
    runs = [tmp_path / name / "run" for name in ("whole", "killed")]
    assert state_digest(runs[0], steps) == state_digest(runs[1], steps)
    assert timeless_metrics(runs[0]) == timeless_metrics(runs[1])
