"""scripts/inspect_batch.py shows what training sees: equal to the batches of a run, and readable."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minigpt_jax.cli import parse
from minigpt_jax.config import TrainConfig
from minigpt_jax.data.batching import BatchSource
from minigpt_jax.data.cache import build_token_cache, write_token_cache
from minigpt_jax.data.documents import encoding_of
from minigpt_jax.data.inspection import describe_row, inspect_data, render_row, visible_tokens
from minigpt_jax.data.pairs import PairSource
from minigpt_jax.errors import UserError
from minigpt_jax.tokenizer import BOS, EOS, load_tokenizer

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "inspect_batch.py"
QUESTION = {"role": "user", "content": "Which river is longer? 请回答"}


def conversation(*answers):
    return [message for answer in answers for message in (QUESTION, {"role": "assistant", "content": answer})]


RECORDS = {
    "pretrain": [{"text": "春眠不觉晓，处处闻啼鸟。"}, {"text": "the cat " * 40}, {"text": f"half {EOS} open"}],
    "sft": [
        {"conversations": conversation("The Nile.")},
        {"conversations": conversation("Yes.", "No, 不是。", "words " * 30)},
        {"conversations": [{"role": "system", "content": "Be brief. " * 30}, *conversation("Never reached.")]},
    ],
    "dpo": [
        {"chosen": conversation("The Nile, 尼罗河。"), "rejected": conversation("No idea, " * 20)},
        {"chosen": conversation("Yes."), "rejected": conversation("No.")},
    ],
}
STAGES = {"pretrain": "pretrain", "sft": "sft", "lora": "sft", "dpo": "dpo", "distill": "sft"}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture
def files(tmp_path):
    for form, records in RECORDS.items():
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        (tmp_path / f"{form}.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def rows_of(files, tokenizer, stage, index=None, **options):
    config = TrainConfig(stage=stage, **options)
    return inspect_data(files / f"{STAGES[stage]}.jsonl", tokenizer, config, index=index)


def learned_text(row, tokenizer):
    return tokenizer.decode([id for id, weight in zip(row.ids, row.loss_weights, strict=True) if weight])


def trained_rows(files, tokenizer, stage, *, chat_mask, max_seq_len):
    """(ids, weights) of every row of a run's batches, padding left out, in the order of the documents."""
    form = STAGES[stage]
    encoding = encoding_of(form, tokenizer, chat_mask=chat_mask)
    cache = build_token_cache([files / f"{form}.jsonl"], tokenizer, cache_root=files / "cache", encoding=encoding)
    documents = np.arange(0, cache.num_documents, 2 if stage == "dpo" else 1)
    make = PairSource if stage == "dpo" else BatchSource
    source = make(
        cache, documents, batching="padded", batch_size=1, max_seq_len=max_seq_len, seed=None, num_epochs=1
    )  # fmt: skip
    rows = []
    for batch in source:
        for row in range(len(batch.tokens)):
            real = batch.segment_ids[row] > 0
            ids = [int(batch.tokens[row, 0]), *batch.targets[row, real].tolist()]
            rows.append((ids, [0.0, *batch.loss_weights[row, real].tolist()]))
    return rows


@pytest.mark.parametrize("max_seq_len", [24, 512])
@pytest.mark.parametrize("stage", STAGES)
def test_rows_are_those_that_training_makes(files, tokenizer, stage, max_seq_len):
    mask = "assistant" if stage == "pretrain" else "minimind"
    rows = rows_of(files, tokenizer, stage, chat_mask=mask, max_seq_len=max_seq_len)
    expected = trained_rows(files, tokenizer, stage, chat_mask=mask, max_seq_len=max_seq_len)
    assert sorted((row.ids, row.loss_weights) for row in rows) == sorted(expected)


def test_a_text_is_learned_but_for_its_first_token(files, tokenizer):
    (row,) = rows_of(files, tokenizer, "pretrain", 0)
    assert row.loss_weights == [0.0] + [1.0] * (len(row.ids) - 1)
    assert tokenizer.decode(row.ids) == BOS + RECORDS["pretrain"][0]["text"] + EOS


def test_weights_are_the_mask_of_the_token_cache(files, tokenizer):
    (row,) = rows_of(files, tokenizer, "sft", 1)
    encoding = encoding_of("sft", tokenizer, chat_mask="assistant")
    cache = build_token_cache([files / "sft.jsonl"], tokenizer, cache_root=files / "cache", encoding=encoding)
    place = slice(cache.starts[1], cache.starts[1] + cache.lengths[1])
    assert row.loss_weights == cache.supervised[place].tolist()
    assert row.ids == cache.tokens[place].tolist()


def test_a_conversation_is_cut_to_one_row_and_its_target(files, tokenizer):
    (whole,) = rows_of(files, tokenizer, "sft", 1)
    (cut,) = rows_of(files, tokenizer, "sft", 1, max_seq_len=30)
    assert (cut.ids, cut.loss_weights) == (whole.ids[:31], whole.loss_weights[:31])
    assert cut.note == f"cut: {len(whole.ids) - 31} more tokens do not fit in a row"


def test_a_conversation_without_an_answer_in_its_row_is_said_to_be_left_out(files, tokenizer):
    (row,) = rows_of(files, tokenizer, "sft", 2, max_seq_len=30)
    assert row.num_learned == 0
    assert "training leaves it out" in describe_row(row)


def test_a_long_text_goes_on_in_the_next_row(files, tokenizer):
    first, *_, last = rows_of(files, tokenizer, "pretrain", 1, max_seq_len=24)
    assert (first.part[:9], first.note, first.ids[-1] != tokenizer.eos_id) == ("row 1 of ", "", True)
    assert last.ids[-1] == tokenizer.eos_id


def test_the_minimind_mask_learns_the_newline_after_the_end_mark(files, tokenizer):
    ours, theirs = (
        learned_text(rows_of(files, tokenizer, "sft", 0, chat_mask=mask)[0], tokenizer)
        for mask in ("assistant", "minimind")
    )
    assert (ours, theirs) == (f"The Nile.{EOS}", f"The Nile.{EOS}\n")


def test_a_pair_is_its_chosen_side_and_then_its_rejected_one(files, tokenizer):
    rows = rows_of(files, tokenizer, "dpo", 1)
    assert [(row.part, learned_text(row, tokenizer)) for row in rows] == [
        ("chosen", f"Yes.{EOS}"),
        ("rejected", f"No.{EOS}"),
    ]


def test_a_pair_that_training_leaves_out_is_shown_as_that(files, tokenizer):
    pair = dict.fromkeys(("chosen", "rejected"), conversation("Yes."))
    (files / "equal.jsonl").write_text(json.dumps(pair) + "\n")
    rows = inspect_data(files / "equal.jsonl", tokenizer, TrainConfig(stage="dpo"), index=0)
    assert [row.note for row in rows] == ["both sides are equal, so training leaves the pair out"] * 2
    assert [row.num_learned for row in rows] == [0, 0]


@pytest.mark.parametrize("stage", ["pretrain", "sft", "dpo"])
def test_a_prepared_cache_shows_what_its_files_show(files, tokenizer, stage):
    source = files / f"{stage}.jsonl"
    encoding = encoding_of(stage, tokenizer, chat_mask="assistant")
    write_token_cache([source], tokenizer, directory=files / "prepared", encoding=encoding)
    config = TrainConfig(stage=stage)
    assert inspect_data(files / "prepared", tokenizer, config, index=1) == inspect_data(
        source, tokenizer, config, index=1
    )


def test_a_cache_of_another_mask_is_refused(files, tokenizer):
    encoding = encoding_of("sft", tokenizer, chat_mask="assistant")
    write_token_cache([files / "sft.jsonl"], tokenizer, directory=files / "prepared", encoding=encoding)
    with pytest.raises(UserError, match="another stage or mask"):
        inspect_data(files / "prepared", tokenizer, TrainConfig(stage="sft", chat_mask="minimind"), index=0)


def test_duplicates_keep_their_index(files, tokenizer):
    path = files / "sft.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text(lines[0] + "".join(lines), encoding="utf-8")
    (row,) = rows_of(files, tokenizer, "sft", 2)
    assert row.record.endswith("sft.jsonl:3")


# --- For people ---


def test_every_sign_of_a_token_can_be_seen(tokenizer):
    text = "a b\n\t\x1b[31m\u3000。"
    shown = "".join(visible_tokens(tokenizer.encode(text), tokenizer))
    assert shown == "a·b↵\\t\\x1b[31m\\xe3\\x80\\x80=\\u3000。"


def test_a_split_character_is_shown_by_its_bytes_and_then_whole(tokenizer):
    *first, last = visible_tokens(tokenizer.encode("龘"), tokenizer)
    assert first
    assert last.endswith("=龘")
    assert "".join([*first, last.removesuffix("=龘")]) == "\\xe9\\xbe\\x98"


def test_learned_tokens_are_green_or_in_brackets(files, tokenizer):
    (row,) = rows_of(files, tokenizer, "sft", 0)
    coloured = render_row(row, tokenizer, coloured=True)
    green = [coloured.plain[span.start : span.end] for span in coloured.spans if "green" in str(span.style)]
    assert "".join(green) == f"The·Nile.{EOS}"
    plain = render_row(row, tokenizer, coloured=False).plain
    bracketed = [part[1:-1] for part in plain.split() if part.startswith("[")]
    assert "".join(bracketed) == f"The·Nile.{EOS}"
    assert plain.startswith(f"{BOS} ")


def run(arguments):
    """The command in this process, as a mistake is raised."""
    script = runpy.run_path(str(SCRIPT))
    script["main"](parse(script["Command"], arguments))


def test_the_command_prints_the_tokens_and_writes_their_weights(files, capsys):
    target = files / "rows.json"
    run(["--stage", "dpo", "--data", str(files / "dpo.jsonl"), "--index", "1", "--json", str(target)])
    assert f"[{EOS}]" in capsys.readouterr().out
    chosen, rejected = json.loads(target.read_text(encoding="utf-8"))
    assert len(chosen["ids"]) == len(chosen["loss_weights"]) == len(chosen["tokens"])
    assert (chosen["part"], rejected["part"], chosen["loss_weights"][0]) == ("chosen", "rejected", 0)


def test_the_command_takes_the_mask_that_it_is_told(files, capsys):
    run(["--stage", "sft", "--data", str(files / "sft.jsonl"), "--index", "0", "--chat-mask", "minimind"])
    assert f"[{EOS}] [↵]" in capsys.readouterr().out


def test_without_data_the_first_records_of_the_sample_are_shown(run_environment, capsys):
    run(["--stage", "lora"])
    shown = capsys.readouterr().out
    assert [f"sft.jsonl:{line}:" in shown for line in (1, 2, 3, 4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "pretrain.jsonl", "--index", "3"], "--index 3: pretrain.jsonl has records 0 to 2"),
        (["--data", "pretrain.jsonl", "--index", "-1"], "--index must be at least 0, got -1"),
        (["--data", "bad.jsonl"], "bad.jsonl:2"),
        (["--data", "pretrain.jsonl", "--chat-mask", "minimind"], "--chat-mask is for --stage sft"),
    ],
)
def test_a_mistake_is_named(files, monkeypatch, arguments, message):
    (files / "bad.jsonl").write_text('{"text": "good"}\n{"text": \n')
    monkeypatch.chdir(files)
    with pytest.raises(UserError, match=message):
        run(arguments)


def test_a_mistake_gives_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, str(SCRIPT), "--data", "missing.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: cannot read missing.jsonl")
    assert len(done.stderr.splitlines()) == 1
