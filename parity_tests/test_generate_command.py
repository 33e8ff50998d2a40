"""scripts/generate.py as a person types it, in both frameworks."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from small_runs import as_typed, small_config, train  # noqa: E402

from minigpt_bridge import decoders  # noqa: E402
from minigpt_bridge.models import open_model  # noqa: E402
from minigpt_jax.formats.adapters import Adapter, write_peft  # noqa: E402
from minigpt_jax.formats.names import digest, map_leaves  # noqa: E402
from minigpt_jax.generation import GenerationConfig, generate  # noqa: E402
from minigpt_jax.initialization import initial_adapters  # noqa: E402
from minigpt_jax.lora_config import LoraConfig  # noqa: E402
from minigpt_jax.run_directory import RunDirectory  # noqa: E402
from minigpt_jax.tokenizer import load_tokenizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("run_environment")

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "generate.py"
SHORT = ("--max-new-tokens", "6")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    train(small_config(directory, steps=2))
    return directory / "run"


def generated(run, *arguments):
    done = as_typed(SCRIPT, str(run), *arguments, *SHORT, "--json", "out.json", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    rows = json.loads((run.parent / "out.json").read_text())
    assert all(set(row) == {"prompt", "ids", "text", "finish_reason", "tokens_per_second"} for row in rows)
    return rows, done.stdout


@pytest.mark.parametrize("options", [("--temperature", "0"), ("--temperature", "2", "--top-p", "1", "--seed", "7")])
def test_both_frameworks_write_the_same(run, options):
    arguments = ("--prompt", "one", "--prompt", "two words", "--samples", "2", *options)
    ours, theirs = (generated(run, *arguments, "--backend", backend)[0] for backend in ("jax", "torch"))
    for mine, other in zip(ours, theirs, strict=True):
        assert {**mine, "tokens_per_second": 0} == {**other, "tokens_per_second": 0}
    assert [row["prompt"] for row in ours] == ["one", "one", "two words", "two words"]
    assert all(len(row["ids"]) == 6 and row["finish_reason"] == "length" for row in ours)
    assert (ours[0]["ids"] == ours[1]["ids"]) == (options[1] == "0")
    assert ours[0]["text"] == load_tokenizer().decode(ours[0]["ids"], skip_special_tokens=True)


def test_a_single_text_is_printed_as_it_comes(run):
    rows, printed = generated(run, "--prompt", "one")
    assert printed == rows[0]["text"] + "\n"


def test_chat_reads_the_template(run):
    plain, _ = generated(run, "--prompt", "one", "--temperature", "0")
    asked, _ = generated(run, "--prompt", "one", "--temperature", "0", "--chat", "--system", "Be brief.")
    assert plain[0]["ids"] != asked[0]["ids"]


def test_an_adapter_is_applied_without_merging(run, tmp_path):
    model, _ = RunDirectory(run).read_config()
    lora = LoraConfig(rank=2, alpha=64.0, dropout=0.0, targets=("q_proj", "down_proj"))
    tree = map_leaves(lambda leaf: leaf + 0.3, initial_adapters(model, lora, seed=1))
    (tmp_path / "adapter").mkdir()
    write_peft(tmp_path / "adapter", Adapter("", lora, tree))
    arguments = ("--prompt", "one", "--temperature", "0")
    without, _ = generated(run, *arguments)
    rows = [
        generated(run, *arguments, "--lora", str(tmp_path / "adapter"), "--backend", backend)[0][0]["ids"]
        for backend in ("jax", "torch")
    ]
    assert rows[0] == rows[1] != without[0]["ids"]


@pytest.mark.parametrize("is_other", [False, True])
def test_an_adapter_of_another_base_is_said(run, monkeypatch, is_other):
    model, _ = RunDirectory(run).read_config()
    lora = LoraConfig(rank=2, alpha=4.0, dropout=0.0, targets=("q_proj",))
    known = "other weights" if is_other else digest(open_model(run).read_parameters())
    adapter = Adapter("out/lora", lora, initial_adapters(model, lora, seed=1), base="out/sft", base_digest=known)
    monkeypatch.setattr(decoders, "open_adapter", lambda _: adapter)
    note = decoders.open_decoder(str(run), adapter="out/lora").note
    assert note == (f"out/lora was trained on out/sft, whose weights are not those of {run}" if is_other else None)


def test_without_a_prompt_a_conversation_begins(run, monkeypatch):
    lines = iter(["Hello", "/params"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or (_ for _ in ()).throw(EOFError))
    done = as_typed(SCRIPT, str(run), *SHORT, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    assert "(6 tokens, " in done.stdout
    assert "max_new_tokens=6" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a model: a run directory"),
        (("nowhere",), "there is no model at nowhere"),
        (("RUN", "--prompt", ""), "--prompt is empty"),
        (("RUN", "--prompt", "a", "--samples", "0"), "--samples must be at least 1, got 0"),
        (("RUN", "--prompt", "a", "--temperature", "-1"), "--temperature must be 0 or more, got -1.0"),
        (("RUN", "--prompt", "a", "--system", "b"), "--system opens a conversation; add --chat"),
        (("RUN", "--json", "out.json"), "--json writes what follows a --prompt; give one"),
        (("RUN", "--prompt", "a", "--json", "nowhere/a.json"), "--json nowhere/a.json: the directory nowhere is"),
        (("RUN", "--prompt", "a b c d e f", "--context", "3"), "tokens, and there is room for 2; shorten it"),
        (("RUN", "--prompt", "a", "--lora", "RUN"), "holds no adapter"),
        (("RUN", "--prompt", "a", "--top-p", "much"), "--top-p"),
    ],
)
def test_a_mistake_gives_one_line_and_exit_code_2(run, tmp_path, arguments, message):
    done = as_typed(SCRIPT, *(str(run) if part == "RUN" else part for part in arguments), cwd=tmp_path)
    assert done.returncode == 2
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("int8", [False, True])
def test_ids_beyond_the_tokenizer_are_never_written(run, monkeypatch, backend, int8):
    opened = open_model(run)
    named, size = opened.config.vocab_size, opened.config.vocab_size + 64
    table = opened.read_parameters()["embed_tokens"]["embedding"]
    padded = {**opened.read_parameters(), "embed_tokens": {"embedding": np.concatenate([table, 100 * table[:64]])}}

    class Padded:
        config, note = replace(opened.config, vocab_size=size), None

        require_tokenizer = staticmethod(opened.require_tokenizer)
        read_parameters = staticmethod(lambda: padded)

    monkeypatch.setattr(decoders, "open_model", lambda _: Padded)
    ready = decoders.open_decoder("padded", backend=backend, int8=int8)
    config = GenerationConfig(max_new_tokens=20, temperature=2.0, top_p=1.0)
    (done,) = generate(ready.decoder, ready.tokenizer, [[1, 5, 9]], config, context=64)
    assert ready.config.vocab_size == named
    assert max(done.ids) < named
