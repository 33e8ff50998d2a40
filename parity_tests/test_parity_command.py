"""scripts/parity.py and scripts/convert.py as a person types them, and the rows that the first prints."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

from small_runs import as_typed  # noqa: E402
from twins import SMALL, SMALL_3, random_parameters  # noqa: E402

from minigpt_bridge import stage_levels  # noqa: E402
from minigpt_bridge.levels import UPDATES, Row, compare  # noqa: E402
from minigpt_bridge.parity_report import as_json, as_page, as_text  # noqa: E402
from minigpt_bridge.stage_levels import STAGES, compare_stages  # noqa: E402
from minigpt_jax import model as jax_rooms  # noqa: E402
from minigpt_jax.formats.model_files import write_beside  # noqa: E402
from minigpt_jax.formats.names import to_outside  # noqa: E402
from minigpt_torch import model as torch_rooms  # noqa: E402
from minigpt_torch import objective as torch_objective  # noqa: E402

ONE_BLOCK = dataclasses.replace(SMALL, num_layers=1)
ONE_BLOCK_3 = dataclasses.replace(SMALL_3, num_layers=1)
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def script(name, *arguments, cwd):
    return as_typed(SCRIPTS / name, *arguments, cwd=cwd)


@pytest.fixture
def weights(tmp_path):
    """A small model as a MiniMind file."""
    from minigpt_torch.pth import write_pth

    path = tmp_path / "small.pth"
    write_pth(path, to_outside(random_parameters(ONE_BLOCK, dtype="float32"), ONE_BLOCK), dtype="float32", tied=True)
    write_beside(path, ONE_BLOCK, None)
    return path


def test_a_3_series_model_is_the_same_function_in_float32(many_small_steps):
    rows = compare(ONE_BLOCK_3, random_parameters(ONE_BLOCK_3), precision="float32", rows=2, time=19)
    assert {row.level for row in rows} == {
        "batch", "sub-module", "stream", "logits", "loss", "gradient", "optimizer", "trajectory",
        *(f"update {number}" for number in UPDATES),
    }  # fmt: skip
    assert [row for row in rows if not row.ok] == []
    # One side cannot be near to the truth, and the other far from it, where they are near to each other.
    assert all(row.jax_error <= row.bound + row.torch_error for row in rows if row.bound)


def test_a_planted_fault_is_seen_in_the_row_where_it_acts(many_small_steps, monkeypatch):
    honest = torch_rooms.rotate
    monkeypatch.setattr(torch_rooms, "rotate", lambda x, cos, sin: honest(x, cos, -sin))
    rows = compare(ONE_BLOCK, random_parameters(ONE_BLOCK), precision="float64", rows=2, time=19)
    missed = [row.name for row in rows if row.level == "sub-module" and not row.ok]
    assert missed == ["layers.0.self_attn", "layers.0"]


def test_every_stage_is_compared_from_its_loss_to_its_last_update_in_float32(many_small_steps):
    rows = compare_stages(SMALL_3, random_parameters(SMALL_3), precision="float32", time=19)
    assert [row for row in rows if not row.ok] == []
    assert {row.level for row in rows} == {*STAGES, "lora merge"}
    for stage in STAGES:
        kinds = {row.name.partition(":")[0] for row in rows if row.level == stage}
        assert kinds == {"loss", "gradient", "trajectory", "update 10"}
    assert {row.name for row in rows if row.level == "dpo" and row.name.startswith("loss")} == {
        "loss: terms", "loss: mean loss", "loss: chosen_reward", "loss: rejected_reward", "loss: reward_accuracy",
        "loss: reward_margin",
    }  # fmt: skip


def test_a_fault_in_the_loss_of_dpo_is_missed_there_and_not_in_sft(many_small_steps, monkeypatch):
    honest = torch_objective.preference_loss

    def too_dear(*sums, beta, **options):
        return honest(*sums, beta=1.01 * beta, **options)

    monkeypatch.setattr(torch_objective, "preference_loss", too_dear)
    rows = compare_stages(ONE_BLOCK, random_parameters(ONE_BLOCK), precision="float64", time=19, stages=("sft", "dpo"))
    assert {row.level for row in rows if not row.ok} == {"dpo"}


def test_a_fault_in_merging_is_missed_where_adapters_are_merged(many_small_steps, monkeypatch):
    honest = stage_levels.merge
    monkeypatch.setattr(
        stage_levels, "merge", lambda base, low_rank, lora: honest(honest(base, low_rank, lora), low_rank, lora)
    )
    rows = compare_stages(ONE_BLOCK, random_parameters(ONE_BLOCK), precision="float64", time=19, stages=["lora"])
    missed = [row for row in rows if not row.ok]
    assert {row.level for row in missed} == {"lora merge"}
    assert len(missed) == 2


def test_the_command_compares_a_file_and_writes_json_and_a_page(many_small_steps, weights, tmp_path):
    arguments = ("--model", str(weights), "--max-seq-len", "16", "--json", "rows.json", "--html", "page.html")
    done = script("parity.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "rows.json").read_text())
    assert figures["ok"] is True
    assert {
        "level", "name", "max_abs", "relative", "ulp", "cosine", "bound", "jax_error", "torch_error", "ratio", "ok",
    } == set(figures["rows"][0])  # fmt: skip
    assert {*STAGES, "lora merge"} < {row["level"] for row in figures["rows"]}
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
    for worse in (1.0, float("nan")):
        rows[3] = dataclasses.replace(rows[3], relative=worse)
        assert as_json(rows)["ok"] is False
        assert "MISSED" in as_page(rows, title="a model")
        assert "MISSED" in as_text(rows)


def test_a_first_update_that_rounding_alone_moves_is_explained():
    row = Row("gradient", "one", max_abs=0.0, relative=0.0, ulp=0.0, cosine=1.0, bound=1e-5)
    rows = [row, dataclasses.replace(row, level="optimizer"), dataclasses.replace(row, level="update 1", relative=1e-4)]
    rows[2] = dataclasses.replace(rows[2], jax_error=3e-4, torch_error=2e-4)
    assert "JAX is up to 3.0e-04, PyTorch 2.0e-04" in as_text(rows)
    # An update that is wrong by equal gradients too is no rounding.
    rows[1] = dataclasses.replace(rows[1], relative=1e-4)
    assert "rounding" not in as_text(rows)


def test_a_product_that_is_summed_in_bfloat16_is_missed_in_the_row_where_it_acts(monkeypatch):
    def low(self, x, *, adapters=None):
        product = jax.nn.silu(self.gate_proj(x)) * self.up_proj(x)
        kernel = self.down_proj.kernel[...].astype(x.dtype)
        total = jnp.zeros((len(x), kernel.shape[1]), x.dtype)
        for start in range(0, len(kernel), 4):
            total = total + product[:, start : start + 4] @ kernel[start : start + 4]
        return total

    monkeypatch.setattr(jax_rooms.FeedForward, "__call__", low)
    rows = compare(ONE_BLOCK, random_parameters(ONE_BLOCK), precision="bfloat16", rows=2, time=19)
    missed = [row.name for row in rows if row.level == "sub-module" and not row.ok]
    assert missed == ["layers.0.mlp"]


def test_find_says_by_its_exit_code_whether_something_differs(many_small_steps, weights, monkeypatch):
    arguments = ("--model", str(weights), "--max-seq-len", "12", "--find")
    done = script("parity.py", *arguments, cwd=weights.parent)
    assert (done.returncode, done.stdout[:16]) == (0, "3 training steps")
    honest = torch_rooms.rotate
    monkeypatch.setattr(torch_rooms, "rotate", lambda x, cos, sin: honest(x, cos, -sin))
    done = script("parity.py", *arguments, cwd=weights.parent)
    assert done.returncode == 1
    assert done.stdout.startswith("step 1, forward, layer 0, ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "0"), "--rows must be at least 1, got 0"),
        (("--max-seq-len", "-3"), "--max-seq-len must be at least 1, got -3"),
        (("--find", "--html", "a.html"), "--find prints one finding, in float64; leave --json, --html and --dtype out"),
    ],
)
def test_a_wrong_option_is_one_line(arguments, message, tmp_path):
    done = script("parity.py", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (2, f"error: {message}")
    assert list(tmp_path.iterdir()) == []


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
