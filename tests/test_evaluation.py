"""Held-out loss: exact on models that are known, and the one that training prints."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from known_scorers import TableScorer

from minigpt_jax.data.documents import ChatEncoding
from minigpt_jax.data.records import Record, expand_paths
from minigpt_jax.errors import UserError
from minigpt_jax.evaluation import evaluate_loss
from minigpt_jax.languages import language_of
from minigpt_jax.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer()
ENGLISH, CHINESE = "The cat sat on the mat and saw a bird.", "今天天气很好，我们去公园玩。"
CHAT = [{"role": "user", "content": "Who are you, and why?"}, {"role": "assistant", "content": "A small model."}]


def written(path, *records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def loss_of(*paths, scorer=None, max_seq_len=64, batch_size=4, on_progress=None):
    scorer = scorer or TableScorer(lambda _: 2.0)
    options = {"max_seq_len": max_seq_len, "batch_size": batch_size, "on_progress": on_progress}
    return evaluate_loss(expand_paths(paths), scorer=scorer, tokenizer=TOKENIZER, **options)


def test_a_uniform_model_has_the_loss_of_its_vocabulary(tmp_path):
    data = written(tmp_path / "a.jsonl", {"text": ENGLISH}, {"text": CHINESE})
    total = loss_of(data, scorer=TableScorer(lambda _: math.log(6400))).total
    tokens = sum(len(TOKENIZER.encode(text)) + 1 for text in (ENGLISH, CHINESE))  # the mark at the end counts
    assert total.tokens == tokens
    assert total.loss == pytest.approx(math.log(6400), rel=1e-14)
    assert total.perplexity == pytest.approx(6400, rel=1e-12)
    text_bytes = len((ENGLISH + CHINESE).encode("utf-8"))
    assert total.bits_per_byte == pytest.approx(tokens * math.log2(6400) / text_bytes, rel=1e-14)


def test_the_loss_is_a_mean_over_tokens_not_over_documents(tmp_path):
    costs = {id: number + 1.0 for number, id in enumerate(TOKENIZER.encode(ENGLISH))}
    data = written(tmp_path / "a.jsonl", {"text": ENGLISH}, {"text": "x"})
    total = loss_of(data, scorer=TableScorer(lambda id: costs.get(id, 0.0))).total
    ids = [*TOKENIZER.encode(ENGLISH), TOKENIZER.eos_id, *TOKENIZER.encode("x"), TOKENIZER.eos_id]
    assert total.nats == sum(costs.get(id, 0.0) for id in ids)
    assert total.loss == total.nats / len(ids)


@pytest.mark.parametrize("max_seq_len", [2, 7, 16, 500])
def test_every_token_counts_once_however_a_document_is_cut(tmp_path, max_seq_len):
    data = written(tmp_path / "a.jsonl", {"text": " ".join([ENGLISH] * 20)}, {"text": CHINESE})
    found = loss_of(data, scorer=TableScorer(lambda id: id % 13), max_seq_len=max_seq_len, batch_size=3)
    whole = loss_of(data, scorer=TableScorer(lambda id: id % 13), max_seq_len=5000)
    assert found == whole


def test_the_parts_add_up_to_the_whole(tmp_path):
    first = written(tmp_path / "a.jsonl", {"text": ENGLISH}, {"text": CHINESE}, {"text": "1 + 1 = 2"})
    second = written(tmp_path / "b.jsonl", {"conversations": CHAT})
    report = loss_of(first, second, scorer=TableScorer(lambda id: id % 13))
    assert list(report.by_source) == [str(first), str(second)]
    assert set(report.by_language) == {"en", "zh", "other"}
    for groups in (report.by_source, report.by_language):
        assert sum(sums.nats for sums in groups.values()) == pytest.approx(report.total.nats, rel=1e-14)
        assert sum(sums.tokens for sums in groups.values()) == report.total.tokens
        assert sum(sums.text_bytes for sums in groups.values()) == report.total.text_bytes
    assert report.by_language["other"].tokens == len(TOKENIZER.encode("1 + 1 = 2")) + 1


def test_of_a_conversation_only_what_is_learned_counts(tmp_path):
    data = written(tmp_path / "a.jsonl", {"conversations": CHAT})
    total = loss_of(data).total
    ((document,),) = ChatEncoding(TOKENIZER).encode([Record(data, 1, {"conversations": CHAT})])
    assert total.tokens == np.count_nonzero(document.supervised) < len(document.ids)
    assert total.text_bytes == len("A small model.")


def test_duplicates_are_not_left_out(tmp_path):
    once, twice = (written(tmp_path / f"{count}.jsonl", *[{"text": ENGLISH}] * count) for count in (1, 2))
    assert loss_of(twice).total.tokens == 2 * loss_of(once).total.tokens


def test_progress_ends_at_the_size_of_the_files(tmp_path):
    data, told = written(tmp_path / "a.jsonl", *[{"text": ENGLISH}] * 9), []
    loss_of(data, on_progress=lambda *numbers: told.append(numbers))
    assert told[-1] == (data.stat().st_size, data.stat().st_size)
    assert len(told) == 3


# --- Languages ---


@pytest.mark.parametrize(
    ("text", "language"),
    [
        (ENGLISH, "en"),
        ("Où est la bibliothèque ?", "en"),
        (CHINESE, "zh"),
        ("用 Python 写一个排序函数", "zh"),
        ("3 + 4 等于几？", "zh"),
        ("Где находится библиотека?", "other"),
        ("ひらがなとカタカナだけのぶんしょう", "other"),
        ("1 + 1 = 2", "other"),
    ],
)
def test_a_script_tells_the_language(text, language):
    assert language_of(text) == language


# --- Mistakes ---


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"chosen": CHAT, "rejected": CHAT}', ":1: a pair of answers; the loss is that of"),
        ('{"txt": "a"}', ":1: neither text nor conversation; found txt; name the field text"),
        ('{"text": ""}', ":1: text is empty; delete the line"),
        ("", " is empty; it must hold"),
    ],
)
def test_data_that_has_no_loss_is_refused_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(line.replace("CHAT", json.dumps(CHAT)))
    with pytest.raises(UserError) as error:
        loss_of(path)
    assert str(error.value).startswith(f"{path}{message}")
    assert "--" not in str(error.value)


def test_conversations_in_which_nothing_is_learned_are_refused(tmp_path, monkeypatch):
    encode = ChatEncoding.encode

    def unmarked(self, records):
        (documents,) = encode(self, records)
        return [tuple(replace(document, supervised=np.zeros_like(document.supervised)) for document in documents)]

    monkeypatch.setattr(ChatEncoding, "encode", unmarked)
    data = written(tmp_path / "a.jsonl", {"conversations": CHAT})
    with pytest.raises(UserError, match="the chat template marks no token as the assistant's"):
        loss_of(data)
