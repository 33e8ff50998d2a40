"""What a person sees while a run goes on: sentences, and one progress bar with the latest figures.

Framework-free. On a terminal the bar is drawn in place; elsewhere (a log file, CI) each logged step is one line.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def say(sentence: str, *, console: Console | None = None) -> None:
    """Print one line as it is; it is never cut or wrapped where the output has no width."""
    (console or Console()).print(sentence, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def work_progress(work: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for work of known size ("tokenizing", "scoring"), shown from its first report on."""
    progress = Progress(TextColumn(work), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    tasks: list[TaskID] = []

    def report(done: int, total: int) -> None:
        """Show `done` of `total`."""
        if not tasks:
            progress.start()
            tasks.append(progress.add_task(work, total=total))
        progress.update(tasks[0], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            progress.stop()


class RunConsole:
    """The console of one run; a context manager around the loop.

    Args:
        total: updates of the whole run.
        completed: updates already done when it resumed.
    """

    def __init__(self, *, total: int, completed: int):
        self._console = Console()
        self._total = total
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            # Longer than any update: the ETA needs two of them.
            speed_estimate_period=3600,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=total, completed=completed, figures="compiling")

    def __enter__(self) -> "RunConsole":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, step: int) -> None:
        """Move the bar to `step`."""
        self._progress.update(self._task, completed=step)

    def show(self, metrics: Mapping[str, Any]) -> None:
        """The figures of a logged step."""
        words = []
        for name, form in (
            ("loss", "loss {:.3f}"),
            ("perplexity", "ppl {:.1f}"),
            ("reward_accuracy", "{:.0%} of pairs right"),
            ("reward_margin", "margin {:.3f}"),
            ("divergence", "KL {:.3f}"),
            ("tokens_per_second", "{:,.0f} tok/s"),
            ("supervised_tokens_per_second", "{:,.0f} of them learned"),
            ("val_loss", "val loss {:.3f}"),
            ("val_bits_per_byte", "{:.3f} bits/byte"),
            ("val_reward_accuracy", "{:.1%} of pairs right"),
            ("val_reward_margin", "margin {:.3f}"),
            ("val_divergence", "KL {:.3f}"),
        ):
            if metrics.get(name) is not None:
                words.append(form.format(metrics[name]))
        figures = "  ".join(words)
        if self._console.is_terminal:
            self._progress.update(self._task, completed=metrics["step"], figures=figures)
        else:
            self.say(f"step {metrics['step']}/{self._total}  {figures}{self._eta()}")

    def say(self, sentence: str) -> None:
        """A line of its own, above the bar."""
        say(sentence, console=self._console)

    def _eta(self) -> str:
        remaining = self._progress.tasks[self._task].time_remaining
        return "" if remaining is None else f"  ETA {int(remaining // 60)}:{int(remaining % 60):02d}"
