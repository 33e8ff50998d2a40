"""scripts/parity.py and scripts/convert.py as a person types them, and the rows that the first prints."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from twins import SMALL, SMALL_3, random_parameters  # noqa: E402

from minigpt_bridge.levels import UPDATES, Row, compare  # noqa: E402
from minigpt_bridge.parity_report import as_json, as_page  # noqa: E402
from minigpt_jax.formats.model_files import write_beside  # noqa: E402
from minigpt_jax.formats.names import to_outside  # noqa: E402
from minigpt_torch import model as torch_rooms  # noqa: E402

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def script(name, *arguments, cwd):
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def weights(tmp_path):
    """A small model as a MiniMind file."""
    from minigpt_torch.pth import write_pth

    path = tmp_path / "small.pth"
    write_pth(path, to_outside(random_parameters(SMALL, dtype="float32"), SMALL), dtype="float32", tied=True)
    write_beside(path, SMALL, None)
    return path


def test_a_3_series_model_is_the_same_function_in_float32():
    """Up to the gradients: AdamW's first update divides a gradient by its own size, and so its rounding as well."""
    rows = compare(SMALL_3, random_parameters(SMALL_3), precision="float32", rows=2, time=19)
    assert {row.level for row in rows} == {
        "sub-module", "stream", "logits", "loss", "gradient", *(f"update {number}" for number in UPDATES),
    }  # fmt: skip
    assert [row for row in rows if not row.level.startswith("update") and not row.ok] == []


def test_a_planted_fault_is_seen_in_the_row_where_it_acts(monkeypatch):
    honest = torch_rooms.rotate
    monkeypatch.setattr(torch_rooms, "rotate", lambda x, cos, sin: honest(x, cos, -sin))
    rows = compare(SMALL, random_parameters(SMALL), precision="float64", rows=2, time=19)
    missed = [row.name for row in rows if row.level == "sub-module" and not row.ok]
    assert missed == [f"layers.{number}.{part}" for number in range(2) for part in ("self_attn", "block")]


def test_the_command_compares_a_file_and_writes_json_and_a_page(weights, tmp_path):
    arguments = ("--model", str(weights), "--max-seq-len", "16", "--json", "rows.json", "--html", "page.html")
    done = script("parity.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "rows.json").read_text())
    assert figures["ok"] is True
    assert {"level", "name", "max_abs", "relative", "ulp", "cosine", "bound", "ok"} == set(figures["rows"][0])
    page = (tmp_path / "page.html").read_text()
    assert page.count("MISSED") == 0
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_missed_bound_is_told_in_json_and_page():
    rows = [
        Row(level, f"{kind}.one", max_abs=1e-16, relative=1e-16, ulp=1.0, cosine=1.0, bound=1e-12)
        for level in ("stream", *(f"update {number}" for number in UPDATES))
        for kind in ("parameters", "optimizer")
    ]
    assert as_json(rows)["ok"] is True
    assert "MISSED" not in as_page(rows, title="a model")
    rows[3] = dataclasses.replace(rows[3], relative=1.0)
    assert as_json(rows)["ok"] is False
    assert "MISSED" in as_page(rows, title="a model")


def test_a_wrong_model_is_one_line(tmp_path):
    done = script("parity.py", "--model", "nowhere", cwd=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (2, "error: there is no model at nowhere")


def test_convert_says_who_read_the_file_back(weights, tmp_path):
    done = script("convert.py", str(weights), "copy.safetensors", "--to", "safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "copy.safetensors: read back by safetensors.torch; largest logit difference" in done.stdout
    again = script("convert.py", str(weights), "copy.safetensors", "--to", "safetensors", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.strip().startswith("error: copy.safetensors exists already")
