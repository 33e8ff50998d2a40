"""A run directory: where it is, what is in it, and whether a resumed run is still the same run.

Framework-free. out/<name>/ holds config.json (model and training configuration), tokenizer/, metrics.jsonl,
events.jsonl, checkpoints/<step>/, best -> checkpoints/<step>, loss.png and report.html.
"""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from minigpt_jax.config import Backend, ModelConfig, TrainConfig
from minigpt_jax.config_json import from_json, to_json
from minigpt_jax.errors import UserError
from minigpt_jax.files import read_json_object, replace_file
from minigpt_jax.tokenizer import Tokenizer, load_tokenizer
from minigpt_jax.tracking import read_metrics

MAY_CHANGE_ON_RESUME = frozenset(
    {
        "backend",
        "resume",
        "out",
        "save_interval",
        "keep_checkpoints",
        "eval_interval",
        "log_interval",
        "max_non_finite_steps",
        "on_non_finite",
        "tracker",
    }
)
"""Fields that do not change what is computed (without rollback); all others must be as when the run started."""


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The directory of one run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are, one directory a step."""
        return self.path / "checkpoints"

    def create(self, model: ModelConfig, train: TrainConfig, tokenizer: Tokenizer) -> None:
        """Write what makes the directory self-contained; after a failure there is no directory that was not there.

        Raises:
            UserError: the directory cannot be written.
        """
        existed = self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.write_config(model, train)
            tokenizer.save(self.path / "tokenizer")
        except OSError as error:
            self._remove_unless(existed)
            raise UserError(f"cannot write the run directory {self.path}: {error.strerror}; choose --out") from error
        except UserError:
            self._remove_unless(existed)
            raise

    def _remove_unless(self, existed: bool) -> None:
        if not existed:
            shutil.rmtree(self.path, ignore_errors=True)

    def write_config(self, model: ModelConfig, train: TrainConfig) -> None:
        """Write config.json."""
        text = json.dumps({"model": to_json(model), "train": to_json(train)}, indent=2, ensure_ascii=False)
        replace_file(self.path / "config.json", (text + "\n").encode("utf-8"))

    def read_config(self) -> tuple[ModelConfig, TrainConfig]:
        """The configuration that the run was started with.

        Raises:
            UserError: config.json is missing or damaged.
        """
        path = self.path / "config.json"
        if not path.exists():
            raise UserError(f"{self.path} is not a run directory: it has no config.json")
        fields = read_json_object(path)
        sections: list[dict[str, Any]] = []
        for name in ("model", "train"):
            section = fields.get(name)
            if not isinstance(section, dict):
                raise UserError(f"{path}: it has no object {name!r}")
            sections.append(section)
        return from_json(ModelConfig, sections[0], where=str(path)), from_json(
            TrainConfig, sections[1], where=str(path)
        )

    def read_tokenizer(self) -> Tokenizer:
        """The run's own tokenizer."""
        return load_tokenizer(self.path / "tokenizer")

    def saved_steps(self) -> list[int]:
        """Steps of the checkpoints on disk."""
        return [int(path.name) for path in self.checkpoints.glob("*") if path.name.isdigit()]

    def best_checkpoint(self) -> int:
        """Step of the checkpoint with the lowest validation loss, or of the newest when none was validated.

        Raises:
            UserError: there is no checkpoint.
        """
        steps = self.saved_steps()
        if not steps:
            raise UserError(f"{self.path} has no finished checkpoint")
        losses = {row["step"]: row["val_loss"] for row in read_metrics(self.path) if row.get("val_loss") is not None}
        return min(steps, key=lambda step: (losses.get(step, math.inf), -step))

    def link_best(self, step: int | None) -> None:
        """Point `best` at the checkpoint of `step`; remove it when there is none."""
        link = self.path / "best"
        if step is None:
            link.unlink(missing_ok=True)
            return
        target = Path("checkpoints") / str(step)
        if link.is_symlink() and Path(os.readlink(link)) == target:
            return
        unfinished = self.path / ".best.tmp"
        unfinished.unlink(missing_ok=True)
        unfinished.symlink_to(target)
        unfinished.replace(link)


def new_run_directory(out: str | None, *, name: str) -> RunDirectory:
    """The directory of a new run: `out`, or the first free one of out/<name>, out/<name>-2, ...

    Raises:
        UserError: `out` is a file, holds a run already, or something that is not a run.
    """
    if out is None:
        number = 1
        while (path := _default_path(name, number)).exists():
            number += 1
        return RunDirectory(path)
    path = Path(out)
    if path.exists() and not path.is_dir():
        raise UserError(f"--out {out} is a file; give a directory")
    if (path / "config.json").exists():
        # A run that died before its first checkpoint left nothing to keep.
        if not RunDirectory(path).saved_steps():
            return RunDirectory(path)
        raise UserError(f"{out} already holds a run: add --resume to continue it, or choose another --out")
    if path.exists() and any(path.iterdir()):
        raise UserError(f"{out} is not empty and is not a run directory; choose another --out")
    return RunDirectory(path)


def existing_run_directory(out: str | None) -> RunDirectory:
    """The directory of a run to resume: `out`, or the one below out/ that was written to last.

    Raises:
        UserError: there is no such run.
    """
    if out is not None:
        if not (Path(out) / "config.json").exists():
            raise UserError(f"nothing to resume: {out} is not a run directory (it has no config.json)")
        return RunDirectory(Path(out))
    runs = [path.parent for path in Path("out").glob("*/config.json")]
    if not runs:
        raise UserError("nothing to resume: there is no run below out/; name one with --out")

    def last_written(run: Path) -> float:
        return max(path.stat().st_mtime for path in run.iterdir() if path.exists())

    return RunDirectory(max(runs, key=last_written))


def backend_of(config: TrainConfig, given: Collection[str]) -> Backend:
    """The framework that trains: for a resumed run the one it was trained with last, unless another is asked for.

    Raises:
        UserError: there is no run to resume.
    """
    if not config.resume or "backend" in given:
        return config.backend
    _, stored = existing_run_directory(config.out).read_config()
    return stored.backend


def resumed_config(stored: TrainConfig, asked: TrainConfig, given: Collection[str], *, where: Path) -> TrainConfig:
    """The configuration of a resumed run: as stored, with what may change taken from `asked`.

    Args:
        stored: from the run's config.json.
        asked: from the command line.
        given: the fields that the person really gave; only these can contradict.
        where: the run directory, named in errors.

    Raises:
        UserError: a field that decides what is computed was given another value.
    """
    # What a rollback does depends on when checkpoints are made.
    may_change = (
        MAY_CHANGE_ON_RESUME if stored.on_non_finite == "stop" else frozenset({"backend", "resume", "out", "tracker"})
    )
    for name in sorted(set(given) - may_change):
        was, now = getattr(stored, name), getattr(asked, name)
        if was != now:
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"{where} was started with {flag} {_shown(was)}, not {_shown(now)}: leave {flag} out to resume it, or "
                "the --config or --recipe that sets it, or start a new run with --init-from"
            )
    changes = {name: getattr(asked, name) for name in given if name in may_change - {"out"}}
    return dataclasses.replace(stored, **changes)


def _default_path(name: str, number: int) -> Path:
    return Path("out") / (name if number == 1 else f"{name}-{number}")


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)
