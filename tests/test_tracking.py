import csv
import json
import math
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from minigpt_jax.errors import UserError
from minigpt_jax.files import replace_file
from minigpt_jax.tracking import (
    METRIC_NAMES,
    EventsLog,
    MetricsLog,
    make_tracker,
    read_events,
    read_metrics,
    write_csv,
)


def log_of(run_dir: Path, *steps: int) -> MetricsLog:
    log = MetricsLog(run_dir)
    for step in steps:
        log.write({"loss": step / 7, "tokens": 100 * step}, step=step)
    return log


# --- metrics.jsonl ---


def test_a_line_reads_back_as_it_was_written_in_the_order_of_the_names(tmp_path):
    MetricsLog(tmp_path).write({"learning_rate": 5e-4, "loss": 2.25, "epoch": 0.5}, step=10)
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 10, "epoch": 0.5, "loss": 2.25, "learning_rate": 0.0005}\n'
    )


def test_each_line_is_on_disk_when_write_returns(tmp_path):
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.write({"loss": 1.0}, step=step)
        assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, step + 1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.asarray(np.inf)])
def test_a_value_that_is_not_finite_is_written_as_null(tmp_path, value):
    MetricsLog(tmp_path).write({"loss": value}, step=1)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": None}]


def test_numpy_numbers_are_written_as_plain_ones(tmp_path):
    MetricsLog(tmp_path).write({"loss": np.float32(0.5), "tokens": np.int64(7), "grad_norm": np.asarray(2.0)}, step=1)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.5, "tokens": 7, "grad_norm": 2.0}]


def test_an_unknown_name_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="unknown metric lr"):
        MetricsLog(tmp_path).write({"lr": 0.1, "loss": 1.0}, step=1)
    assert not (tmp_path / "metrics.jsonl").exists()


# --- Resume ---


def test_truncation_keeps_the_lines_up_to_the_step_byte_for_byte(tmp_path):
    log = log_of(tmp_path, 10, 20)
    kept = log.path.read_bytes()
    log_of(tmp_path, 21, 30)
    log.truncate_after(20)
    assert log.path.read_bytes() == kept


def test_truncation_drops_a_last_line_that_a_crash_cut_short(tmp_path):
    log = log_of(tmp_path, 10, 20)
    whole = log.path.read_bytes()
    last_line = whole.splitlines(keepends=True)[-1]
    for cut in range(2, len(last_line)):
        log.path.write_bytes(whole[:-cut])
        log.truncate_after(20)
        assert [row["step"] for row in read_metrics(tmp_path)] == [10]
        assert log.path.read_bytes().endswith(b"}\n")


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path):
    log = log_of(tmp_path, 10, 20)
    whole = log.path.read_bytes()
    log.path.write_bytes(whole[:-1])
    log.truncate_after(20)
    assert log.path.read_bytes() == whole


def test_a_line_cut_inside_a_character_is_an_unfinished_line(tmp_path):
    log = EventsLog(tmp_path)
    log.write("saved", step=1)
    log.path.write_bytes(log.path.read_bytes() + '{"step": 2, "kind": "\u4f60'.encode()[:-1])
    assert [event["step"] for event in read_events(tmp_path)] == [1]


def test_a_damaged_line_in_the_middle_is_named_by_file_and_line(tmp_path):
    log = log_of(tmp_path, 10, 20, 30)
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(lines[0] + b"{oops\n" + lines[2])
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
        log.truncate_after(30)


def test_truncation_without_a_file_makes_none(tmp_path):
    MetricsLog(tmp_path).truncate_after(5)
    assert list(tmp_path.iterdir()) == []


def test_events_are_truncated_as_metrics_are(tmp_path):
    log = EventsLog(tmp_path)
    log.write("saved", step=100, path="checkpoints/100")
    log.write("non_finite", step=130, records=np.asarray([4, 9]), loss=math.nan)
    assert read_events(tmp_path)[1] == {"step": 130, "kind": "non_finite", "records": [4, 9], "loss": None}
    log.truncate_after(100)
    assert read_events(tmp_path) == [{"step": 100, "kind": "saved", "path": "checkpoints/100"}]


def test_a_failed_replacement_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"old")

    def disk_full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_who_reads_a_file_while_it_is_replaced_sees_the_old_content_whole(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"old content")
    with path.open("rb") as reader:
        replace_file(path, b"new")
        assert reader.read() == b"old content"
    assert path.read_bytes() == b"new"


# --- metrics.csv ---


def test_the_table_has_every_name_as_a_column_and_empty_cells_where_nothing_was_measured(tmp_path):
    log = log_of(tmp_path, 10)
    log.write({"val_loss": math.nan, "val_bits_per_byte": 2.5}, step=20)
    with write_csv(tmp_path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == METRIC_NAMES
    assert (rows[0]["tokens"], rows[0]["val_loss"]) == ("1000", "")
    assert (rows[1]["step"], rows[1]["val_loss"], rows[1]["val_bits_per_byte"]) == ("20", "", "2.5")


# --- Trackers ---


def test_no_tracker_writes_nothing(tmp_path):
    tracker = make_tracker("none", run_dir=tmp_path, run_name="r", config={}, resume=False)
    tracker.log({"loss": 1.0}, step=1)
    tracker.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "swanlab"])
def test_a_missing_library_is_one_line_with_the_command_that_installs_it(tmp_path, monkeypatch, name):
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)

    class Absent:
        def find_spec(self, fullname, path=None, target=None):
            if fullname.split(".")[0] == name:
                raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(UserError) as error:
        make_tracker(name, run_dir=tmp_path, run_name="r", config={}, resume=False)
    assert str(error.value).startswith(f"--tracker {name} ")
    assert str(error.value).endswith("pip install swanlab" if name == "swanlab" else "'.[tracking]'")
    assert list(tmp_path.iterdir()) == []


def scalars(run_dir: Path, tag: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    return {event.step: event.value for event in accumulator.Scalars(tag)}


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    tracker = make_tracker("tensorboard", run_dir=tmp_path, run_name="r", config={"seed": 42}, resume=False)
    tracker.log({"loss": 2.5, "val_loss": 3.0}, step=10)
    tracker.log({"loss": np.float32(1.5)}, step=20)
    tracker.finish()
    assert scalars(tmp_path, "loss") == {10: 2.5, 20: 1.5}
    assert scalars(tmp_path, "val_loss") == {10: 3.0}


def test_tensorboard_has_each_point_on_disk_before_it_is_closed(tmp_path):
    tracker = make_tracker("tensorboard", run_dir=tmp_path, run_name="r", config={}, resume=False)
    tracker.log({"loss": 2.5}, step=10)
    assert scalars(tmp_path, "loss") == {10: 2.5}
    tracker.finish()


def test_tensorboard_shows_the_config(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_tracker("tensorboard", run_dir=tmp_path, run_name="first", config={"seed": 42}, resume=False).finish()
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    text = accumulator.Tensors("config")[0].tensor_proto.string_val[0].decode()
    assert "run first" in text
    assert '"seed": 42' in text


def test_a_resumed_tensorboard_run_hides_what_the_killed_one_logged_past_the_checkpoint(tmp_path):
    first = make_tracker("tensorboard", run_dir=tmp_path, run_name="r", config={}, resume=False)
    for step in (10, 20, 30, 40):
        first.log({"loss": 1.0}, step=step)
    first.finish()
    # File names carry whole seconds; the second writer's must sort after the first's, as they do in a real resume.
    (written,) = (tmp_path / "tensorboard").iterdir()
    written.rename(written.with_name("events.out.tfevents.0"))
    second = make_tracker("tensorboard", run_dir=tmp_path, run_name="r", config={}, resume=True)
    second.log({"loss": 2.0}, step=30)
    second.finish()
    assert scalars(tmp_path, "loss") == {10: 1.0, 20: 1.0, 30: 2.0}


WANDB_RUN = """
import sys
import time
from pathlib import Path
from minigpt_jax.tracking import make_tracker
for resume in (False, True):
    tracker = make_tracker(
        "wandb", run_dir=Path(sys.argv[1]), run_name="first", config={"seed": 42, "model": {"layers": 4}}, resume=resume
    )
    tracker.log({"loss": 2.5, "tokens": 100}, step=20 if resume else 10)
    tracker.finish()
"""


def wandb_records(path: Path):
    """The records of a .wandb file shorter than a 32 KiB block: 7 bytes, then crc, length, type, payload of each."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    assert content.startswith(b":W&B")
    assert len(content) < 32768
    position = 7
    while position < len(content):
        _, length, _ = struct.unpack_from("<IHB", content, position)
        position += 7
        yield Record.FromString(content[position : position + length])
        position += length


def test_wandb_offline_keeps_the_run_in_the_run_directory_and_resumes_under_one_id(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"WANDB_MODE": "offline", "HOME": str(tmp_path / "home")}
    (tmp_path / "run").mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WANDB_RUN, str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    run_id = (tmp_path / "run" / "wandb_id.txt").read_text().strip()
    files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    logged = {}
    for file in files:
        for record in wandb_records(file):
            if record.HasField("run"):
                assert (record.run.run_id, record.run.display_name) == (run_id, "first")
                assert {item.key: json.loads(item.value_json) for item in record.run.config.update}["seed"] == 42
            if record.HasField("history"):
                items = {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
                logged[record.history.step.num] = (float(items["loss"]), float(items["tokens"]))
    assert logged == {10: (2.5, 100.0), 20: (2.5, 100.0)}


def test_wandb_without_an_account_is_one_line_that_names_the_offline_mode(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    done = subprocess.run(
        [sys.executable, "-c", WANDB_RUN, str(tmp_path)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "UserError: wandb cannot start" in done.stderr.splitlines()[-1]
    assert "WANDB_MODE=offline" in done.stderr.splitlines()[-1]


def test_swanlab_offline_keeps_the_run_in_the_run_directory_and_resumes_under_one_id(tmp_path, monkeypatch):
    pytest.importorskip("swanlab", reason="swanlab has no extra: it asks for an older protobuf than the rest")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    for resume in (False, True):
        tracker = make_tracker("swanlab", run_dir=tmp_path, run_name="first", config={"seed": 42}, resume=resume)
        tracker.log({"loss": 2.5}, step=20 if resume else 10)
        tracker.finish()
        time.sleep(1.1)  # its directories are named by the second
    run_id = (tmp_path / "swanlab_id.txt").read_text().strip()
    files = list((tmp_path / "swanlog").glob(f"run-*/run-{run_id}.swanlab"))
    assert len(files) == 2
    assert all(b"loss" in file.read_bytes() for file in files)
