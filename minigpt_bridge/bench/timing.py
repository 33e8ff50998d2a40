"""Seconds of several sides, taken in turn, and what is said of them.

A machine is seldom quiet, and minutes differ more than programs do. So the sides take turns within each round, and what
counts is the ratio of a round; the median over the rounds is given with the smallest and the largest.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minigpt_bridge.bench.limits import Limits

Seconds = Mapping[str, Sequence[float]]
"""Of each side, round by round."""


@dataclass(frozen=True)
class Row:
    """One comparison."""

    name: str
    ours: float
    peer: float
    unit: str
    """Of both figures; where it is seconds less is better, where it is a rate more is."""
    ratio: float
    """How many times as good ours is: the median over the rounds."""
    ratio_min: float
    ratio_max: float


def interleave(sides: Mapping[str, Callable[[], object]], *, rounds: int) -> Seconds:
    """Run each side once unmeasured, which compiles it, then all of them in turn, `rounds` times.

    Every other round goes backwards, so that none is always the one after another.
    """
    for run in sides.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            begin = time.perf_counter()
            sides[name]()
            taken[name].append(time.perf_counter() - begin)
    return taken


def rates(name: str, ours: Sequence[float], peer: Sequence[float], *, work: float, unit: str) -> Row:
    """A row of `work` over seconds."""
    return _row(name, [work / each for each in ours], [work / each for each in peer], unit, is_rate=True)


def seconds(name: str, ours: Sequence[float], peer: Sequence[float]) -> Row:
    """A row of seconds."""
    return _row(name, ours, peer, "s", is_rate=False)


def part_of(name: str, ours: Sequence[float], limit: float, *, work: float, unit: str) -> Row:
    """A row of `work` over seconds against what the machine allows."""
    return _row(name, [work / each for each in ours], [limit] * len(ours), unit, is_rate=True)


def _row(name: str, ours: Sequence[float], peer: Sequence[float], unit: str, *, is_rate: bool) -> Row:
    pairs = zip(ours, peer, strict=True)
    ratios = [mine / other if is_rate else other / mine for mine, other in pairs]
    return Row(
        name,
        statistics.median(ours),
        statistics.median(peer),
        unit,
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )


# --- Saying it ---


def as_json(limits: Limits, rows: Sequence[Row]) -> dict[str, Any]:
    """What --json writes."""
    return {"limits": asdict(limits), "rows": [asdict(row) for row in rows]}


def as_line(row: Row) -> str:
    """One row for people."""
    spread = f"{row.ratio_min:.2f} to {row.ratio_max:.2f}"
    return f"{row.name:<44} {_short(row.ours):>8} {_short(row.peer):>8} {row.unit:<10} {row.ratio:6.2f}x  ({spread})"


HEADING = f"{'':<44} {'ours':>8} {'peer':>8} {'':<10} {'ratio':>7}  (all rounds)"


def _short(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"
