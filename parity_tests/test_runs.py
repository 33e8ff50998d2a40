"""Whole runs by scripts/train.py's own path: the same start, the same batches, and a run that changes frameworks."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")


from small_runs import events, saved_arrays, small_config, timeless_metrics, train  # noqa: E402

from minigpt_bridge.bounds import BOUNDS  # noqa: E402
from minigpt_bridge.engines import take_over  # noqa: E402
from minigpt_bridge.models import read_tree  # noqa: E402
from minigpt_jax.checkpoint import CheckpointStore  # noqa: E402
from minigpt_jax.errors import UserError  # noqa: E402

pytestmark = pytest.mark.usefixtures("run_environment", "as_it_was")


def config_of(directory, backend, **changes):
    options = {"steps": 20, "accumulation_steps": 2, "save_interval": 10, "eval_interval": 10, "warmup_steps": 3}
    options |= {"out": str(directory / f"run-{backend}"), "backend": backend, "dtype": "float64"}
    return small_config(directory, **(options | changes))


def test_a_torch_run_leaves_the_same_directory_and_metrics_as_a_jax_run(tmp_path):
    runs = [train(config_of(tmp_path, backend, steps=6)).directory for backend in ("jax", "torch")]
    names = [{path.name for path in directory.iterdir()} for directory in runs]
    assert names[0] == names[1]
    ours, theirs = (timeless_metrics(directory) for directory in runs)
    assert [set(line) for line in ours] == [set(line) for line in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=BOUNDS["float64"].gradient, abs=0)


def test_the_same_seed_starts_both_frameworks_with_the_same_weights(tmp_path):
    started = []
    for backend in ("jax", "torch"):
        config = config_of(tmp_path, backend, steps=1, learning_rate=1e-30, weight_decay=0.0, dtype="float32")
        started.append(saved_arrays(train(config).directory, 1))
    for path, leaf in started[0].items():
        if path.startswith("parameters."):
            assert np.array_equal(leaf, started[1][path]), path


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("first", "second"), [("torch", "jax"), ("jax", "torch")])
def test_a_run_that_changes_frameworks_half_way_ends_where_either_ends(
    tmp_path, first, second, dtype, bound, bound_float32, relative_error
):
    whole = {b: saved_arrays(train(config_of(tmp_path, b, dtype=dtype)).directory, 20) for b in ("jax", "torch")}
    mixed = config_of(tmp_path, first, out=str(tmp_path / "mixed"), dtype=dtype)
    # 23 micro-batches in: half a window is in the accumulator.
    train(mixed, stop_at=22)
    assert saved_arrays(tmp_path / "mixed", 11)["optimizer.micro_steps"] == 1
    result = train(dataclasses.replace(mixed, backend=second, resume=True))
    assert result.ending == "finished"
    assert json.loads((result.directory / "config.json").read_text())["train"]["backend"] == second
    ends = saved_arrays(result.directory, 20)
    limit = (bound if dtype == "float64" else bound_float32).trajectory
    for other in whole.values():
        assert other.keys() == ends.keys()
        errors = {path: relative_error(ends[path], leaf) for path, leaf in other.items()}
        assert max(errors.values()) <= limit, max(errors, key=errors.get)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_taking_checkpoints_over_and_back_changes_no_bit(tmp_path, backend, dtype):
    directory = train(config_of(tmp_path, backend, dtype=dtype), stop_at=22).directory
    other = "torch" if backend == "jax" else "jax"
    step = max(int(path.name) for path in (directory / "checkpoints").iterdir() if path.name.isdigit())
    before = saved_arrays(directory, step)
    assert before["optimizer.micro_steps"] == 1
    take_over(directory / "checkpoints", other)
    take_over(directory / "checkpoints", backend)
    after = saved_arrays(directory, step)
    assert before.keys() == after.keys()
    for path, leaf in before.items():
        assert leaf.dtype == after[path].dtype, path
        assert leaf.tobytes() == after[path].tobytes(), path


@pytest.mark.parametrize("last", ["checkpoints becomes checkpoints.old", "checkpoints.jax becomes checkpoints"])
def test_a_crash_while_checkpoints_are_taken_over_loses_none(tmp_path, monkeypatch, last):
    directory = train(config_of(tmp_path, "torch", dtype="float32"), stop_at=21).directory
    before = saved_arrays(directory, 10)
    rename = Path.rename

    def rename_and_die(self, target):
        rename(self, target)
        if f"{self.name} becomes {target.name}" == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", rename_and_die)
    with pytest.raises(KeyboardInterrupt):
        take_over(directory / "checkpoints", "jax")
    monkeypatch.setattr(Path, "rename", rename)
    for backend in ("jax", "torch"):
        take_over(directory / "checkpoints", backend)
        after = saved_arrays(directory, 10)
        assert all(np.array_equal(before[path], after[path]) for path in before)
    assert [path.name for path in directory.glob("checkpoints*")] == ["checkpoints"]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_damaged_checkpoint_is_not_taken_over_and_stays_as_it_is(tmp_path, monkeypatch, backend):
    closed = []
    monkeypatch.setattr(
        CheckpointStore, "close", lambda store, close=CheckpointStore.close: closed.append(close(store))
    )
    directory = train(config_of(tmp_path, backend, dtype="float32", steps=1)).directory
    checkpoint, other = directory / "checkpoints" / "1", "torch" if backend == "jax" else "jax"
    damaged = [path for path in checkpoint.rglob("*") if path.is_file() and "optimizer" in str(path)]
    for path in damaged:
        path.write_bytes(b"")
    closed.clear()
    with pytest.raises(UserError, match="checkpoints/1 is damaged"):
        take_over(directory / "checkpoints", other)
    with pytest.raises(UserError, match="checkpoints/1 is damaged"):
        read_tree(directory / "checkpoints", 1, "optimizer")
    assert len(closed) == (2 if backend == "jax" else 1)  # what opened orbax
    assert damaged[0].read_bytes() == b""


def test_a_torch_run_resumes_bit_for_bit_with_dropout(tmp_path):
    options = {"dtype": "float32", "dropout": 0.1, "accumulation_steps": 3, "steps": 6}
    whole = saved_arrays(train(config_of(tmp_path, "torch", **options)).directory, 6)
    config = config_of(tmp_path, "torch", out=str(tmp_path / "second"), **options)
    train(config, stop_at=7)
    ends = saved_arrays(train(dataclasses.replace(config, resume=True)).directory, 6)
    assert all(np.array_equal(whole[path], ends[path]) for path in whole)


def test_a_torch_run_skips_a_micro_batch_that_is_not_finite(tmp_path):
    from minigpt_torch.engine import TorchEngine

    class Poisoned(TorchEngine):
        def train_step(self, batch):
            if batch.index == 2:
                batch = dataclasses.replace(batch, loss_weights=batch.loss_weights * np.float32(1e36))
            return super().train_step(batch)

    config = config_of(tmp_path, "torch", steps=4, dtype="float32")
    directory = train(config, Poisoned).directory
    (event,) = events(directory, "skipped micro-batch")
    assert event["reason"] == "not finite"
    assert all(np.isfinite(leaf).all() for leaf in saved_arrays(directory, 4).values())


@pytest.mark.parametrize(("first", "second"), [("torch", "jax"), ("jax", "torch")])
def test_a_run_under_muon_changes_frameworks_half_way(tmp_path, first, second, bound, relative_error):
    options = {"optimizer": "muon", "steps": 8, "save_interval": 4, "eval_interval": 8}
    whole = saved_arrays(train(config_of(tmp_path, second, **options)).directory, 8)
    mixed = config_of(tmp_path, first, out=str(tmp_path / "mixed"), **options)
    train(mixed, stop_at=9)
    assert train(dataclasses.replace(mixed, backend=second, resume=True)).ending == "finished"
    ends = saved_arrays(tmp_path / "mixed", 8)
    assert whole.keys() == ends.keys()
    assert not [path for path in ends if "second_moment" in path and path.endswith("kernel")]
    errors = {path: relative_error(ends[path], leaf) for path, leaf in whole.items()}
    assert max(errors.values()) <= bound.trajectory, max(errors, key=errors.get)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_run_can_start_from_a_run_of_the_other_framework(tmp_path, backend):
    other = "torch" if backend == "jax" else "jax"
    first = train(config_of(tmp_path, other, dtype="float32")).directory
    config = config_of(tmp_path, backend, out=str(tmp_path / "second"), dtype="float32", init_from=str(first))
    second = train(dataclasses.replace(config, model=None, hidden_size=None, num_layers=None)).directory
    best = min(line["val_loss"] for line in timeless_metrics(first) if "val_loss" in line)
    assert timeless_metrics(second)[0]["val_loss"] == pytest.approx(best, rel=BOUNDS["float32"].gradient, abs=0)
