"""Multiple-choice items: files in, validated items out. Framework-free.

Two layouts, in `.jsonl` (also `.gz`, `.zst`) or `.csv`, told by their fields, whose case does not matter:

- a list: `{"question", "choices": [...], "answer"}`, as MMLU is published on the Hugging Face hub, in JSONL only;
- columns: `question, A, B, C, D, answer` as C-Eval (with `id`, `explanation`) and CMMLU (with a number) have them. A
  CSV without a header is MMLU's: question, choices, answer.

An answer is a letter, or the choice's number from 0. A subject is the field `subject` or `category`, else, in CSV, the
file's name without `_dev`, `_val` or `_test`, for those exams come as a file for each subject.
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from minigpt_jax.data.record_forms import BadLineError
from minigpt_jax.data.records import SUFFIXES, read_validated
from minigpt_jax.data.sample_questions import heldout_questions
from minigpt_jax.errors import UserError

EXAM_SUFFIXES = (*SUFFIXES, ".csv")

_SPLIT = re.compile(r"_(dev|val|test)$")


@dataclass(frozen=True)
class Item:
    """A question with its choices, of which one is right."""

    question: str
    choices: tuple[str, ...]
    answer: int
    """Number of the right choice, from 0."""
    subject: str
    """Empty where none is named."""
    source: str
    """The file it is from."""
    where: str
    """FILE:LINE, for messages."""

    @property
    def content(self) -> tuple[str, frozenset[str]]:
        """What makes it this item, wherever it stands and however its choices are ordered."""
        return self.question.strip(), frozenset(self.choices)


def read_items(paths: Sequence[Path]) -> list[Item]:
    """The items of `paths`, as `expand_paths` gives them, in order.

    Raises:
        UserError: a file cannot be read, or a line is no item (`FILE:LINE: reason`).
    """
    return [item for path in paths for item in (_csv_items(path) if path.suffix.lower() == ".csv" else _jsonl(path))]


def _jsonl(path: Path) -> Iterator[Item]:
    for record in read_validated([path], _parsed):
        where = f"{record.path}:{record.line}"
        yield Item(**record.value, source=str(path), where=where)


def sample_items(*, count: int) -> list[Item]:
    """Held-out questions of the sample corpus, each with its answer and a false one.

    In each language the right one is first every other time.
    """
    items = []
    for number, asked in enumerate(heldout_questions(count=count)):
        choices = (asked.answer, asked.wrong) if number % 4 < 2 else (asked.wrong, asked.answer)
        where = f"question {number + 1} of the sample"
        items.append(Item(asked.question, choices, choices.index(asked.answer), asked.kind, "sample", where))
    return items


# --- CSV ---


def _csv_items(path: Path) -> Iterator[Item]:
    subject = _SPLIT.sub("", path.stem)
    columns: list[str] = []
    is_empty = True
    for line, cells in _csv_rows(path):
        try:
            if not columns:
                columns, is_item = _columns(cells)
                if not is_item:
                    continue
            if len(cells) != len(columns):
                reason = f"{len(cells)} cells where the first line has {len(columns)}"
                raise BadLineError(reason, "put a cell that holds commas or line breaks into quotes")
            fields = _parsed(dict(zip(columns, cells, strict=True)), subject=subject)
        except BadLineError as fault:
            raise UserError(f"{path}:{line}: {fault.reason}; {fault.remedy}") from fault
        is_empty = False
        yield Item(**fields, source=str(path), where=f"{path}:{line}")
    if is_empty:
        raise UserError(f"{path} holds no item; each is a line: question, choices and answer")


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line on which it begins, cells) of each row that is not blank."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start + 1}); save it as UTF-8") from error
    csv.field_size_limit(max(len(text), csv.field_size_limit()))
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    begin = 1
    try:
        for cells in rows:
            if cells:
                yield begin, cells
            begin = rows.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}:{begin}: not CSV: {error}; check the quotes") from error


def _columns(cells: list[str]) -> tuple[list[str], bool]:
    """The names of a file's columns, and whether its first line is an item already, as MMLU's is."""
    names = [cell.strip() for cell in cells]
    lower = {name.lower() for name in names}
    if lower & {"question", "answer"}:
        _require_once([name.lower() for name in names])
        for name in ("question", "A", "B", "answer"):
            if name.lower() not in lower:
                raise BadLineError(f"no column {name}", f"add it; found {', '.join(filter(None, names))}")
        return names, False
    letters = ascii_uppercase[: len(cells) - 2]
    if len(cells) < 4 or len(names[-1]) != 1 or names[-1].upper() not in letters:
        remedy = "write question, choices and the letter of the right one, or name the columns in the first line"
        raise BadLineError("neither an item nor names of columns", remedy)
    return ["question", *letters, "answer"], True


# --- Fields ---


def _parsed(value: dict[str, Any], *, subject: str = "") -> dict[str, Any]:
    """Question, choices, answer and subject of an item in either layout; raises BadLineError.

    `subject` is that of an item that names none.
    """
    fields = {name.lower(): field for name, field in value.items()}
    _require_once([name.lower() for name in value])
    question = _text(fields, "question")
    if "choices" in fields:
        choices = fields["choices"]
        if not isinstance(choices, list):
            raise BadLineError("choices is not a list", "write a list of strings")
    else:
        named = list(takewhile(lambda letter: letter in fields, ascii_lowercase))
        choices = [fields[letter] for letter in named]
        if later := [letter.upper() for letter in ascii_lowercase[len(named) :] if letter in fields]:
            missing = ascii_uppercase[len(named)]
            raise BadLineError(f"no choice {missing}, but {', '.join(later)}", f"add the column {missing}")
    if not 2 <= len(choices) <= len(ascii_uppercase):
        raise BadLineError(f"{len(choices)} choices", "an item has choices, or the columns A, B and so on: 2 to 26")
    for number, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice.strip():
            raise BadLineError(f"choice {ascii_uppercase[number]} is no text", "write a string that is not empty")
    named_subject = fields.get("subject") or fields.get("category") or subject
    if not isinstance(named_subject, str):
        raise BadLineError("subject is not a string", "put it in quotes")
    return {
        "question": question,
        "choices": tuple(choice.strip() for choice in choices),
        "answer": _answer(fields, len(choices)),
        "subject": named_subject,
    }


def _require_once(names: Sequence[str]) -> None:
    """Refuse names that mean the same, of which one would be passed over."""
    if doubled := sorted({name for name in names if name and names.count(name) > 1}):
        raise BadLineError(
            f"{', '.join(doubled)} more than once", "keep one of them; upper and lower case are the same"
        )


def _answer(fields: dict[str, Any], count: int) -> int:
    answer = fields.get("answer")
    letters = ascii_uppercase[:count]
    if answer is None or answer == "":
        raise BadLineError("no answer", "a test whose answers are kept back cannot be counted; take another split")
    if isinstance(answer, str):
        text = answer.strip().upper()
        if len(text) == 1 and text in letters:
            return letters.index(text)
        answer = int(text) if text.isascii() and text.isdecimal() else answer
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < count:
        return answer
    raise BadLineError(f"answer {answer!r} is no choice", f"write a letter, A to {letters[-1]}, or a number from 0")


def _text(fields: dict[str, Any], name: str) -> str:
    text = fields.get(name)
    if not isinstance(text, str) or not text.strip():
        raise BadLineError(f"no {name}", f"write a string in {name}; found {', '.join(sorted(fields)[:6])}")
    return text.strip()
