"""Fine-tuning stages from end to end: what they train, what they leave alone, and that a resumed run is the same."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from small_runs import as_typed, events, saved_arrays, small_config, timeless_metrics, train

from minigpt_bridge.models import open_adapter, open_model, read_tree
from minigpt_jax.config import TrainConfig
from minigpt_jax.data.corpus import load_corpus
from minigpt_jax.defaults import resolve
from minigpt_jax.errors import UserError
from minigpt_jax.formats.names import flatten
from minigpt_jax.tokenizer import load_tokenizer

BACKENDS = ("jax", "torch")
STAGES = ("sft", "lora", "dpo", "distill")
WORDS = ["red", "blue", "green", "old", "new", "small", "large", "round"]


pytestmark = pytest.mark.usefixtures("run_environment", "as_it_was")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A pretrained run to start from, and files of conversations and of pairs beside it."""
    directory = tmp_path_factory.mktemp("base")
    train(small_config(directory, steps=2))
    write_lines(directory / "sft.jsonl", [{"conversations": conversation(number)} for number in range(24)])
    write_lines(directory / "dpo.jsonl", [pair(number) for number in range(24)])
    return directory


def conversation(number, answer=None):
    question = {"role": "user", "content": f"What is {WORDS[number % 8]} number {number}?"}
    words = WORDS[number % 8 :] if answer is None else [answer]
    return [question, {"role": "assistant", "content": " ".join(words)}]


def pair(number):
    return {"chosen": conversation(number), "rejected": conversation(number, answer="no idea at all")}


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def config_of(base, out, stage, backend="jax", **changes):
    fields = {
        "stage": stage,
        "backend": backend,
        "data": (str(base / ("dpo.jsonl" if stage == "dpo" else "sft.jsonl")),),
        "out": str(out),
        "init_from": str(base / "run"),
        "model": None,
        "hidden_size": None,
        "num_layers": None,
        "max_seq_len": 48,
    }
    if stage == "distill":
        fields |= {"teacher": str(base / "run"), "init_from": None, "model": "tiny", "hidden_size": 16, "num_layers": 1}
    return small_config(base, **(fields | changes))


# --- Every stage, in both frameworks ---


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_is_interrupted_and_resumed_ends_bit_for_bit_where_the_whole_run_ends(
    base, tmp_path, stage, backend
):
    options = {"steps": 4, "accumulation_steps": 2, "dropout": 0.1}
    whole = train(config_of(base, tmp_path / "whole", stage, backend, **options)).directory
    config = config_of(base, tmp_path / "parts", stage, backend, **options)
    assert train(config, stop_at=4).ending == "interrupted"
    parts = train(dataclasses.replace(config, resume=True)).directory
    one, other = saved_arrays(whole, 4), saved_arrays(parts, 4)
    assert one.keys() == other.keys()
    assert all(leaf.tobytes() == other[path].tobytes() for path, leaf in one.items())
    assert timeless_metrics(whole) == timeless_metrics(parts)


@pytest.mark.parametrize("stage", STAGES)
def test_both_frameworks_train_a_stage_alike(base, tmp_path, stage):
    ends = []
    for backend in BACKENDS:
        options = {"steps": 3, "dtype": "float64"} | ({"lora_dropout": 0.0} if stage == "lora" else {})
        ends.append(train(config_of(base, tmp_path / backend, stage, backend, **options)).directory)
    for one, other in zip(*map(timeless_metrics, ends), strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


def test_a_run_started_from_a_model_that_died_before_its_first_checkpoint_starts_from_that_model_again(base, tmp_path):
    whole = train(config_of(base, tmp_path / "whole", "sft", steps=2)).directory
    config = config_of(base, tmp_path / "died", "sft", steps=2)
    train(config, stop_at=0)
    shutil.rmtree(tmp_path / "died" / "checkpoints")
    train(dataclasses.replace(config, resume=True))
    assert timeless_metrics(whole) == timeless_metrics(tmp_path / "died")


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        ("sft", {"init_from": None}, "--stage sft starts from a model: name it with --init-from"),
        ("lora", {"init_from": None}, "--stage lora starts from a model: name it with --init-from"),
        ("dpo", {"init_from": None}, "--stage dpo starts from a model: name it with --init-from"),
        ("distill", {"teacher": None}, "--stage distill learns from a model: name it with --teacher"),
        ("lora", {"lora_rank": 33}, "rank 33 is larger than a side of layers.0"),
    ],
)
def test_what_a_stage_cannot_do_without_is_asked_for_before_anything_is_written(
    base, tmp_path, stage, changes, message
):
    with pytest.raises(UserError, match=message):
        train(config_of(base, tmp_path / "run", stage, **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stage": "sft", "lora_rank": 4}, "--lora-rank is for --stage lora, not sft"),
        ({"stage": "pretrain", "mix_data": ("a",)}, "--mix-data is for --stage sft or lora or distill, not pretrain"),
        ({"stage": "pretrain", "mix_fraction": 0.5}, "--mix-fraction is for --stage sft or lora or distill"),
        ({"stage": "sft", "mix_fraction": 0.5}, "--mix-fraction is a part of --mix-data, which is not given"),
        ({"stage": "distill", "teacher": ""}, "--teacher is an empty name"),
        ({"stage": "lora", "teacher": "a"}, "--teacher is for --stage distill, not lora"),
        ({"stage": "dpo", "batching": "packed"}, "--batching packed is not for --stage dpo"),
        ({"stage": "dpo", "label_smoothing": 0.5}, "--label-smoothing must be 0 or more and below 0.5"),
        ({"stage": "lora", "lora_targets": ("q_proj", "head")}, "LoRA targets: there is no 'head'"),
    ],
)
def test_an_option_of_another_stage_is_refused_rather_than_ignored(fields, message):
    with pytest.raises(UserError, match=message):
        TrainConfig(**fields)


# --- LoRA ---


def test_an_adapter_run_saves_adapters_alone_and_is_told_from_a_model(base, tmp_path):
    directory = train(config_of(base, tmp_path / "run", "lora", steps=2)).directory
    saved = flatten(read_tree(directory / "checkpoints", 2, "parameters"))
    assert {path.rsplit(".", 1)[1] for path in saved} == {"lora_a", "lora_b"}
    moments = flatten(read_tree(directory / "checkpoints", 2, "optimizer")["first_moment"])
    assert moments.keys() == saved.keys()
    assert open_adapter(directory).lora == TrainConfig(stage="lora").lora
    with pytest.raises(UserError, match=r"holds adapters, not a model; make one .* --merge-lora"):
        open_model(directory)


def test_an_adapter_run_is_not_resumed_on_another_base(base, tmp_path):
    copied = tmp_path / "base"
    shutil.copytree(base / "run", copied)
    config = config_of(base, tmp_path / "run", "lora", init_from=str(copied))
    train(config, stop_at=3)
    shutil.rmtree(copied)
    train(small_config(base, out=str(copied), seed=1, steps=2))
    with pytest.raises(UserError, match=r"the weights of .* changed since .* cannot be resumed"):
        train(dataclasses.replace(config, resume=True))


# --- DPO ---


def test_the_first_dpo_loss_is_ln_2_and_a_copied_reference_trains_as_the_cached_one(base, tmp_path):
    ends = []
    for reference in ("cached", "copy"):
        options = {"reference": reference, "dtype": "float64", "steps": 3}
        ends.append(timeless_metrics(train(config_of(base, tmp_path / reference, "dpo", **options)).directory))
    assert ends[0][0]["val_loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert ends[0][-1]["loss"] < math.log(2)
    for one, other in zip(*ends, strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-9)


def test_a_dpo_run_without_its_reference_file_is_not_resumed(base, tmp_path):
    config = config_of(base, tmp_path / "run", "dpo")
    train(config, stop_at=3)
    (tmp_path / "run" / "reference.npz").write_bytes(b"PK damaged")
    with pytest.raises(UserError, match=r"reference.npz is missing or damaged"):
        train(dataclasses.replace(config, resume=True))


def test_a_reference_file_whose_numbers_changed_is_refused(base, tmp_path):
    config = config_of(base, tmp_path / "run", "dpo")
    train(config, stop_at=3)
    path = tmp_path / "run" / "reference.npz"
    with np.load(path) as arrays:
        halved = {name: arrays[name] / 2 if name == "training" else arrays[name] for name in arrays}
    np.savez(path, **halved)
    with pytest.raises(UserError, match="its training numbers are not those that were computed"):
        train(dataclasses.replace(config, resume=True))
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"reference.npz is missing or damaged"):
        train(dataclasses.replace(config, resume=True))


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_a_run_whose_validation_data_changed_is_not_resumed(base, tmp_path, stage):
    def records(numbers):
        return [pair(n) if stage == "dpo" else {"conversations": conversation(n)} for n in numbers]

    held_out = write_lines(tmp_path / "held_out.jsonl", records(range(100, 108)))
    config = config_of(base, tmp_path / "run", stage, val_data=(str(held_out),))
    train(config, stop_at=3)
    write_lines(held_out, records(range(200, 208)))
    with pytest.raises(UserError, match="the validation data or tokenizer changed"):
        train(dataclasses.replace(config, resume=True))


def test_validation_data_that_is_left_out_is_said(base, tmp_path):
    question = {"role": "user", "content": " ".join(WORDS * 20)}
    long = {"conversations": [question, {"role": "assistant", "content": "yes"}]}
    held_out = write_lines(tmp_path / "held_out.jsonl", [long, {"conversations": conversation(200)}])
    config = config_of(base, tmp_path, "sft", val_data=(str(held_out),), over_long="drop")
    assert "of the validation data 1 conversations longer than 49 tokens" in corpus_of(config).left_out
    write_lines(held_out, [long])
    with pytest.raises(UserError, match="the validation data has nothing to learn within --max-seq-len 48: 1 conv"):
        corpus_of(config)


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_no_more_than_every_position_is_real_where_the_last_batch_is_dropped(base, tmp_path, stage):
    options = {"batch_size": 7, "batching": "padded", "steps": None, "epochs": 1}
    whole, dropped = (
        corpus_of(config_of(base, tmp_path, stage, drop_last=drop, **options)).training for drop in (False, True)
    )
    assert len(dropped) < len(whole)
    assert dropped.real_fraction == whole.real_fraction <= 1


def corpus_of(config):
    tokenizer = load_tokenizer()
    return load_corpus(resolve(config, accelerator=None), tokenizer, model_vocab_size=tokenizer.vocab_size)


def test_rows_of_pairs_are_chosen_answers_and_then_rejected_ones(base, tmp_path):
    corpus = corpus_of(config_of(base, tmp_path, "dpo", epochs=1, steps=None, val_data=(str(base / "dpo.jsonl"),)))
    tokenizer, seen = load_tokenizer(), []
    for batch in corpus.training:
        half = len(batch.tokens) // 2
        for number in range(half):
            texts = []
            for row in (number, half + number):
                learned = batch.targets[row][batch.loss_weights[row] > 0]
                texts.append(tokenizer.decode(learned.tolist()))
            if batch.segment_ids[number].any():
                assert texts[0].startswith(tuple(WORDS))
                assert texts[1].startswith("no idea")
                seen.append(texts[0])
            else:
                assert texts == ["", ""]
    assert len(seen) == 24


def test_pairs_that_teach_nothing_are_left_out_and_counted(base, tmp_path):
    long_question = {"role": "user", "content": " ".join(WORDS * 20)}
    answers = ({"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"})
    silent = {"chosen": [long_question, answers[0]], "rejected": [long_question, answers[1]]}
    beginning = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " ".join(WORDS * 20)}]
    equal = {
        side: [*beginning, {"role": "user", "content": "And?"}, answer]
        for side, answer in zip(("chosen", "rejected"), answers, strict=True)
    }
    data = write_lines(tmp_path / "pairs.jsonl", [silent, equal, *map(pair, range(4))])
    options = {"data": (str(data),), "val_data": (str(base / "dpo.jsonl"),)}
    corpus = corpus_of(config_of(base, tmp_path, "dpo", **options))
    assert corpus.left_out == (
        "1 pairs with a side whose first 49 tokens have no answer, "
        "1 pairs whose sides are equal in their first 49 tokens"
    )
    dropped = corpus_of(config_of(base, tmp_path, "dpo", over_long="drop", **options))
    assert dropped.left_out == "2 pairs with a side longer than 49 tokens"


# --- Conversations ---


def learned_of(corpus, steps):
    """The learned tokens of the first `steps` micro-batches, each with the token before it."""
    found = []
    for index in range(steps):
        batch = corpus.training[index]
        learned = batch.loss_weights > 0
        found += list(zip(batch.tokens[learned].tolist(), batch.targets[learned].tolist(), strict=True))
    return sorted(found)


def test_every_batching_learns_the_same_tokens(base, tmp_path):
    found = []
    for batching in ("packed", "bucketed", "padded"):
        corpus = corpus_of(config_of(base, tmp_path, "sft", batching=batching, val_data=(str(base / "sft.jsonl"),)))
        found.append(learned_of(corpus, corpus.training.batches_per_epoch))
        assert len(found[-1]) == corpus.training.supervised_per_epoch
    assert found[0] == found[1] == found[2]


def test_nothing_but_answers_is_learned(base, tmp_path):
    corpus = corpus_of(config_of(base, tmp_path, "sft", val_data=(str(base / "sft.jsonl"),)))
    tokenizer = load_tokenizer()
    questions = {id for number in range(24) for id in tokenizer.encode(f"What is number {number}?")}
    answers = {id for word in WORDS for id in tokenizer.encode(f"{word} {word}")} | {tokenizer.eos_id}
    learned = {target for _, target in learned_of(corpus, corpus.training.batches_per_epoch)}
    assert learned <= answers
    assert not learned & (questions - answers)


def test_mixed_in_text_makes_up_the_part_that_was_asked_for(base, tmp_path):
    # A fraction is reached with the last text that it takes: a text here has up to 60 tokens.
    options = {"mix_data": (str(base / "data.jsonl"),), "mix_fraction": 0.5, "val_data": (str(base / "sft.jsonl"),)}
    mixed = corpus_of(config_of(base, tmp_path, "sft", **options)).training.supervised_per_epoch
    alone = corpus_of(config_of(base, tmp_path, "sft", val_data=options["val_data"])).training.supervised_per_epoch
    assert alone <= mixed - alone < alone + 60


def test_a_cache_of_another_stage_or_mask_is_refused(base, tmp_path):
    from minigpt_jax.data.prepare import prepare_data

    prepare_data([base / "sft.jsonl"], load_tokenizer(), stage="sft", out=tmp_path / "cache")
    assert corpus_of(config_of(base, tmp_path, "sft", data=(str(tmp_path / "cache"),))).training
    for stage, changes in (("sft", {"chat_mask": "minimind"}), ("dpo", {})):
        with pytest.raises(UserError, match="was prepared for another stage or mask"):
            corpus_of(config_of(base, tmp_path, stage, data=(str(tmp_path / "cache"),), **changes))


def test_prepared_pairs_are_measured_as_they_are_batched(base, tmp_path, monkeypatch):
    script = Path(__file__).resolve().parents[1] / "scripts" / "prepare_data.py"
    arguments = [
        str(base / "dpo.jsonl"),
        "--stage",
        "dpo",
        "--chat-mask",
        "minimind",
        "--out",
        "cache",
        "--json",
        "a.json",
    ]
    done = as_typed(script, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("scripts/train.py --stage dpo --init-from MODEL --chat-mask minimind --data cache\n")
    figures = json.loads((tmp_path / "a.json").read_text())
    options = {"data": (str(tmp_path / "cache"),), "chat_mask": "minimind", "batch_size": 1, "max_seq_len": 512}
    source = corpus_of(
        config_of(base, tmp_path, "dpo", batching="padded", val_data=(str(base / "dpo.jsonl"),), **options)
    ).training
    assert figures["pairs"] == 24
    assert figures["real_fraction"]["padded"] == pytest.approx(source.real_fraction, rel=1e-12)
    assert sorted(figures["real_fraction"]) == ["bucketed", "padded"]


def test_conversations_without_an_answer_within_a_row_are_an_error_that_says_so(base, tmp_path):
    question = {"role": "user", "content": " ".join(WORDS * 20)}
    records = [{"conversations": [question, {"role": "assistant", "content": f"{n}"}]} for n in range(3)]
    data = write_lines(tmp_path / "long.jsonl", records)
    with pytest.raises(UserError, match="the training data has nothing to learn within --max-seq-len 48"):
        corpus_of(config_of(base, tmp_path, "sft", data=(str(data),)))


def test_a_skipped_micro_batch_of_pairs_is_logged_with_its_records(base, tmp_path, monkeypatch):
    from minigpt_jax.engine import JaxEngine

    step = JaxEngine.train_step

    def poisoned(self, batch):
        if batch.index == 1:
            batch = dataclasses.replace(batch, reference=batch.reference * np.nan)
        return step(self, batch)

    monkeypatch.setattr(JaxEngine, "train_step", poisoned)
    directory = train(config_of(base, tmp_path / "run", "dpo", steps=2)).directory
    (event,) = events(directory, "skipped micro-batch")
    assert event["reason"] == "not finite"
    assert all("dpo.jsonl:" in record for record in event["records"])
