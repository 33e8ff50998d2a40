"""scripts/bench.py: sides that take turns, ratios that mean what they say, and the command at tiny size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from minigpt_bridge.bench import data, decode, startup, timing, train
from minigpt_bridge.bench.limits import Limits, measure_limits
from minigpt_jax.config import ModelConfig
from minigpt_jax.formats.names import flatten
from minigpt_jax.initialization import initial_parameters
from minigpt_jax.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SMALL = ModelConfig(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=48, tie_word_embeddings=False
)
LIMITS = Limits(matmul_gflops=100.0, read_gb_per_s=10.0)


@pytest.fixture(scope="module")
def parameters():
    drawn = initial_parameters(SMALL, initializer="xavier", seed=2)
    drawn["embed_tokens"]["embedding"] *= 50  # or one token follows for ever
    return drawn


def test_sides_take_turns_and_every_other_round_goes_backwards():
    order = []
    sides = {name: lambda name=name: order.append(name) for name in "abc"}
    taken = timing.interleave(sides, rounds=2)
    assert "".join(order) == "abc" + "abc" + "cba"
    assert {name: len(seconds) for name, seconds in taken.items()} == {"a": 2, "b": 2, "c": 2}


def test_a_ratio_above_one_says_that_ours_is_better():
    ours, peer = [1.0, 2.0, 1.0], [2.0, 3.0, 4.0]
    as_rates = timing.rates("", ours, peer, work=12, unit="tokens/s")
    as_seconds = timing.seconds("", ours, peer)
    assert (as_rates.ours, as_rates.peer) == (12, 4)
    assert (as_seconds.ours, as_seconds.peer) == (1, 3)
    for row in (as_rates, as_seconds):
        assert (row.ratio, row.ratio_min, row.ratio_max) == (2, 1.5, 4)


def test_a_ratio_is_that_of_a_round_and_not_of_medians():
    # A machine that is ten times slower in one round is so for both sides.
    row = timing.rates("", [1.0, 10.0, 1.0], [2.0, 20.0, 2.0], work=1, unit="")
    assert (row.ratio_min, row.ratio_max) == (2, 2)


def test_the_bound_counts_every_weight_that_a_token_reads_once(parameters):
    leaves = flatten(parameters)
    table = leaves["embed_tokens.embedding"].nbytes
    assert decode._bytes(parameters) == sum(leaf.nbytes for leaf in leaves.values()) - table
    tied = {name: branch for name, branch in parameters.items() if name != "lm_head"}
    assert decode._bytes(tied) == decode._bytes(parameters)  # the table is the head


def test_every_side_decodes_the_same_tokens(parameters):
    sides = decode._sides(SMALL, parameters, load_tokenizer())
    prompts = decode._prompts(SMALL, 2)
    ours = sides["ours"](prompts, 12)
    assert [len(row) for row in ours] == [12, 12]
    assert len({*ours[0], *ours[1]}) > 6
    assert sides["twin"](prompts, 12) == ours
    assert sides["transformers"](prompts, 12) == ours


@pytest.mark.slow
def test_decoding_is_compared_with_each_peer(parameters, monkeypatch):
    monkeypatch.setattr(decode, "BATCHES", (1, 2))
    monkeypatch.setattr(decode, "NEW_TOKENS", 4)
    rows = list(decode.decode_rows(SMALL, parameters, load_tokenizer(), LIMITS, rounds=1))
    assert [row.name for row in rows] == [
        "decode, 1 row, transformers",
        "decode, 1 row, twin",
        "decode, 1 row, int8 against float32",
        "decode, 1 row, of the bandwidth bound",
        "decode, 2 rows, transformers",
        "decode, 2 rows, twin",
        "decode, 2 rows, int8 against float32",
        "first token after 32, transformers",
    ]
    bound = next(row for row in rows if "bound" in row.name)
    assert bound.peer == pytest.approx(10e9 / decode._bytes(parameters))


def test_a_training_step_is_compared_with_eager_pytorch(parameters, monkeypatch):
    monkeypatch.setattr(train, "ROWS", 1)
    monkeypatch.setattr(train, "TIME", 16)
    monkeypatch.setattr(train, "which", lambda _: None)  # torch.compile takes most of a minute
    rows = list(train.train_rows(SMALL, parameters, LIMITS, rounds=1))
    assert [row.name for row in rows] == ["train, 1 x 16, PyTorch, eager", "train, 1 x 16, of the matrix-product rate"]
    assert all(row.ours > 0 for row in rows)


def test_both_engines_train_alike_on_the_batch_that_is_timed(parameters, monkeypatch, tmp_path):
    monkeypatch.setattr(train, "ROWS", 1)
    monkeypatch.setattr(train, "TIME", 16)
    monkeypatch.setattr(train, "which", lambda _: None)
    batch = train._batch(SMALL)
    losses = [
        engine.read([engine.train_step(batch)])[0].loss_sum
        for engine in train._engines(SMALL, parameters, tmp_path).values()
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_data_is_compared_with_the_library_and_with_batches_that_are_there(parameters, monkeypatch):
    monkeypatch.setattr(data, "CORPUS_BYTES", 1)
    monkeypatch.setattr(data, "ROWS", 1)
    monkeypatch.setattr(data, "TIME", 16)
    rows = list(data.data_rows(SMALL, parameters, load_tokenizer(), rounds=1))
    assert [row.name for row in rows] == [
        "data, text into a cache, tokenizers alone",
        "data, 1 x 16 steps on loaded batches, at hand",
    ]
    assert all(row.ours > 0 for row in rows)


def test_no_text_of_the_corpus_that_is_timed_comes_twice(monkeypatch):
    monkeypatch.setattr(data, "CORPUS_BYTES", 2_000_000)
    texts = data._texts()
    assert len(texts) == len(set(texts))  # a duplicate would be left out of the cache, and cost nothing
    assert sum(len(text.encode()) for text in texts) > 2_000_000 * 0.9


def python(statement):
    return subprocess.Popen([sys.executable, "-c", statement], stderr=subprocess.PIPE, text=True)


def test_a_run_that_ends_before_its_first_step_is_no_measurement(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("the validation before the first step\n")
    with pytest.raises(RuntimeError, match="no data today"):
        startup._wait_for_step(python("raise SystemExit('no data today')"), metrics)


def test_the_first_step_is_the_second_line_of_the_metrics(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    writes = f"open({str(metrics)!r}, 'w').write('validation\\nstep\\n'); import time; time.sleep(60)"
    with python(writes) as process:
        startup._wait_for_step(process, metrics)
        process.kill()
    assert metrics.read_text().count("\n") == 2


@pytest.mark.slow
def test_startup_is_compared_with_the_twin():
    rows = list(startup.startup_rows("tiny", rounds=1))
    assert [row.name for row in rows] == ["startup, tiny to the first step, twin", "startup, imports, twin"]
    assert all(row.ours > 0 for row in rows)


def test_limits_are_measured():
    limits = measure_limits()
    assert limits.matmul_gflops > 0
    assert limits.read_gb_per_s > 0


def test_json_has_limits_and_rows():
    row = timing.seconds("first token", [1.0], [2.0])
    assert timing.as_json(LIMITS, [row]) == {
        "limits": {"matmul_gflops": 100.0, "read_gb_per_s": 10.0},
        "rows": [
            {
                "name": "first token", "ours": 1.0, "peer": 2.0, "unit": "s",
                "ratio": 2.0, "ratio_min": 2.0, "ratio_max": 2.0,
            }
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["decode", "--rounds", "0"], "--rounds must be at least 1"),
        (["decode", "--model", "nowhere"], "nowhere"),
        (["--json", "missing/rows.json"], "--json missing/rows.json"),
        (["sleep"], "sleep"),
        (["startup", "--model", "."], "--model must be a preset (tiny,"),
    ],
)
def test_a_mistake_is_one_line(arguments, said):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench.py", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_command_writes_what_it_measured(tmp_path):
    target = tmp_path / "rows.json"
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench.py", "--model", "tiny", "--rounds", "1", "--json", target],
        check=True,
    )
    written = json.loads(target.read_text())
    assert {row["name"].split(",")[0] for row in written["rows"]} == {
        "train",
        "decode",
        "first token after 32",
        "data",
        "startup",
    }
