"""A whole run in this process: what it leaves behind, and what happens when something goes wrong in it."""

import dataclasses
import errno
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from small_runs import (
    events,
    failing,
    poisoned,
    saved_arrays,
    small_config,
    state_digest,
    timeless_metrics,
    train,
    write_documents,
)

from minigpt_jax.engine import JaxEngine
from minigpt_jax.errors import UserError
from minigpt_jax.tokenizer import Tokenizer
from minigpt_jax.tracking import METRIC_NAMES

pytestmark = pytest.mark.usefixtures("run_environment")


# --- what a run leaves ---


def test_a_run_leaves_a_self_contained_directory(tmp_path):
    result = train(small_config(tmp_path))
    names = {path.name for path in result.directory.iterdir()}
    assert names == {
        "config.json", "tokenizer", "metrics.jsonl", "metrics.csv", "events.jsonl", "checkpoints", "best", "loss.png",
        "report.html",
    }  # fmt: skip
    assert result.ending == "finished"
    assert (result.directory / "best").resolve().is_dir()


def test_every_metric_has_a_name_of_the_one_list_and_is_finite(tmp_path):
    result = train(small_config(tmp_path))
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    of_other_stages = ("reward", "cross_entropy", "divergence", "supervised_tokens_per_second")
    expected = {name for name in METRIC_NAMES if not name.endswith(of_other_stages) and "reward" not in name}
    assert {name for line in lines for name in line} == expected
    assert all(np.isfinite(value) for line in lines for value in line.values())


def test_the_loss_falls(tmp_path):
    result = train(small_config(tmp_path, steps=40, save_interval=40, eval_interval=40))
    lines = timeless_metrics(result.directory)
    assert lines[-1]["val_loss"] < lines[0]["val_loss"] - 1


def test_tokens_of_an_epoch_are_the_predictions_of_its_documents(tmp_path):
    result = train(small_config(tmp_path, epochs=1.0, val_data=(str(write_documents(tmp_path / "val.jsonl", 5)),)))
    from minigpt_jax.tokenizer import load_tokenizer

    tokenizer = load_tokenizer()
    texts = [json.loads(line)["text"] for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    assert timeless_metrics(result.directory)[-1]["tokens"] == sum(len(tokenizer.encode(text)) + 1 for text in texts)


@pytest.mark.parametrize("batching", ["padded", "bucketed"])
def test_other_batchings_train_to_the_end(tmp_path, batching):
    result = train(small_config(tmp_path, epochs=1.0, batching=batching))
    assert result.ending == "finished"
    assert timeless_metrics(result.directory)[-1]["epoch"] == 1


def test_a_window_that_the_data_ends_early_is_flushed(tmp_path):
    config = small_config(tmp_path, epochs=1.0, accumulation_steps=4)
    result = train(config)
    last = timeless_metrics(result.directory)[-1]
    micro_batches = len(events_of_micro_batches(result.directory))
    assert micro_batches % 4 != 0
    assert last["step"] == -(-micro_batches // 4)


def events_of_micro_batches(run: Path) -> range:
    """Numbers of the micro-batches of the run, from the newest checkpoint's progress."""
    from minigpt_jax.checkpoint import CheckpointStore

    store = CheckpointStore(run / "checkpoints", keep=100)
    progress = store.progress(store.steps[-1])
    store.close()
    return range(progress["micro_batches"])


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path):
    class BestAtFour(JaxEngine):
        """Its third validation, of step 4, is the best by far."""

        validations = 0

        def evaluate(self, batches):
            found = super().evaluate(batches)
            self.validations += 1
            return dataclasses.replace(found, loss_sum=found.loss_sum * (1 + abs(self.validations - 3)))

    result = train(small_config(tmp_path, steps=12, keep_checkpoints=2), BestAtFour)
    kept = {int(path.name) for path in (result.directory / "checkpoints").iterdir() if path.name.isdigit()}
    validated = {line["step"]: line["val_loss"] for line in timeless_metrics(result.directory) if "val_loss" in line}
    best = min((step for step in validated if step > 0), key=lambda step: validated[step])
    assert best == 4
    assert kept == {10, 12, best}
    assert int((result.directory / "best").resolve().name) == best


def test_checkpoints_hold_float32_under_bfloat16_compute(tmp_path):
    result = train(small_config(tmp_path, dtype="bfloat16"))
    saved = saved_arrays(result.directory, 6).values()
    floats = [leaf.dtype for leaf in saved if jax.numpy.issubdtype(leaf.dtype, np.floating)]
    assert set(floats) == {np.dtype(np.float32)}


# --- resume ---


@pytest.mark.parametrize("micro_batch", [3, 6])
def test_an_interrupted_run_resumes_bit_for_bit_inside_a_window_too(tmp_path, micro_batch):
    options = {"accumulation_steps": 3, "dropout": 0.1, "log_interval": 2}
    whole = train(small_config(tmp_path, out=str(tmp_path / "whole"), **options))
    config = small_config(tmp_path, **options)
    first = train(config, stop_at=micro_batch)
    assert first.ending == "interrupted"
    second = train(dataclasses.replace(config, resume=True))
    assert state_digest(second.directory, 6) == state_digest(whole.directory, 6)
    assert timeless_metrics(second.directory) == timeless_metrics(whole.directory)


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    config = small_config(tmp_path)
    result = train(config)
    files = [path for path in result.directory.rglob("*") if path.is_file()]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    again = train(dataclasses.replace(config, resume=True))
    assert again.ending == "finished"
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 1e-3}, "--learning-rate 0.003, not 0.001"),
        ({"model": "minimind2-small"}, "--model tiny, not minimind2-small"),
        ({"steps": 9}, "--steps 6, not 9"),
        ({"seed": 1}, "--seed 42, not 1"),
    ],
)
def test_a_resumed_run_cannot_become_another_run(tmp_path, change, message):
    config = small_config(tmp_path)
    train(config, stop_at=2)
    with pytest.raises(UserError, match=message):
        train(dataclasses.replace(config, resume=True, **change))


def test_a_run_whose_data_changed_is_not_resumed(tmp_path):
    config = small_config(tmp_path)
    train(config, stop_at=2)
    write_documents(tmp_path / "data.jsonl", 61)
    with pytest.raises(UserError, match="training data or tokenizer changed"):
        train(dataclasses.replace(config, resume=True))


def test_intervals_may_change_on_resume(tmp_path):
    config = small_config(tmp_path)
    train(config, stop_at=2)
    result = train(dataclasses.replace(config, resume=True, log_interval=3))
    assert result.ending == "finished"


def test_a_run_interrupted_in_its_last_update_finishes_and_stays_finished(tmp_path):
    config = small_config(tmp_path)
    assert train(config, stop_at=5).ending == "finished"
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    train(dataclasses.replace(config, resume=True))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_run_that_died_before_its_first_checkpoint_starts_again_on_resume(tmp_path):
    whole = train(small_config(tmp_path, out=str(tmp_path / "whole")))
    config = small_config(tmp_path)
    with pytest.raises(RuntimeError, match="power cut"):
        train(config, failing(RuntimeError("power cut"), after=1))
    resumed = train(dataclasses.replace(config, resume=True))
    assert state_digest(resumed.directory, 6) == state_digest(whole.directory, 6)
    assert timeless_metrics(resumed.directory) == timeless_metrics(whole.directory)


@pytest.mark.parametrize("place", [3, 4])  # the first after checkpoint 3, whose event has that step, and the next
def test_a_skipped_micro_batch_is_told_once_however_often_the_run_resumes(tmp_path, place):
    config = small_config(tmp_path, save_interval=3, eval_interval=3)
    bad = poisoned(lambda index: index == place)
    with pytest.raises(RuntimeError, match="power cut"):
        train(config, failing(RuntimeError("power cut"), after=5, engine=bad))
    run = train(dataclasses.replace(config, resume=True), bad).directory
    assert len(events(run, "skipped micro-batch")) == 1


def test_nothing_to_resume_is_said(tmp_path):
    with pytest.raises(UserError, match="nothing to resume"):
        train(small_config(tmp_path, resume=True))


def test_a_run_is_not_overwritten(tmp_path):
    config = small_config(tmp_path)
    train(config)
    with pytest.raises(UserError, match="already holds a run: add --resume"):
        train(config)


def test_a_new_run_can_start_from_the_best_weights_of_another(tmp_path):
    first = train(small_config(tmp_path, steps=20, eval_interval=10, save_interval=10))
    second = train(small_config(tmp_path, out=str(tmp_path / "second"), init_from=str(first.directory)))
    best = min(line["val_loss"] for line in timeless_metrics(first.directory) if "val_loss" in line)
    assert timeless_metrics(second.directory)[0]["val_loss"] == pytest.approx(best, rel=1e-6)


def test_weights_of_another_shape_are_refused(tmp_path):
    first = train(small_config(tmp_path))
    with pytest.raises(UserError, match=r"holds another model \(num_layers 1, not 3\)"):
        train(small_config(tmp_path, out=str(tmp_path / "second"), init_from=str(first.directory), num_layers=3))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    config = small_config(tmp_path)
    run = train(config, stop_at=2).directory
    other = small_config(tmp_path, out=str(tmp_path / "other"), hidden_size=64)
    foreign = train(other, stop_at=2).directory
    (run / "checkpoints").rename(tmp_path / "away")
    (foreign / "checkpoints").rename(run / "checkpoints")
    with pytest.raises(UserError, match="is damaged or of another model"):
        train(dataclasses.replace(config, resume=True))


# --- what goes wrong ---


def test_a_micro_batch_that_is_not_finite_is_skipped_and_its_records_are_named(tmp_path):
    result = train(small_config(tmp_path), poisoned(lambda index: index == 2))
    (event,) = events(result.directory, "skipped micro-batch")
    assert event["reason"] == "not finite"
    assert event["records"]
    assert all(record.startswith(str(tmp_path / "data.jsonl:")) for record in event["records"])
    assert result.step == 6
    assert timeless_metrics(result.directory)[-1]["skipped_steps"] == 1


def test_a_skipped_micro_batch_leaves_a_run_as_if_it_had_never_been(tmp_path):
    config = small_config(tmp_path, accumulation_steps=2, steps=3)

    class WithoutTheThird(JaxEngine):
        """Trains on every micro-batch but number 2, which it never sees."""

        def train_step(self, batch):
            if batch.index == 2:
                batch = dataclasses.replace(batch, loss_weights=np.zeros_like(batch.loss_weights))
            return super().train_step(batch)

    run = train(config, poisoned(lambda index: index == 2)).directory
    other = dataclasses.replace(config, out=str(tmp_path / "other"))
    assert state_digest(run, 3) == state_digest(train(other, WithoutTheThird).directory, 3)


def test_a_run_stops_with_its_last_good_state_when_nothing_is_finite(tmp_path):
    config = small_config(tmp_path, max_non_finite_steps=3)
    result = train(config, poisoned(lambda index: index >= 3))
    assert result.ending == "not finite"
    good = train(dataclasses.replace(config, out=str(tmp_path / "good")), stop_at=2).directory
    assert state_digest(result.directory, 3) == state_digest(good, 3)


def test_a_run_can_roll_back_and_go_on_with_half_the_rate(tmp_path):
    config = small_config(
        tmp_path, max_non_finite_steps=2, on_non_finite="rollback", warmup_steps=0, schedule="constant"
    )
    result = train(config, poisoned(lambda index: index in (3, 4)))
    assert result.ending == "finished"
    (event,) = events(result.directory, "rolled back")
    assert (event["step"], event["learning_rate_scale"]) == (2, 0.5)
    rates = {line["step"]: line.get("learning_rate") for line in timeless_metrics(result.directory)}
    assert (rates[2], rates[3]) == (pytest.approx(3e-3), pytest.approx(1.5e-3))


def test_a_restored_state_is_trained_by_the_step_that_was_compiled_for_a_fresh_one(tmp_path, caplog):
    config = small_config(tmp_path, max_non_finite_steps=2, on_non_finite="rollback")
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        result = train(config, poisoned(lambda index: index in (3, 4)))
    assert events(result.directory, "rolled back")
    compiled = [line for line in caplog.messages if line.startswith("Finished XLA compilation of jit(step)")]
    assert len(compiled) == 2  # one to train, one to validate


def test_every_rollback_halves_the_rate_until_the_run_stops(tmp_path):
    config = small_config(tmp_path, epochs=1.0, max_non_finite_steps=1, on_non_finite="rollback", save_interval=2)
    result = train(config, poisoned(lambda index: index >= 3))
    assert result.ending == "not finite"
    scales = [event["learning_rate_scale"] for event in events(result.directory, "rolled back")]
    assert scales == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64]


def test_bad_lines_that_were_skipped_are_said_with_their_place(tmp_path, capsys):
    config = small_config(tmp_path, skip_bad_lines=True)
    with (tmp_path / "data.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": 3}\n')
    train(config)
    assert f"first at {tmp_path / 'data.jsonl'}:61" in capsys.readouterr().out


def test_a_shape_asked_for_beside_init_from_is_not_ignored(tmp_path):
    first = train(small_config(tmp_path)).directory
    options = {"init_from": str(first), "model": None, "num_layers": None, "hidden_size": 64}
    with pytest.raises(UserError, match="hidden_size 32, not 64"):
        train(small_config(tmp_path, out=str(tmp_path / "second"), **options))


def test_weights_that_would_not_be_finite_are_not_taken(tmp_path):
    config = small_config(tmp_path, max_non_finite_steps=2, warmup_steps=0)

    class Exploding(JaxEngine):
        """From micro-batch 2 on, the rate is so high that every update overflows."""

        def train_step(self, batch):
            if batch.index == 2:
                self.set_learning_rate_scale(1e38)
                self._state = self.state._replace(learning_rate_scale=self.state.learning_rate_scale * 1e3)
            return super().train_step(batch)

    result = train(config, Exploding)
    assert (result.ending, result.step) == ("not finite", 2)
    saved = saved_arrays(result.directory, 2)
    assert all(np.isfinite(leaf).all() for path, leaf in saved.items() if path.startswith("parameters."))


def test_a_damaged_checkpoint_is_named_with_what_to_do(tmp_path):
    config = small_config(tmp_path)
    run = train(config, stop_at=4).directory
    newest = max(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())
    (run / "checkpoints" / str(newest) / "_CHECKPOINT_METADATA").unlink()
    with pytest.raises(UserError, match=f"{newest} is damaged; delete it to continue from an older one"):
        train(dataclasses.replace(config, resume=True))


def test_validation_text_that_is_trained_on_as_well_is_said(tmp_path, capsys):
    train(small_config(tmp_path, val_data=(str(write_documents(tmp_path / "data.jsonl")),)))
    assert "60 of the validation documents are in the training data as well" in capsys.readouterr().out


def test_a_token_outside_the_vocabulary_is_refused(tmp_path):
    from minigpt_jax.data.cache import write_token_cache
    from minigpt_jax.tokenizer import load_tokenizer

    config = small_config(tmp_path, data=(str(tmp_path / "cache"),))
    write_token_cache([write_documents(tmp_path / "d.jsonl")], load_tokenizer(), directory=tmp_path / "cache")
    tokens = tmp_path / "cache" / "tokens.bin"
    tokens.write_bytes(b"\xff" * tokens.stat().st_size)
    with pytest.raises(UserError, match="is damaged: it has token 65535"):
        train(config)


def test_a_full_disk_is_one_sentence(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(UserError, match=r"cannot write .*: No space left on device"):
        train(small_config(tmp_path), failing(full, after=3))


def test_too_little_memory_is_one_sentence_with_advice(tmp_path):
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")
    advice = r"out of memory with 2 rows .*last checkpoint is step 4.*halve --batch-size"
    with pytest.raises(UserError, match=advice):
        train(small_config(tmp_path), failing(error, after=4))


def test_a_vocabulary_larger_than_the_models_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    from minigpt_jax import config

    small = dataclasses.replace(config.PRESETS["tiny"], vocab_size=100)
    monkeypatch.setitem(config.PRESETS, "tiny", small)
    with pytest.raises(UserError, match="tokenizer has 6400 entries but the model's vocabulary only 100"):
        train(small_config(tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_mistake_in_the_data_leaves_no_run_directory(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(UserError, match=r"data\.jsonl:1"):
        train(small_config(tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_cannot_be_filled_is_not_left(tmp_path, monkeypatch):
    def refuse(self, directory):
        raise UserError(f"cannot write the tokenizer to {directory}: No space left on device")

    monkeypatch.setattr(Tokenizer, "save", refuse)
    config = small_config(tmp_path)
    with pytest.raises(UserError, match="No space left"):
        train(config)
    assert not (tmp_path / "run").exists()
