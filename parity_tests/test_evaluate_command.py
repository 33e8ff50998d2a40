"""scripts/evaluate.py as a person types it, in both frameworks."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from small_runs import as_typed, small_config, timeless_metrics, train  # noqa: E402

from minigpt_bridge import measure  # noqa: E402
from minigpt_bridge.engines import choose_engine  # noqa: E402
from minigpt_jax.formats.adapters import Adapter, write_peft  # noqa: E402
from minigpt_jax.formats.names import map_leaves  # noqa: E402
from minigpt_jax.initialization import initial_adapters  # noqa: E402
from minigpt_jax.lora_config import LoraConfig  # noqa: E402
from minigpt_jax.run_directory import RunDirectory  # noqa: E402

pytestmark = pytest.mark.usefixtures("run_environment")

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "evaluate.py"
CONTRACT = {"loss", "perplexity", "bits_per_byte", "tokens", "accuracy", "ci95"}
EXAM = 'id,question,A,B,C,D,answer\n0,"Which, if any?",cat,dog,mat,bird,C\n1,猫坐在哪里？,垫子,椅子,桌子,地上,A\n'


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    long = "the old red cat saw big dogs run past houses " * 7
    records = [{"text": f"{number}: {long}"} for number in range(3)] + [{"text": "今天天气很好。"}]
    (directory / "held_out.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = small_config(directory, val_data=(str(directory / "held_out.jsonl"),), steps=4)
    train(config, choose_engine("torch").make)
    (directory / "exam.csv").write_text(EXAM, encoding="utf-8")
    return directory / "run"


def evaluated(run, *arguments):
    done = as_typed(SCRIPT, str(run), *arguments, "--json", "out.json", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    figures = json.loads((run.parent / "out.json").read_text())
    assert set(figures) >= CONTRACT
    return figures, done.stdout


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_loss_is_the_one_that_training_printed(run, backend):
    printed = timeless_metrics(run)[-1]
    arguments = ("--data", "held_out.jsonl", "--max-seq-len", "32", "--batch-size", "3", "--backend", backend)
    figures, shown = evaluated(run, *arguments)
    assert figures["loss"] == pytest.approx(printed["val_loss"], rel=1e-6)
    assert figures["bits_per_byte"] == pytest.approx(printed["val_bits_per_byte"], rel=1e-6)
    assert figures["accuracy"] is figures["ci95"] is None
    assert list(figures["by_source"]) == ["held_out.jsonl"]
    assert set(figures["by_language"]) == {"en", "zh"}
    assert f"{figures['loss']:.4f}" in shown


def test_both_frameworks_print_the_same(run):
    arguments = ("--task", "multiple-choice", "--data", "exam.csv", "--ask", "letter")
    shown = [evaluated(run, *arguments, "--backend", backend)[1] for backend in ("jax", "torch")]
    assert shown[0] == shown[1]


def test_multiple_choice_gives_accuracy_and_its_interval(run):
    figures, shown = evaluated(run, "--task", "multiple-choice", "--data", "exam.csv")
    assert figures["items"] == 2
    assert figures["chance"] == 0.25
    assert figures["loss"] is None
    low, high = figures["ci95"]
    assert low <= figures["accuracy"] <= high
    assert set(figures["by_language"]) == {"en", "zh"}
    assert set(figures["by_subject"]) == {"exam"}
    assert "chance is 25.0%: " in shown


def test_few_shot_examples_come_from_a_file_of_their_own(run):
    (run.parent / "examples.csv").write_text(EXAM + "2,How many?,1,2,3,4,D\n", encoding="utf-8")
    arguments = ("--task", "multiple-choice", "--data", "exam.csv", "--few-shot-data", "examples.csv", "--few-shot")
    without, _ = evaluated(run, "--task", "multiple-choice", "--data", "exam.csv")
    figures, _ = evaluated(run, *arguments, "1")
    assert figures["tokens"] == without["tokens"]
    done = as_typed(SCRIPT, str(run), *arguments, "2", cwd=run.parent)
    assert "that are not evaluated themselves; it has 1" in done.stderr


def test_questions_are_answered_to_the_letter_or_not(run, monkeypatch):
    monkeypatch.setattr(measure, "QUESTIONS", 10)
    figures, shown = evaluated(run, "--task", "questions", "--backend", "torch")
    assert (figures["items"], figures["accuracy"]) == (10, 0.0)
    assert figures["ci95"] == [0.0, pytest.approx(0.2775, abs=1e-4)]
    assert {name: row["items"] for name, row in figures["by_language"].items()} == {"en": 5, "zh": 5}
    assert "chance" not in shown


def test_an_adapter_changes_the_loss_alike_in_both_frameworks(run):
    model, _ = RunDirectory(run).read_config()
    lora = LoraConfig(rank=2, alpha=16.0, dropout=0.0, targets=("q_proj", "down_proj"))
    tree = map_leaves(lambda leaf: leaf + 0.3, initial_adapters(model, lora, seed=1))
    adapter = run.parent / "adapter"
    adapter.mkdir(exist_ok=True)
    write_peft(adapter, Adapter("", lora, tree))
    without, _ = evaluated(run, "--data", "held_out.jsonl")
    losses = [
        evaluated(run, "--data", "held_out.jsonl", "--lora", str(adapter), "--backend", backend)[0]["loss"]
        for backend in ("jax", "torch")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert abs(losses[0] - without["loss"]) > 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a model: a run directory"),
        (("nowhere",), "there is no model at nowhere"),
        (("RUN", "--data", "nowhere.jsonl"), "cannot read nowhere.jsonl: No such file"),
        (("RUN", "--data", "."), ". holds no .jsonl, .jsonl.gz, .jsonl.zst file"),
        (("RUN", "--task", "multiple-choice", "--data", "."), ". holds no .jsonl, .jsonl.gz, .jsonl.zst, .csv file"),
        (("RUN", "--task", "exam"), "--task"),
        (("RUN", "--batch-size", "0"), "--batch-size must be at least 1, got 0"),
        (("RUN", "--max-seq-len", "1"), "--max-seq-len must be at least 2, got 1"),
        (("RUN", "--few-shot", "-1"), "--few-shot must be at least 0, got -1"),
        (("RUN", "--ask", "letter"), "--ask, --few-shot and --few-shot-data go with --task multiple-choice"),
        (("RUN", "--chat"), "--chat asks questions"),
        (("RUN", "--task", "questions", "--data", "a.jsonl"), "--task questions asks the sample's own"),
        (("RUN", "--task", "multiple-choice", "--few-shot", "2"), "--few-shot N takes its examples from"),
        (("RUN", "--json", "nowhere/a.json"), "--json nowhere/a.json: the directory nowhere is"),
        (("RUN", "--lora", "RUN"), "holds no adapter"),
    ],
)
def test_a_mistake_gives_one_line_and_exit_code_2(run, tmp_path, arguments, message):
    done = as_typed(SCRIPT, *(str(run) if part == "RUN" else part for part in arguments), cwd=tmp_path)
    assert done.returncode == 2
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in error
    assert not list(tmp_path.iterdir())
