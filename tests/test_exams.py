"""Multiple-choice items as the exams are published, and what is refused by file and line."""

import json

import pytest

from minigpt_jax.data.exams import EXAM_SUFFIXES, read_items, sample_items
from minigpt_jax.data.records import expand_paths
from minigpt_jax.errors import UserError

QUOTED = (
    'id,question,A,B,C,D,answer,explanation\n0,"Say ""a, b""\nor not?",one,"t,wo",three,"fo\nur",B,"1. 因为\n2. 所以"\n'
)
OURS = {"question": "Which?", "choices": ["x", "y", "z"], "answer": "C", "subject": "law", "split": "dev"}


def items_of(path, text):
    path.write_bytes(text.encode("utf-8") if isinstance(text, str) else text)
    return read_items([path])


def fields(item):
    return item.question, item.choices, item.answer, item.subject


# --- Layouts ---


FOUR = ("1", "2", "3", "4")
LINES = ("one", "t,wo", "three", "fo\nur")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", json.dumps(OURS), ("Which?", ("x", "y", "z"), 2, "law")),
        # MMLU on the hub: the answer is a number.
        ("a.jsonl", json.dumps(OURS | {"answer": 0, "subject": None}), ("Which?", ("x", "y", "z"), 0, "")),
        # C-Eval and CMMLU as JSONL.
        ("a.jsonl", '{"id":3,"question":"Q","A":"1","B":"2","C":"3","D":"4","answer":"d"}', ("Q", FOUR, 3, "")),
        ("a.jsonl", '{"Question":"Q","A":"1","B":"2","Answer":" B ","category":"art"}', ("Q", ("1", "2"), 1, "art")),
        # C-Eval: quotes, commas and line breaks within cells.
        ("law_val.csv", QUOTED, ('Say "a, b"\nor not?', LINES, 1, "law")),
        # As a spreadsheet saves it: a byte order mark, and line ends of two characters.
        ("law_dev.CSV", "\ufeffquestion,A,B,answer\r\nQ,1,2,A\r\n", ("Q", ("1", "2"), 0, "law")),
        # CMMLU: a number in a column without a name.
        ("agronomy.csv", ",Question,A,B,C,D,Answer\n0,问,1,2,3,4,D\n\n", ("问", FOUR, 3, "agronomy")),
        # MMLU: no header.
        ("college_physics_test.csv", "Why?,1,2,3,4,A\n", ("Why?", FOUR, 0, "college_physics")),
        # A number, as text in a cell; a category; a subject that is left empty.
        ("all.csv", "question,A,B,answer,category\nQ,1,2,1,art\n", ("Q", ("1", "2"), 1, "art")),
        ("law_test.csv", "question,A,B,answer,subject\nQ,1,2,A,\n", ("Q", ("1", "2"), 0, "law")),
        # A subject of its own wins over the file's name.
        ("all.csv", "question,A,B,answer,subject\nQ,1,2,A,logic\n", ("Q", ("1", "2"), 0, "logic")),
    ],
)
def test_an_exam_is_read_as_it_is_published(tmp_path, name, text, expected):
    (item,) = items_of(tmp_path / name, text)
    assert fields(item) == expected


def test_an_item_knows_where_it_begins(tmp_path):
    path = tmp_path / "a.csv"
    items = items_of(path, QUOTED + "1,Next,a,b,c,d,A,\n")
    assert [item.where for item in items] == [f"{path}:2", f"{path}:6"]


def test_a_directory_gives_its_jsonl_and_csv_files(tmp_path):
    (tmp_path / "b.jsonl").write_text(json.dumps(OURS) + "\n")
    (tmp_path / "a.csv").write_text("Why?,one,two,B\n")
    (tmp_path / "notes.txt").write_text("no exam")
    assert [item.answer for item in read_items(expand_paths([tmp_path], suffixes=EXAM_SUFFIXES))] == [1, 2]


def test_the_samples_items_are_right_as_often_first_as_last():
    items = sample_items(count=104)
    assert sum(item.answer for item in items) == 52
    assert all(len(set(item.choices)) == 2 for item in items)


# --- Mistakes ---

JSONL, CSV = "a.jsonl", "a.csv"
HEADER = "id,question,A,B,C,D,answer\n"


@pytest.mark.parametrize(
    ("name", "text", "line", "message"),
    [
        (JSONL, json.dumps(OURS | {"answer": "D"}), 1, "answer 'D' is no choice; write a letter, A to C"),
        (JSONL, json.dumps(OURS | {"answer": 3}), 1, "answer 3 is no choice"),
        (JSONL, json.dumps(OURS | {"answer": -1}), 1, "answer -1 is no choice"),
        (JSONL, json.dumps(OURS | {"answer": True}), 1, "answer True is no choice"),
        (JSONL, json.dumps(OURS | {"answer": "AB"}), 1, "answer 'AB' is no choice"),
        (JSONL, json.dumps(OURS | {"answer": ["A"]}), 1, "answer ['A'] is no choice"),
        (JSONL, json.dumps(OURS | {"answer": ""}), 1, "no answer; a test whose answers are kept back"),
        (JSONL, json.dumps(OURS | {"choices": ["x"]}), 1, "1 choices"),
        (JSONL, json.dumps(OURS | {"choices": "xyz"}), 1, "choices is not a list"),
        (JSONL, json.dumps(OURS | {"choices": ["x", 2, "z"]}), 1, "choice B is no text"),
        (JSONL, json.dumps(OURS | {"choices": ["x", "y", " "]}), 1, "choice C is no text"),
        (JSONL, json.dumps(OURS | {"question": None}), 1, "no question"),
        (JSONL, json.dumps(OURS | {"subject": 3}), 1, "subject is not a string"),
        (JSONL, json.dumps(OURS) + "\n{", 2, "cut last line"),
        (JSONL, '{"text": "a"}', 1, "no question; write a string in question; found text"),
        (CSV, HEADER.replace(",answer", ""), 1, "no column answer; add it; found id, question, A, B, C, D"),
        (CSV, HEADER.replace("question", "q"), 1, "no column question"),
        (CSV, HEADER.replace(",B", ""), 1, "no column B"),
        (CSV, HEADER + "0,Q,1,2,3,4,A\n1,Q,1,2,3,A\n", 3, "6 cells where the first line has 7"),
        (CSV, HEADER + "0,Q,1,2,3,4,E\n", 2, "answer 'E' is no choice; write a letter, A to D"),
        (CSV, HEADER + "0,Q,1,2,3,4,\n", 2, "no answer"),
        (CSV, HEADER + '0,Q,1,2,3,4,A\n1,"Q" q,1,2,3,4,A\n', 3, "not CSV"),
        (CSV, HEADER + '0,"Q,1,2,3,4,A\n', 2, "not CSV"),
        (CSV, "one,two,three\n", 1, "neither an item nor names of columns"),
        (CSV, "Why?,one,two,three,C1\n", 1, "neither an item nor names of columns"),
    ],
)
def test_a_line_that_is_no_item_is_named(tmp_path, name, text, line, message):
    with pytest.raises(UserError) as error:
        items_of(tmp_path / name, text)
    assert str(error.value).startswith(f"{tmp_path / name}:{line}: {message}")
    assert "--" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no item"), (HEADER.encode(), "holds no item"), ("问".encode("gbk"), "is not UTF-8 (byte 1)")],
)
def test_a_csv_file_that_is_no_exam_is_named(tmp_path, content, message):
    with pytest.raises(UserError) as error:
        items_of(tmp_path / CSV, content)
    assert str(error.value).startswith(f"{tmp_path / CSV} {message}")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "question,A,B,A,answer\nQ,1,2,3,A\n", r"a\.csv:1: a more than once"),
        ("a.csv", "question,A,B,Answer,answer\nQ,1,2,A,B\n", r"a\.csv:1: answer more than once"),
        ("a.csv", "question,A,B,D,answer\nQ,1,2,3,A\n", r"a\.csv:2: no choice C, but D; add the column C"),
        ("a.jsonl", '{"Question":"Q","question":"P","A":"1","B":"2","answer":"A"}', r"question more than once"),
    ],
)
def test_nothing_that_an_item_says_is_passed_over(tmp_path, name, text, said):
    with pytest.raises(UserError, match=said):
        items_of(tmp_path / name, text)


def test_a_cell_may_be_long(tmp_path):
    (item,) = items_of(tmp_path / "a.csv", f"question,A,B,answer\n{'long ' * 60_000},1,2,A\n")
    assert len(item.question) == 299_999
