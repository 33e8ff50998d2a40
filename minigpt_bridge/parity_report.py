"""The proof as a person reads it: a table, and one HTML page that needs nothing else; and as JSON for machines."""

import base64
import dataclasses
import io
from collections.abc import Sequence
from typing import Any

from minigpt_bridge.levels import UPDATES, Row
from minigpt_jax.report import PAGE_START


def worst_of_levels(rows: Sequence[Row]) -> list[Row]:
    """The row of each level that is nearest to its bound, in the order of the levels."""
    levels = dict.fromkeys(row.level for row in rows)
    return [
        max((row for row in rows if row.level == level), key=lambda row: row.relative / row.bound) for level in levels
    ]


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """{"ok", "rows": [{"level", "name", "max_abs", "relative", "ulp", "cosine", "bound", "ok"}]}."""
    fields = [dataclasses.asdict(row) | {"ok": row.ok} for row in rows]
    return {"ok": all(row.ok for row in rows), "rows": fields}


def as_page(rows: Sequence[Row], *, title: str) -> str:
    """The whole HTML page, its pictures inside."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(PAGE).render(
        name=title, rows=rows, worst=worst_of_levels(rows), ok=all(row.ok for row in rows), picture=_picture(rows)
    )


def _picture(rows: Sequence[Row]) -> str:
    """Error by layer and by training step, as a PNG in base64."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    by_layer, by_step = figure.subplots(1, 2)
    stream = [row for row in rows if row.level == "stream"]
    # A logarithmic axis has no zero: an exact result stands at the smallest float64 step.
    by_layer.plot(range(len(stream)), [max(row.relative, 1e-17) for row in stream], marker="o")
    by_layer.axhline(stream[0].bound, color="#d1495b", linestyle="--", label="bound")
    by_layer.set_xlabel("layer")
    by_layer.set_ylabel("relative error of the stream")
    by_layer.xaxis.get_major_locator().set_params(integer=True)
    for kind in ("parameters", "optimizer"):
        worst = [
            max(row.relative for row in rows if row.level == f"update {step}" and row.name.startswith(kind))
            for step in UPDATES
        ]
        by_step.plot(UPDATES, [max(error, 1e-17) for error in worst], marker="o", label=kind)
    by_step.set_xlabel("updates")
    by_step.set_ylabel("largest relative error")
    for axes in (by_layer, by_step):
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
<tr><th>level</th><th>tensor</th><th>max abs</th><th>relative</th><th>ulp</th><th>cosine</th><th>bound</th>
<th></th></tr>
{% for row in rows %}
<tr{% if not row.ok %} class="bad"{% endif %}><td>{{ row.level }}</td><td>{{ row.name }}</td>
<td>{{ "%.1e" % row.max_abs }}</td><td>{{ "%.1e" % row.relative }}</td><td>{{ "%.1f" % row.ulp }}</td>
<td>{{ "%.12f" % row.cosine }}</td><td>{{ "%.0e" % row.bound }}</td><td>{{ "ok" if row.ok else "MISSED" }}</td></tr>
{% endfor %}
</table>
{% endmacro %}
<h1>{{ name }}</h1>
<p>{{ "Every bound holds." if ok else "A bound is missed." }}</p>
<img alt="Error by layer and by training step" src="data:image/png;base64,{{ picture }}">
<h2>The row of each level that is nearest to its bound</h2>
{{ table(worst) }}
<h2>Every row</h2>
{{ table(rows) }}
</body>
</html>
"""
)
