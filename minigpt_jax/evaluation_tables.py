"""What an evaluation found, as lines for people and as figures for machines. Framework-free.

The figures have the same keys whatever the task; what it does not give is None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minigpt_jax.accuracy import Accuracy
from minigpt_jax.evaluation import LossReport, TokenSums
from minigpt_jax.languages import language_of
from minigpt_jax.multiple_choice import Accuracies, Asking, ExamReport
from minigpt_jax.questions import QuestionsReport

MOST_SHOWN = 20
"""Groups of one kind that are printed; more are in the figures alone."""

_NOTHING: dict[str, Any] = dict.fromkeys(("loss", "perplexity", "bits_per_byte", "tokens", "accuracy", "ci95"))


@dataclass(frozen=True)
class Table:
    """The result of one evaluation."""

    lines: tuple[str, ...]
    figures: dict[str, Any]


def loss_table(report: LossReport) -> Table:
    """Loss, perplexity and bits per byte, in all, by language and by file."""
    rows = [("", "loss", "perplexity", "bits/byte", "tokens"), _loss_row("all", report.total)]
    for groups in (report.by_language, report.by_source):
        rows += [_loss_row(name, sums) for name, sums in _shown(groups).items()]
    tables = {
        "by_source": {name: sums.to_json() for name, sums in report.by_source.items()},
        "by_language": {name: sums.to_json() for name, sums in report.by_language.items()},
    }
    return Table(_aligned(rows), _NOTHING | report.total.to_json() | tables)


def _loss_row(name: str, sums: TokenSums) -> tuple[str, ...]:
    bits = "-" if sums.bits_per_byte is None else f"{sums.bits_per_byte:.4f}"
    return name, f"{sums.loss:.4f}", f"{sums.perplexity:.2f}", bits, f"{sums.tokens:,}"


def exam_table(report: ExamReport, *, ask: Asking) -> Table:
    """Accuracy against chance, in all, by language, subject and file.

    By the letters of the choices there is one accuracy; by their texts there are two, by sum and by byte.
    """
    total, has_two = report.total, ask == "text"
    by = {
        "by_language": report.by(lambda item: language_of(item.question)),
        "by_subject": report.by(lambda item: item.subject),
        "by_source": report.by(lambda item: item.source),
    }
    heads = ("items", "accuracy", "95 % interval", *(("by byte", "95 % interval") if has_two else ()))
    rows = [("", *heads), _exam_row("all", total, has_two)]
    for groups in by.values():
        rows += [_exam_row(name, each, has_two) for name, each in _shown(groups).items()]
    lines = [*_aligned(rows), f"chance is {total.by_sum.chance:.1%}: {total.by_sum.verdict}"]
    if has_two:
        lines[-1] += f"; by byte {total.by_byte.verdict}"
    cut = sum(outcome.was_cut for outcome in report.outcomes)
    if cut:
        lines.append(f"prompts that were longer than --max-seq-len and lost their beginning: {cut}")
    figures = _NOTHING | _exam_figures(total, has_two) | {
        "tokens": sum(outcome.tokens for outcome in report.outcomes),
        "ask": ask,
        "cut_prompts": cut,
    }  # fmt: skip
    for name, groups in by.items():
        figures[name] = {group: _exam_figures(each, has_two) for group, each in groups.items()}
    return Table(tuple(lines), figures)


def _exam_figures(each: Accuracies, has_two: bool) -> dict[str, Any]:
    return each.by_sum.to_json() | ({"by_byte": each.by_byte.to_json()} if has_two else {})


def _exam_row(name: str, each: Accuracies, has_two: bool) -> tuple[str, ...]:
    shown = (each.by_sum, each.by_byte) if has_two else (each.by_sum,)
    return name, f"{each.by_sum.asked:,}", *(word for accuracy in shown for word in _words(accuracy))


def questions_table(report: QuestionsReport) -> Table:
    """Questions answered, in all, by language and by kind."""
    rows: list[tuple[str, ...]] = [("", "questions", "accuracy", "95 % interval")]
    by = {"by_language": report.by_language, "by_kind": report.by_kind}
    for groups in ({"all": report.total}, *by.values()):
        rows += [(name, str(each.asked), *_words(each)) for name, each in groups.items()]
    tables = {kind: {name: each.to_json() for name, each in groups.items()} for kind, groups in by.items()}
    return Table(_aligned(rows), _NOTHING | report.total.to_json() | tables)


def _words(accuracy: Accuracy) -> tuple[str, str]:
    low, high = accuracy.ci95
    return f"{accuracy.share:.1%}", f"{100 * low:.1f}-{100 * high:.1f} %"


def _shown(groups: Mapping[str, Any]) -> Mapping[str, Any]:
    """The groups that say more than the line of all does."""
    return groups if 1 < len(groups) <= MOST_SHOWN else {}


def _aligned(rows: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """One line a row: the name, then its cells in columns."""
    width = max(len(name) for name, *_ in rows)
    return tuple(f"{name:{width}}" + "".join(f"{cell:>15}" for cell in cells) for name, *cells in rows)
