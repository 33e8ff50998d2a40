"""The proof as a person reads it: a table, and one HTML page that needs nothing else; and as JSON for machines."""

import base64
import dataclasses
import io
from collections.abc import Sequence
from typing import Any

from minigpt_bridge.levels import UPDATES, Row
from minigpt_jax.report import PAGE_START


def worst_of_levels(rows: Sequence[Row]) -> list[Row]:
    """The row of each level that is nearest to its bound (without one: the largest), in the order of the levels."""
    levels = dict.fromkeys(row.level for row in rows)
    # Not a number is the worst there is, and max() would not see it.
    return [
        max((row for row in rows if row.level == level), key=lambda row: (not row.ok, row.share, row.relative))
        for level in levels
    ]


def as_text(rows: Sequence[Row]) -> str:
    """The table of the levels' worst rows for a console, and what a reader should know about a missed bound."""
    lines = [f"{'level':12} {'tensors':>7}  {'nearest to its bound':52} {' '.join(f'{name:>9}' for name in FIGURES)}"]
    for row in worst_of_levels(rows):
        count = sum(other.level == row.level for other in rows)
        figures = " ".join(f"{figure:>9}" for figure in figures_of(row))
        lines.append(f"{row.level:12} {count:7}  {row.name:52} {figures} {verdict(row)}")
    lines += [f"{level}: {text}" for level, text in explanations(rows)]
    return "\n".join(lines)


def explanations(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(level, sentence) where rounding alone misses a bound: a first update, while one by equal gradients holds it."""
    missed = [row for row in rows if row.level == "update 1" and not row.ok]
    gradients = [row for row in rows if row.level in ("gradient", "optimizer")]
    if not missed or not gradients or not all(row.ok for row in gradients):
        return []
    text = (
        f"{len(missed)} tensors miss the bound. AdamW's first update is rate * g / (|g| + 1e-8): where a gradient g is "
        "almost 0 it keeps the rounding of g, however well g holds its own bound. By equal gradients both sides make "
        "the same update (optimizer)."
    )
    if all(row.jax_error is not None and row.torch_error is not None for row in missed):
        ours, theirs = (max(getattr(row, name) for row in missed) for name in ("jax_error", "torch_error"))
        text += f" From the float64 result JAX is up to {ours:.1e}, PyTorch {theirs:.1e}."
    return [("update 1", text)]


FIGURES = ("relative", "ulp", "JAX-f64", "torch-f64", "ratio", "bound")
"""The columns of the tables."""


def figures_of(row: Row) -> list[str]:
    """The figures of a row, in the order of `FIGURES`; a dash where there is none."""
    numbers = [row.relative, row.ulp, row.jax_error, row.torch_error, row.ratio, row.bound]
    formats = [".1e", ".1f", ".1e", ".1e", ".3f", ".0e" if row.ratio is None else ".2f"]
    return ["-" if number is None else format(number, form) for number, form in zip(numbers, formats, strict=True)]


def verdict(row: Row) -> str:
    """ok, MISSED, or a dash where nothing binds the row."""
    if row.bound is None:
        return "-"
    return "ok" if row.ok else "MISSED"


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """{"ok", "rows": [{"level", "name", "max_abs", "relative", "ulp", "cosine", "jax_error", "torch_error", ...}]}."""
    fields = [dataclasses.asdict(row) | {"ratio": row.ratio, "ok": row.ok} for row in rows]
    for field in fields:
        del field["squares"]
    return {"ok": all(row.ok for row in rows), "rows": fields}


def as_page(rows: Sequence[Row], *, title: str) -> str:
    """The whole HTML page, its pictures inside."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(PAGE).render(
        name=title,
        rows=rows,
        worst=worst_of_levels(rows),
        columns=FIGURES,
        figures_of=figures_of,
        verdict=verdict,
        explanations=explanations(rows),
        ok=all(row.ok for row in rows),
        picture=_picture(rows),
    )


def _picture(rows: Sequence[Row]) -> str:
    """Error by layer and by training step, as a PNG in base64."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    trained = [row for row in rows if row.level.startswith("update ")]
    figure = Figure(figsize=(9 if trained else 5, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    by_layer, *rest = figure.subplots(1, 2 if trained else 1, squeeze=False)[0]
    stream = [row for row in rows if row.level == "stream"]
    # A logarithmic axis has no zero: an exact result is drawn at 1e-17.
    by_layer.plot(range(len(stream)), [max(row.relative, 1e-17) for row in stream], marker="o", label="difference")
    if stream[0].ratio is None:
        by_layer.axhline(stream[0].bound, color="#d1495b", linestyle="--", label="bound")
    by_layer.set_xlabel("layer")
    by_layer.set_ylabel("relative error of the stream")
    by_layer.xaxis.get_major_locator().set_params(integer=True)
    for by_step in rest:
        for kind in ("parameters", "optimizer"):
            worst = [
                max(row.relative for row in trained if row.level == f"update {step}" and row.name.startswith(kind))
                for step in UPDATES
            ]
            by_step.plot(UPDATES, [max(error, 1e-17) for error in worst], marker="o", label=kind)
        by_step.set_xlabel("updates")
        by_step.set_ylabel("largest relative error")
    for axes in (by_layer, *rest):
        axes.set_yscale("log")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    return base64.b64encode(image.getvalue()).decode("ascii")


PAGE = (
    PAGE_START
    + """.bad { color: #b00020; font-weight: 600; }
</style>
</head>
<body>
{% macro table(rows) %}
<table>
<tr><th>level</th><th>tensor</th><th>max abs</th><th>cosine</th>
{% for column in columns %}<th>{{ column }}</th>{% endfor %}<th></th></tr>
{% for row in rows %}
<tr{% if not row.ok %} class="bad"{% endif %}><td>{{ row.level }}</td><td>{{ row.name }}</td>
<td>{{ "%.1e" % row.max_abs }}</td><td>{{ "%.12f" % row.cosine }}</td>
{% for figure in figures_of(row) %}<td>{{ figure }}</td>{% endfor %}<td>{{ verdict(row) }}</td></tr>
{% endfor %}
</table>
{% endmacro %}
<h1>{{ name }}</h1>
<p>{{ "Every bound holds." if ok else "A bound is missed." }}</p>
{% for level, text in explanations %}<p>{{ level }}: {{ text }}</p>
{% endfor %}<p>relative: largest difference over max(1, the largest of PyTorch's). JAX-f64 and torch-f64: the same, of
either side from the result in float64. ratio: of their root mean squares, which is what binds bfloat16.</p>
<img alt="Error by layer and by training step" src="data:image/png;base64,{{ picture }}">
<h2>The row of each level that is nearest to its bound</h2>
{{ table(worst) }}
<h2>Every row</h2>
{{ table(rows) }}
</body>
</html>
"""
)
