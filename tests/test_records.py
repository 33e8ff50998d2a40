"""Records: every kind of broken line is named by file and line, or counted; every good form is read."""

import gzip
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt_jax.data.records import ReadReport, expand_paths, iter_texts, read_records
from minigpt_jax.errors import UserError

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}
GOOD = {
    "pretrain": {"text": "once upon a time"},
    "sft": {"conversations": [USER, ANSWER]},
    "dpo": {"chosen": [USER, ANSWER], "rejected": [USER, {"role": "assistant", "content": "go away"}]},
}


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def chat(*messages):
    return {"conversations": list(messages)}


FAULTS = [
    ("pretrain", b"", "empty line"),
    ("pretrain", b"   ", "empty line"),
    ("pretrain", '{"text": "gr\u00fcn"}'.encode("latin-1"), "not UTF-8"),
    ("pretrain", '{"text": "x"}'.encode("utf-16"), "not UTF-8"),
    ("pretrain", b'{"text": "a" "b"}', "not JSON"),
    ("pretrain", b'\xef\xbb\xbf{"text": "a mark inside the file"}', "not JSON"),
    ("pretrain", b'{"text": ' + b"1" * 5000 + b"}", "not JSON"),
    ("pretrain", b"[" * 100_000, "nested too deeply"),
    ("pretrain", b'["text"]', "not an object"),
    ("pretrain", b"null", "not an object"),
    ("pretrain", {"content": "x"}, "no text field"),
    ("pretrain", GOOD["sft"], "no text field"),
    ("pretrain", {"text": None}, "text is null"),
    ("pretrain", {"text": 3}, "text is not a string"),
    ("pretrain", {"text": ["x"]}, "text is not a string"),
    ("pretrain", {"text": ""}, "text is empty"),
    ("pretrain", {"text": " \n\t\u3000"}, "text is empty"),
    ("pretrain", b'{"text": "half \\ud83d of a pair"}', "lone surrogate"),
    ("pretrain", b'{"text": "x", "\\uDC00": 1}', "lone surrogate"),
    ("sft", {"text": "x"}, "no conversations field"),
    ("sft", {"conversations": "hello"}, "conversations is not a list"),
    ("sft", {"conversations": None}, "conversations is not a list"),
    ("sft", chat(), "conversations is empty"),
    ("sft", chat("hello"), "message is not an object"),
    ("sft", chat({"role": "system", "content": "be kind"}), "only system messages"),
    ("sft", chat(ANSWER, USER, ANSWER), "assistant speaks first"),
    ("sft", chat({"role": "tool", "content": "x"}, ANSWER), "tool speaks first"),
    ("sft", chat(USER), "ends with user"),
    ("sft", chat(USER, ANSWER, {"role": "tool", "content": "x"}), "ends with tool"),
    ("sft", chat({"role": "human", "content": "hello"}, ANSWER), "unknown role"),
    ("sft", chat({"role": ["user"], "content": "hello"}, ANSWER), "unknown role"),
    ("sft", chat({"content": "hello"}, ANSWER), "unknown role"),
    ("sft", chat({"role": "user", "content": None}, ANSWER), "content is null"),
    ("sft", chat({"role": "user"}, ANSWER), "content is null"),
    ("sft", chat(USER, {"role": "assistant", "content": None}), "content is null"),
    ("sft", chat(USER, {"role": "assistant", "content": None, "tool_calls": []}), "content is null"),
    ("sft", chat(USER, {"role": "assistant", "content": 3}), "content is not a string"),
    ("sft", chat(USER, {"role": "assistant", "content": " "}), "assistant content is empty"),
    ("sft", chat({"role": "user", "content": " "}, ANSWER), "user content is empty"),
    ("sft", chat(USER, {**ANSWER, "reasoning_content": 3}), "reasoning_content is not a string"),
    ("sft", chat({"role": "system", "content": "", "tools": 3}, USER, ANSWER), "tools is not a string or list"),
    ("sft", chat(USER, {**ANSWER, "tool_calls": {}}, USER, ANSWER), "tool_calls is not a string or list"),
    ("sft", b'{"conversations": [{"role": "user", "content": "\\ud800"}]}', "lone surrogate"),
    ("dpo", {"chosen": [USER, ANSWER]}, "no rejected field"),
    ("dpo", {"rejected": [USER, ANSWER]}, "no chosen field"),
    ("sft", chat({**USER, "tools": [{"name": "f"}]}, ANSWER), "tools are not in the first system message"),
    (
        "sft",
        chat(USER, ANSWER, {"role": "system", "content": "", "tools": '[{"name": "f"}]'}, USER, ANSWER),
        "tools are not in the first system message",
    ),
    ("sft", {**chat(USER, ANSWER), "tools": [{"name": "f"}]}, "tools are beside conversations"),
    (
        "sft",
        chat({"role": "system", "content": "", "tools": '{"a": 1}'}, USER, ANSWER),
        "tools is not a string or list",
    ),
    ("sft", chat({"role": "system", "content": "", "tools": "[1]"}, USER, ANSWER), "a tool is not an object"),
    ("sft", chat({**USER, "tool_calls": [{"name": "f"}]}, ANSWER), "user has tool_calls"),
    ("sft", chat(USER, {"role": "assistant", "content": "", "tool_calls": "[]"}), "assistant content is empty"),
    ("sft", chat(USER, {"role": "assistant", "content": "", "tool_calls": "null"}), "assistant content is empty"),
    ("sft", chat(USER, {**ANSWER, "tool_calls": [{}]}), "a tool call has no name"),
    ("sft", chat(USER, {**ANSWER, "tool_calls": '[{"function": {"name": 5}}]'}), "a tool call has no name"),
    (
        "sft",
        chat(USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": 5}]}),
        "the arguments of a tool call are no object",
    ),
    ("sft", chat(USER, {**ANSWER, "tool_calls": '[{"name": "\\ud800"}]'}), "lone surrogate"),
    ("sft", chat(USER, {**ANSWER, "tool_calls": "[" * 100_000}), "nested too deeply"),
    ("sft", chat(USER, {**ANSWER, "note": nested(600)}), "nested too deeply"),
    ("dpo", {"chosen": [USER, ANSWER], "rejected": [USER]}, "ends with user"),
    (
        "dpo",
        {"chosen": [USER, ANSWER], "rejected": [{**USER, "content": "bye"}, ANSWER]},
        "chosen and rejected differ before the answer",
    ),
    (
        "dpo",
        {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER, USER, ANSWER]},
        "chosen and rejected differ before the answer",
    ),
]


def as_line(value) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode()


def write(path: Path, *values, end: bytes = b"\n") -> Path:
    path.write_bytes(b"".join(as_line(value) + end for value in values))
    return path


def texts(path: Path) -> list[str]:
    return [record.value["text"] for record in read_records([path], stage="pretrain")]


# --- Faults ---


@pytest.mark.parametrize(("stage", "line", "reason"), FAULTS)
def test_a_bad_line_is_named_by_file_line_and_reason(tmp_path, stage, line, reason):
    path = write(tmp_path / "data.jsonl", GOOD[stage], line, GOOD[stage])
    with pytest.raises(UserError) as error:
        list(read_records([path], stage=stage))
    assert str(error.value).startswith(f"{path}:2: {reason}; ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("stage", "line", "reason"), FAULTS)
def test_a_skipped_line_is_counted_by_reason(tmp_path, stage, line, reason):
    path = write(tmp_path / "data.jsonl", GOOD[stage], line, GOOD[stage], line)
    report = ReadReport()
    records = list(read_records([path], stage=stage, skip_bad_lines=True, report=report))
    assert [record.line for record in records] == [1, 3]
    assert report.skipped == Counter({reason: 2})
    assert report.examples == {reason: f"{path}:2"}


def test_a_cut_last_line_is_told_from_other_broken_json(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(as_line(GOOD["pretrain"]) + b'\n{"text": "once upo')
    with pytest.raises(UserError, match=re.escape(f"{path}:2: cut last line")):
        texts(path)


def test_a_file_cut_inside_a_character_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes('{"text": "中'.encode()[:-1])
    with pytest.raises(UserError, match=re.escape(f"{path}:1: not UTF-8")):
        texts(path)


def test_records_before_a_bad_line_are_delivered_before_it_is_read(tmp_path):
    path = write(tmp_path / "data.jsonl", {"text": "first"}, b"broken")
    records = read_records([path], stage="pretrain")
    assert next(records).value == {"text": "first"}
    with pytest.raises(UserError):
        next(records)


@settings(max_examples=50)
@given(st.binary(max_size=40) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(as_line))
def test_whatever_stands_in_a_line_is_a_record_or_a_user_error(line):
    with tempfile.TemporaryDirectory() as directory:
        path = write(Path(directory) / "data.jsonl", line)
        for stage in ("pretrain", "sft", "dpo"):
            with pytest.raises(UserError, match=r"data\.jsonl"):
                list(read_records([path], stage=stage))


# --- What is accepted ---


def test_a_byte_order_mark_at_the_start_is_dropped(tmp_path):
    path = write(tmp_path / "data.jsonl", b"\xef\xbb\xbf" + as_line({"text": "a"}))
    assert texts(path) == ["a"]


def test_crlf_and_a_missing_last_newline_are_accepted(tmp_path):
    path = write(tmp_path / "data.jsonl", {"text": "a"}, {"text": "b"}, end=b"\r\n")
    path.write_bytes(path.read_bytes().removesuffix(b"\r\n"))
    assert texts(path) == ["a", "b"]


def test_only_a_newline_byte_ends_a_line(tmp_path):
    text = "a\u2028b\u0085c\u000cd"
    assert texts(write(tmp_path / "data.jsonl", {"text": text}, {"text": "next"})) == [text, "next"]


def test_an_escaped_surrogate_pair_is_a_character(tmp_path):
    assert texts(write(tmp_path / "data.jsonl", b'{"text": "\\ud83d\\ude00"}')) == ["\U0001f600"]


def test_null_fields_of_a_message_never_become_words(tmp_path):
    calls = [{"name": "clock", "arguments": {}}]
    conversation = chat(
        {"role": "system", "content": "", "tools": "[]"},
        {**USER, "tool_calls": None, "reasoning_content": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": ""},
        {**ANSWER, "reasoning_content": None},
    )
    path = write(tmp_path / "data.jsonl", conversation)
    (record,) = read_records([path], stage="sft")
    assert record.value["conversations"] == [
        {"role": "system", "content": "", "tools": "[]"},
        USER,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": ""},
        ANSWER,
    ]


def test_texts_for_a_tokenizer_come_from_every_form(tmp_path):
    thinking = chat(USER, {**ANSWER, "reasoning_content": "greet back"})
    path = write(tmp_path / "data.jsonl", GOOD["pretrain"], thinking, GOOD["dpo"])
    assert list(iter_texts([path])) == [
        "once upon a time",
        *("hello", "greet back", "hi"),
        *("hello", "hi", "hello", "go away"),
    ]


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not there")
@pytest.mark.parametrize(
    ("stage", "name", "count"),
    [
        ("pretrain", "heldout_pretrain.jsonl", 683),
        ("sft", "sft_heldout.jsonl", 378),
        ("sft", "sft_toolcall.jsonl", 599),
        ("dpo", "dpo_heldout.jsonl", 146),
    ],
)
def test_every_line_of_the_real_data_is_valid(stage, name, count):
    assert sum(1 for _ in read_records([SHARED / name], stage=stage)) == count


# --- Files ---


def test_a_directory_stands_for_every_jsonl_file_below_it(tmp_path):
    (tmp_path / "b").mkdir()
    names = ["C.JSONL", "a.jsonl", "b/W.Jsonl.GZ", "b/x.jsonl.gz", "b/y.jsonl.zst", "heldout_z.jsonl"]
    for name in [*names, "notes.txt", "b/c.json"]:
        (tmp_path / name).touch()
    assert expand_paths([tmp_path, tmp_path / "a.jsonl"]) == [tmp_path / name for name in names]


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no"):
        expand_paths([tmp_path])


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*absent.jsonl: No such file"):
        expand_paths([tmp_path / "absent.jsonl"])


def test_no_input_is_refused():
    with pytest.raises(UserError, match="no input"):
        expand_paths([])


def test_an_unreadable_file_or_directory_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "data.jsonl", GOOD["pretrain"])

    def forbid(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(args[0]))

    monkeypatch.setattr("builtins.open", forbid)
    monkeypatch.setattr("os.scandir", forbid)
    with pytest.raises(UserError, match=r"cannot read .*data.jsonl: Permission denied"):
        texts(path)
    with pytest.raises(UserError, match=r"cannot read .*: Permission denied"):
        expand_paths([tmp_path])


@pytest.mark.parametrize("skip_bad_lines", [False, True])
def test_input_without_any_record_is_refused(tmp_path, skip_bad_lines):
    path = write(tmp_path / "data.jsonl")
    with pytest.raises(UserError, match=re.escape(str(path))):
        list(read_records([path], stage="pretrain", skip_bad_lines=skip_bad_lines))


def test_an_empty_file_among_others_is_refused_or_counted(tmp_path):
    full, empty = write(tmp_path / "full.jsonl", GOOD["pretrain"]), write(tmp_path / "empty.jsonl")
    with pytest.raises(UserError, match=re.escape(f"{empty} is empty")):
        list(read_records([full, empty], stage="pretrain"))
    report = ReadReport()
    assert len(list(read_records([full, empty], stage="pretrain", skip_bad_lines=True, report=report))) == 1
    assert report.skipped == {"empty file": 1}


def test_the_report_counts_the_bytes_of_every_file(tmp_path):
    paths = [write(tmp_path / f"{name}.jsonl", GOOD["pretrain"], {"text": name}) for name in "ab"]
    report = ReadReport()
    list(read_records(paths, stage="pretrain", report=report))
    assert report.source_bytes == sum(path.stat().st_size for path in paths)


# --- Archives ---

LINES = b"".join(as_line({"text": f"line {number} of many"}) + b"\n" for number in range(3000))


def compress(kind: str) -> bytes:
    if kind.lower() == "gz":
        return gzip.compress(LINES)
    return pytest.importorskip("zstandard").ZstdCompressor().compress(LINES)


@pytest.mark.parametrize("kind", ["gz", "zst", "GZ", "ZST"])
def test_an_archive_reads_like_the_file(tmp_path, kind):
    path = tmp_path / f"data.jsonl.{kind}"
    path.write_bytes(compress(kind) * 2)
    assert texts(path) == [f"line {number} of many" for number in range(3000)] * 2


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: data[:-3], lambda data: b"x" * 99]
)
def test_a_damaged_archive_is_named(tmp_path, kind, damage):
    path = tmp_path / f"data.jsonl.{kind}"
    path.write_bytes(damage(compress(kind)))
    with pytest.raises(UserError, match=r"data.jsonl.\w+ is a damaged or cut archive"):
        texts(path)


def test_a_zstd_file_without_the_library_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl.zst"
    path.write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match=re.escape("-m pip install -c constraints.txt -e '.[data]'")):
        texts(path)
