"""What a person looks at after a run: loss.png and report.html, both made from the run directory alone.

The plot uses matplotlib's objects, not pyplot, so it leaves no global state and needs no display. The page is one file
with the plot inside it; every text in it is escaped, since samples are whatever the model wrote. Framework-free.
"""

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minigpt_jax import __version__
from minigpt_jax.files import replace_file
from minigpt_jax.tracking import METRIC_NAMES, read_events, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN_EVENTS = 200
TRAIN_COLOR, VALIDATION_COLOR, RATE_COLOR = "#1f5fa8", "#d1495b", "#8a8a8a"


# --- loss.png ---


def plot_losses(run_dir: Path) -> Path:
    """Draw run_dir/loss.png: training and validation loss over real tokens (over steps when none were counted).

    A thin second axis has the learning rate. A run that has logged no loss yet gives an empty plot that says so.

    Raises:
        UserError: metrics.jsonl is damaged.
    """
    # Imported here: half a second that `--help` need not wait for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(run_dir)
    axis_name, places = _horizontal(rows)
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _draw_learning_rate(axes, places, _column(rows, "learning_rate"))
    _draw_losses(axes, places, rows)
    axes.set_xlabel(axis_name)
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(_title(run_dir, rows), loc="left", parse_math=False)

    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    path = run_dir / "loss.png"
    replace_file(path, image.getvalue())
    return path


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """One metric of all rows as float64; NaN where it was not measured or not finite."""
    return np.array([math.nan if row.get(name) is None else row[name] for row in rows], dtype=np.float64)


def _horizontal(rows: Sequence[Mapping[str, Any]]) -> tuple[str, np.ndarray]:
    """The axis' name and each row's place on it; a row without a token count gets its place from its step."""
    steps, tokens = _column(rows, "step"), _column(rows, "tokens")
    counted = np.isfinite(tokens)
    if not counted.any():
        return "step", steps
    return "training tokens", np.interp(steps, steps[counted], tokens[counted])


def _draw_losses(axes: "Axes", places: np.ndarray, rows: Sequence[Mapping[str, Any]]) -> None:
    drawn = False
    for name, label, color in (("loss", "training", TRAIN_COLOR), ("val_loss", "validation", VALIDATION_COLOR)):
        # A loss that was not finite stays in as NaN, so that the line breaks there.
        logged = np.array([name in row for row in rows], dtype=bool)
        values = _column(rows, name)[logged]
        if np.isfinite(values).any():
            marker = "o" if len(values) <= 50 else None  # a line of few points needs them seen
            axes.plot(places[logged], values, color=color, linewidth=1.4, marker=marker, markersize=3.5, label=label)
            drawn = True
    if not drawn:
        axes.text(0.5, 0.5, "no loss logged yet", transform=axes.transAxes, ha="center", va="center")
        return
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper right")
    axes.xaxis.set_major_formatter(lambda place, _: _short(place))


def _draw_learning_rate(axes: "Axes", places: np.ndarray, rate: np.ndarray) -> None:
    measured = np.isfinite(rate)
    if not measured.any():
        return
    second = axes.twinx()
    second.plot(places[measured], rate[measured], color=RATE_COLOR, linewidth=0.8, linestyle="--")
    second.set_ylim(bottom=0)
    second.set_ylabel("learning rate (dashed)", color=RATE_COLOR, fontsize="small")
    second.tick_params(colors=RATE_COLOR, labelsize="small")
    second.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    # A twin is drawn over its host; the losses belong in front.
    axes.set_zorder(second.get_zorder() + 1)
    axes.patch.set_visible(False)


def _title(run_dir: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """The run's name and its last losses, in letters that the font has (others would raise a warning each)."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    last = last_values(rows)
    parts = [
        f"{label} {last[name]:.3f}"
        for name, label in (("loss", "training"), ("val_loss", "validation"))
        if name in last
    ]
    name = run_dir.resolve().name
    letters = get_font(findfont(FontProperties())).get_charmap()
    name = "".join(letter if ord(letter) in letters else "?" for letter in name)
    return name + (": " + ", ".join(parts) if parts else "")


def _short(number: float) -> str:
    """1200 as 1.2k, 3500000 as 3.5M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:.4g}"


# --- report.html ---


def write_report(
    run_dir: Path, *, config: Mapping[str, Any], model: Mapping[str, Any], samples: Sequence[tuple[str, str]]
) -> Path:
    """Write run_dir/report.html, and loss.png which it holds a copy of.

    Args:
        run_dir: has metrics.jsonl and events.jsonl; either may be missing.
        config: the training configuration, field by field.
        model: the model's, likewise.
        samples: (prompt, what the model continued it with).

    Raises:
        UserError: metrics.jsonl or events.jsonl is damaged.
    """
    import jinja2

    rows, events = read_metrics(run_dir), read_events(run_dir)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(PAGE).render(
        name=run_dir.resolve().name,
        version=__version__,
        plot=base64.b64encode(plot_losses(run_dir).read_bytes()).decode("ascii"),
        metrics=[(name, _figure(value)) for name, value in last_values(rows).items()],
        samples=samples,
        model=[(name, _figure(value)) for name, value in model.items()],
        config=[(name, _figure(value)) for name, value in config.items()],
        events=[_event(event) for event in events[-SHOWN_EVENTS:]],
        left_out=max(0, len(events) - SHOWN_EVENTS),
    )
    path = run_dir / "report.html"
    # A lone surrogate cannot be written as UTF-8; it becomes a visible escape instead of a lost report.
    replace_file(path, page.encode("utf-8", errors="backslashreplace"))
    return path


def last_values(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Each metric's last finite value, in the order of METRIC_NAMES."""
    last = {name: value for row in rows for name, value in row.items() if value is not None}
    return {name: last[name] for name in METRIC_NAMES if name in last}


def _figure(value: Any) -> str:
    """A value as a table shows it: 12,345,678, 2.871, 0.0005, a list with commas."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value) or "-"
    return str(value)


def _event(event: Mapping[str, Any]) -> tuple[str, str, str]:
    details = {name: value for name, value in event.items() if name not in ("step", "kind")}
    return (
        _figure(event["step"]),
        str(event.get("kind", "")),
        json.dumps(details, ensure_ascii=False) if details else "",
    )


PAGE_START = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ name }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .15rem 1.5rem .15rem 0; border-bottom: 1px solid #e5e5e5;
  overflow-wrap: anywhere; }
"""
"""The head of a page called {{ name }}, up to the rules of its own."""

PAGE = (
    PAGE_START
    + """th { font-weight: normal; color: #666; }
.side { display: flex; flex-wrap: wrap; gap: 0 3rem; }
.sample { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: .6rem .8rem; margin: .5rem 0; }
.prompt { font-weight: 600; }
.quiet { color: #666; }
</style>
</head>
<body>
{% macro table(rows) %}
<table>
{% for label, value in rows %}
<tr><th>{{ label }}</th><td>{{ value }}</td></tr>
{% endfor %}
</table>
{% endmacro %}
<h1>{{ name }}</h1>
<p class="quiet">minigpt {{ version }}</p>
<img alt="Training and validation loss" src="data:image/png;base64,{{ plot }}">
<h2>Final metrics</h2>
{% if metrics %}
{{ table(metrics) }}
{% else %}
<p class="quiet">Nothing was measured.</p>
{% endif %}
<h2>What the model writes</h2>
{% for prompt, text in samples %}
<div class="sample"><span class="prompt">{{ prompt }}</span>{{ text }}</div>
{% else %}
<p class="quiet">No samples.</p>
{% endfor %}
<div class="side">
<div>
<h2>Model</h2>
{{ table(model) }}
</div>
<div>
<h2>Training</h2>
{{ table(config) }}
</div>
</div>
<h2>Events</h2>
{% if left_out %}
<p class="quiet">{{ left_out }} earlier ones are in events.jsonl.</p>
{% endif %}
{% if events %}
<table>
{% for step, kind, details in events %}
<tr><th>{{ step }}</th><td>{{ kind }}</td><td>{{ details }}</td></tr>
{% endfor %}
</table>
{% else %}
<p class="quiet">None.</p>
{% endif %}
</body>
</html>
"""
)
