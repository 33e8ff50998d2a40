import base64
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from minigpt_jax.config import TrainConfig, preset
from minigpt_jax.config_json import to_json
from minigpt_jax.errors import UserError
from minigpt_jax.report import SHOWN_EVENTS, last_values, plot_losses, write_report
from minigpt_jax.tracking import EventsLog, MetricsLog


@pytest.fixture
def run_dir(tmp_path):
    """A run of 100 updates, validated at 50 and 100."""
    log = MetricsLog(tmp_path)
    for step in range(0, 101, 10):
        log.write({"loss": 8.0 - step / 20, "learning_rate": 1e-3, "tokens": 4000 * step}, step=step)
        if step in (50, 100):
            log.write({"val_loss": 8.5 - step / 20, "val_bits_per_byte": 2.5}, step=step)
    return tmp_path


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved while the test ran."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep_and_save(figure, *args, **kwargs):
        figures.append(figure)
        return save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep_and_save)
    return figures


def lines(figure: Figure) -> dict[str, np.ndarray]:
    """Each labelled line of the losses as [points, 2]."""
    return {line.get_label(): np.stack(line.get_data(), axis=1) for line in figure.axes[0].lines}


class Page(HTMLParser):
    """The tags, the attributes and the text of an HTML page."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def report(run_dir: Path, **changes) -> Page:
    arguments = {"config": to_json(TrainConfig()), "model": to_json(preset("tiny")), "samples": []} | changes
    return Page(write_report(run_dir, **arguments).read_text(encoding="utf-8"))


# --- loss.png ---


def test_both_losses_stand_over_the_tokens_read(run_dir, drawn):
    plot_losses(run_dir)
    points = lines(drawn[0])
    assert drawn[0].axes[0].get_xlabel() == "training tokens"
    assert points["training"][[0, -1]].tolist() == [[0, 8.0], [400_000, 3.0]]
    assert points["validation"].tolist() == [[200_000, 6.0], [400_000, 3.5]]


def test_steps_are_the_axis_when_no_tokens_were_counted(tmp_path, drawn):
    MetricsLog(tmp_path).write({"loss": 2.0}, step=7)
    plot_losses(tmp_path)
    assert drawn[0].axes[0].get_xlabel() == "step"
    assert lines(drawn[0])["training"].tolist() == [[7, 2.0]]


def test_the_line_breaks_where_the_loss_was_not_finite(tmp_path, drawn):
    log = MetricsLog(tmp_path)
    for step, loss in enumerate([3.0, math.nan, 2.0]):
        log.write({"loss": loss}, step=step)
    plot_losses(tmp_path)
    assert np.isnan(lines(drawn[0])["training"][:, 1]).tolist() == [False, True, False]


def test_the_learning_rate_has_its_own_axis(run_dir, drawn):
    plot_losses(run_dir)
    second = drawn[0].axes[1]
    assert second.get_ylabel() == "learning rate (dashed)"
    assert set(second.lines[0].get_ydata()) == {1e-3}


def test_the_title_names_the_run_and_its_last_losses(run_dir, drawn):
    plot_losses(run_dir)
    assert drawn[0].axes[0].get_title(loc="left") == f"{run_dir.name}: training 3.000, validation 3.500"


def test_the_image_is_a_png_of_readable_size(run_dir):
    height, width, _ = imread(plot_losses(run_dir)).shape
    assert (width, height) == (1080, 600)


@pytest.mark.parametrize("name", ["小猫", "a $x^$ b", "emoji \U0001f600"])
def test_any_name_of_a_run_is_drawn_without_a_warning(tmp_path, name):
    run_dir = tmp_path / name
    run_dir.mkdir()
    MetricsLog(run_dir).write({"loss": 2.0}, step=1)
    assert plot_losses(run_dir).stat().st_size > 0  # pytest makes every warning an error


def test_a_run_without_any_loss_gives_a_plot_that_says_so(tmp_path, drawn):
    plot_losses(tmp_path)
    assert [text.get_text() for text in drawn[0].axes[0].texts] == ["no loss logged yet"]


def test_a_damaged_metrics_file_is_named(run_dir):
    path = run_dir / "metrics.jsonl"
    path.write_text("oops\n" + path.read_text())
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1"):
        plot_losses(run_dir)


def test_drawing_uses_no_pyplot():
    code = (
        "import sys, tempfile, pathlib\n"
        "from minigpt_jax.report import plot_losses\n"
        "plot_losses(pathlib.Path(tempfile.mkdtemp()))\n"
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


# --- report.html ---


def test_the_page_holds_the_plot_and_needs_no_other_file(run_dir):
    page = report(run_dir)
    (link,) = page.links
    image = base64.b64decode(link.removeprefix("data:image/png;base64,"))
    assert image == (run_dir / "loss.png").read_bytes()
    assert not {"script", "link", "iframe"} & set(page.tags)


def test_the_page_shows_configuration_model_and_last_metrics(run_dir):
    text = re.sub(r"\s+", " ", report(run_dir).text)
    for part in (
        "val_bits_per_byte 2.5",
        "hidden_size 128",
        "schedule cosine",
        "tokens 400,000",
        "tie_word_embeddings yes",
    ):
        assert part.replace(" ", "") in text.replace(" ", "")


def test_the_last_value_of_a_metric_is_its_last_finite_one():
    rows = [{"step": 1, "val_loss": 2.5}, {"step": 2, "loss": 3.0}, {"step": 3, "loss": None}]
    assert list(last_values(rows).items()) == [("step", 3), ("loss", 3.0), ("val_loss", 2.5)]


def test_what_the_model_wrote_is_shown_as_text_and_never_as_markup(run_dir):
    written = "<script>alert(1)</script> & {{ 7 * 7 }} 你好\n<b>"
    page = report(run_dir, samples=[("<i>从前</i>", written)])
    assert f"<i>从前</i>{written}" in page.text
    assert not {"script", "b", "i"} & set(page.tags)


def test_a_lone_surrogate_in_a_sample_does_not_lose_the_report(run_dir):
    assert "\\ud800" in report(run_dir, samples=[("", "a\ud800b")]).text


def test_events_are_listed_with_their_details(run_dir):
    EventsLog(run_dir).write("non_finite", step=30, records=[4, 9], reason="<loss>")
    text = report(run_dir).text
    assert "non_finite" in text
    assert '{"records": [4, 9], "reason": "<loss>"}' in text


def test_a_page_of_many_events_shows_the_last_ones_and_counts_the_rest(run_dir):
    log = EventsLog(run_dir)
    for step in range(SHOWN_EVENTS + 3):
        log.write(f"event_{step}_", step=step)
    text = report(run_dir).text
    assert "3 earlier ones are in events.jsonl" in text
    assert "event_2_" not in text
    assert f"event_{SHOWN_EVENTS + 2}_" in text


def test_a_run_stopped_before_its_first_line_still_gets_a_page(tmp_path):
    assert "Nothing was measured." in report(tmp_path).text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "report.html"]
