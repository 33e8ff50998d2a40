"""Start-up: from a process's first moment to its first finished training step, and what imports alone take.

Each side is scripts/train.py as a person runs it, in a process of its own, ended when its metrics have the first step:
imports, the sample corpus and its cache, the first validation and the step itself are in the time. The round that is
not measured fills the caches of tokens and of compiled steps, so the measured ones find them.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from minigpt_bridge.bench.timing import Row, interleave, seconds

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 600.0
"""Seconds after which a run that has not made its first step has failed."""
BETWEEN_LOOKS = 0.01
"""Seconds."""
IMPORTS = {
    "ours": "import minigpt_jax.launch, minigpt_jax.engine",
    "twin": "import minigpt_jax.launch, minigpt_torch.engine",
}


def startup_rows(model: str, *, rounds: int) -> Iterator[Row]:
    """Seconds to the first step against the PyTorch engine of the same command, and of either's imports.

    Args:
        model: a preset's name.
        rounds: how often the sides take turns.
    """
    first = interleave({"ours": _first_step(model, "jax"), "twin": _first_step(model, "torch")}, rounds=rounds)
    yield seconds(f"startup, {model} to the first step, twin", first["ours"], first["twin"])
    imports = interleave({side: _importing(statement) for side, statement in IMPORTS.items()}, rounds=rounds)
    yield seconds("startup, imports, twin", imports["ours"], imports["twin"])


def _first_step(model: str, backend: str) -> Callable[[], object]:
    options = ["--model", model, "--backend", backend, "--dtype", "float32", "--log-interval", "1"]

    def run() -> None:
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "run"
            command = [sys.executable, str(ROOT / "scripts" / "train.py"), *options, "--out", str(out)]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            try:
                _wait_for_step(process, out / "metrics.jsonl")
            finally:
                process.kill()
                process.communicate()

    return run


def _wait_for_step(process: "subprocess.Popen[str]", metrics: Path) -> None:
    end = time.monotonic() + LONGEST
    # The first line is the validation before the first step.
    while not (metrics.exists() and metrics.read_text("utf-8").count("\n") > 1):
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise RuntimeError(f"scripts/train.py made no step: {process.communicate()[1]}")
        time.sleep(BETWEEN_LOOKS)


def _importing(statement: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, "-c", statement], cwd=ROOT, check=True)
