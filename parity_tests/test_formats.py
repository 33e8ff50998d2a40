"""Weights that travel: every pair of formats, bit for bit; files of others; and what is refused."""

import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from contextlib import contextmanager
from itertools import pairwise, permutations
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import save_file  # noqa: E402
from twins import random_parameters  # noqa: E402

from minigpt_bridge import convert as convert_room  # noqa: E402
from minigpt_bridge.convert import convert  # noqa: E402
from minigpt_bridge.models import open_model, read_orbax_tree  # noqa: E402
from minigpt_jax.config import PRESETS, ModelConfig, TrainConfig  # noqa: E402
from minigpt_jax.errors import UserError  # noqa: E402
from minigpt_jax.formats import names  # noqa: E402
from minigpt_jax.formats.checkpoints import SafetensorsStore  # noqa: E402
from minigpt_jax.formats.hugging_face import config_from_hugging_face  # noqa: E402
from minigpt_jax.formats.model_files import write_beside  # noqa: E402
from minigpt_jax.formats.names import flatten, from_outside, map_leaves, table, to_outside, unflatten  # noqa: E402
from minigpt_jax.generate import JaxDecoder  # noqa: E402
from minigpt_jax.generation import greedy  # noqa: E402
from minigpt_jax.initialization import initial_parameters  # noqa: E402
from minigpt_jax.launch import launch  # noqa: E402
from minigpt_jax.tokenizer import Tokenizer, load_tokenizer  # noqa: E402
from minigpt_torch.pth import write_pth  # noqa: E402

SERIES_2 = ModelConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=10, intermediate_size=48,
    max_position_embeddings=128,
)  # fmt: skip
SERIES_3 = dataclasses.replace(
    SERIES_2, qk_norm=True, norm_weight_before_cast=True, rms_norm_eps=1e-6, tie_word_embeddings=False
)
PATHS = {"torch": "model.pth", "safetensors": "model.safetensors", "hf": "hugging-face", "run": "run"}
DTYPES = ("float64", "float32", "float16", "bfloat16")


def written(directory, config, *, parameters=None):
    """A .safetensors file of a model (random, float32), with shape and tokenizer beside it; and its parameters."""
    directory.mkdir(exist_ok=True)
    parameters = random_parameters(config, dtype="float32") if parameters is None else parameters
    path = directory / "source.safetensors"
    save_file(to_outside(parameters, config), path)
    write_beside(path, config, load_tokenizer())
    return path, parameters


@pytest.fixture
def bare(tmp_path):
    """A weight file of the preset tiny with nothing beside it."""
    config = PRESETS["tiny"]
    parameters = initial_parameters(config, initializer="xavier", seed=0)
    write_pth(tmp_path / "bare.pth", to_outside(parameters, config), dtype="float32", tied=True)
    return tmp_path / "bare.pth"


class Interrupted:
    """An engine during whose start somebody presses Ctrl-C."""

    def __init__(self, *arguments, **options):
        pass

    def init(self, trained, frozen=None):
        raise KeyboardInterrupt

    def close(self):
        pass


def convert_as_typed(*arguments, **options):
    """What scripts/convert.py does after it has read its command line."""
    script = runpy.run_path(str(Path(__file__).resolve().parents[1] / "scripts" / "convert.py"))
    script["main"](script["Convert"](*map(str, arguments), **options))


@contextmanager
def refused(message):
    """A UserError of one line."""
    with pytest.raises(UserError, match=message) as error:
        yield
    assert "\n" not in str(error.value)


@contextmanager
def nothing_left(directory):
    """The directory holds the same before and after, to the byte."""

    def contents():
        return {path: path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}

    before = contents()
    yield
    assert contents() == before


def exchanged(leaves):
    """The gates under the names of the ups, and the other way round."""
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    return {re.sub("gate_proj|up_proj", lambda found: other[found[0]], name): leaf for name, leaf in leaves.items()}


def assert_same(ours, theirs):
    ours, theirs = flatten(ours), flatten(theirs)
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        assert leaf.dtype == theirs[path].dtype, path
        assert leaf.tobytes() == theirs[path].tobytes(), path


# --- The table ---


@pytest.mark.parametrize("name", list(PRESETS))
def test_the_table_has_exactly_the_tensors_of_a_model(name):
    config = dataclasses.replace(PRESETS[name], vocab_size=64)
    parameters = flatten(initial_parameters(config, initializer="xavier", seed=0))
    assert {entry.path: entry.shape for entry in table(config)} == {k: leaf.shape for k, leaf in parameters.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [SERIES_2, SERIES_3], ids=["2-series", "3-series"])
def test_out_and_back_is_bit_identical(config, dtype):
    parameters = random_parameters(config, dtype=dtype)
    assert_same(from_outside(to_outside(parameters, config), config, where="here"), parameters)


def test_everything_that_is_wrong_is_said_at_once():
    tensors = to_outside(random_parameters(SERIES_2, dtype="float32"), SERIES_2)
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"]
    with refused(
        "file.pth does not fit its config: model.norm.weight is missing; "
        "model.layers.2.mlp.up_proj.weight is unexpected; "
        r"model.layers.1.mlp.up_proj.weight is \[32, 48\], not \[48, 32\]$"
    ):
        from_outside(tensors, SERIES_2, where="file.pth")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_that_wrappers_lengthen_are_understood(prefix):
    parameters = random_parameters(SERIES_2, dtype="float32")
    tensors = {prefix + name: tensor for name, tensor in to_outside(parameters, SERIES_2).items()}
    tensors["model.freqs_cos"] = np.zeros(3, np.float32)
    assert_same(from_outside(tensors, SERIES_2, where="here"), parameters)


def test_a_head_that_differs_is_no_tied_head():
    tensors = to_outside(random_parameters(SERIES_2, dtype="float32"), SERIES_2)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    with refused("lm_head.weight differs from model.embed_tokens.weight, which"):
        from_outside(tensors, SERIES_2, where="here")


# --- Every pair of formats ---


EVERY_FORMAT = ("hf", "run", "safetensors", "torch")
EVERY_PAIR = (*EVERY_FORMAT, "run", "hf", "safetensors", "run", "torch", "safetensors", "hf", "torch", "hf")


def test_the_chain_of_formats_has_every_ordered_pair_in_it():
    assert set(pairwise(EVERY_PAIR)) == set(permutations(PATHS, 2))


@pytest.mark.parametrize(
    ("config", "formats"), [(SERIES_2, EVERY_PAIR), (SERIES_3, EVERY_FORMAT)], ids=["2-series", "3-series"]
)
def test_a_model_goes_through_every_format_bit_for_bit(tmp_path, bound_float32, config, formats):
    path, parameters = written(tmp_path, config)
    for number, to in enumerate(formats):
        target = tmp_path / str(number) / PATHS[to]
        done = convert(path, target, to=to)
        assert done.logit_difference <= bound_float32.sub_module
        assert done.rounding is None
        model = open_model(target)
        assert model.config == config
        assert model.require_tokenizer().sha256 == load_tokenizer().sha256
        assert_same(model.read_parameters(), parameters)
        path = target


def test_float16_is_written_as_minimind_does_and_goes_on_bit_for_bit(tmp_path):
    path, parameters = written(tmp_path, SERIES_2)
    done = convert(path, tmp_path / "half.pth", to="torch", dtype="float16")
    state = torch.load(done.path, weights_only=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert done.rounding > 0
    halves = map_leaves(lambda leaf: leaf.astype(np.float16).astype(np.float32), parameters)
    for to in ("hf", "safetensors", "torch"):
        done = convert(done.path, tmp_path / to / PATHS[to], to=to, dtype="float16")
        assert done.rounding is None
        assert_same(open_model(done.path).read_parameters(), halves)


def test_float64_is_read_as_it_is_and_its_loss_in_a_file_is_said(tmp_path, capsys):
    path, parameters = written(tmp_path, SERIES_2, parameters=random_parameters(SERIES_2, dtype="float64"))
    assert_same(open_model(path).read_parameters(), parameters)
    done = convert(path, tmp_path / "run", to="run")
    assert 1e-9 < done.rounding < 1e-6
    convert_as_typed(path, tmp_path / "hf", to="hf")
    assert f"float32 rounds the weights, which moves them by {done.rounding:.1e}" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_a_checkpoint_is_read_back_bit_for_bit(tmp_path, dtype):
    trees = {"parameters": random_parameters(SERIES_3, dtype=dtype), "optimizer": {"updates": np.int32(7)}}
    store = SafetensorsStore(tmp_path, keep=1)
    store.save(7, trees, progress={}, val_loss=None)
    for name, tree in trees.items():
        assert_same(store.load(7, name), tree)


def test_bfloat16_files_of_others_are_read_in_a_process_that_has_not_loaded_jax(tmp_path):
    from safetensors.torch import save_file as save_torch

    tensors = to_outside(random_parameters(SERIES_2, dtype="float32"), SERIES_2)
    halves = {name: torch.from_numpy(tensor).bfloat16() for name, tensor in tensors.items()}
    save_torch(halves, tmp_path / "half.safetensors")
    write_beside(tmp_path / "half.safetensors", SERIES_2, None)
    program = (
        "import sys; from minigpt_bridge.models import open_model; from minigpt_jax.formats.names import to_outside;"
        "model = open_model(sys.argv[1]); tree = model.read_parameters(); assert 'jax' not in sys.modules;"
        "import numpy; numpy.savez(sys.argv[2], **to_outside(tree, model.config))"
    )
    subprocess.run(
        [sys.executable, "-c", program, "half.safetensors", "read.npz"], cwd=tmp_path, check=True, timeout=90
    )
    with np.load(tmp_path / "read.npz") as read:
        for name, tensor in halves.items():
            assert read[name].dtype == np.float32
            assert np.array_equal(read[name], tensor.float().numpy()), name


PROMPTS = [
    "Hello", "The cat", "Once upon a time", "12 + 30 =", "Why is the sky blue?", "A", "In the year 1900",
    "def f(x):", "She said: \"", "Water boils at", "\u4f60\u597d", "\u4ece\u524d\u6709\u4e00\u5ea7\u5c71",
    "\u732b", "\u5929\u4e3a\u4ec0\u4e48\u662f\u84dd\u7684\uff1f", "\u4e2d\u56fd\u7684\u9996\u90fd\u662f",
    "\u6625\u5929", "\u8bf7\u4ecb\u7ecd\u4e00\u4e0b\u4f60\u81ea\u5df1\u3002", "1900\u5e74", "\u201c",
    "\u6c34\u5728\u4e00\u767e\u5ea6",
]  # fmt: skip
NEW_TOKENS = 64


def test_a_fresh_process_loads_the_directory_with_transformers_and_continues_greedily_alike(tmp_path):
    path, parameters = written(tmp_path, SERIES_2)
    convert(path, tmp_path / "hf", to="hf")
    program = (
        "import sys, json, torch; from transformers import AutoModelForCausalLM, AutoTokenizer;"
        "t = AutoTokenizer.from_pretrained(sys.argv[1]); m = AutoModelForCausalLM.from_pretrained(sys.argv[1]);"
        "rows = [t(p, return_tensors='pt', add_special_tokens=False).input_ids for p in json.loads(sys.argv[2])];"
        f"out = [m.generate(r, attention_mask=torch.ones_like(r), max_length=None, max_new_tokens={NEW_TOKENS},"
        " do_sample=False, eos_token_id=None)[0, r.shape[1]:].tolist() for r in rows];"
        "chat = t.apply_chat_template([{'role': 'user', 'content': 'Hi'}], tokenize=False, add_generation_prompt=True);"
        "print(json.dumps([[r[0].tolist() for r in rows], out, chat]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "hf"), json.dumps(PROMPTS)],
        capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    ids, theirs, chat = json.loads(done.stdout.splitlines()[-1])
    assert ids == [load_tokenizer().encode(prompt) for prompt in PROMPTS]
    decoder = JaxDecoder(SERIES_2, map_leaves(jnp.asarray, parameters))
    assert greedy(decoder, ids, max_new_tokens=NEW_TOKENS, stop_id=-1) == theirs
    assert chat.startswith("<|im_start|>")


# --- Shape and tokenizer ---


def test_a_bare_minimind_file_is_known_by_its_tensors(bare):
    assert open_model(bare).config == PRESETS["tiny"]
    with nothing_left(bare.parent), refused("has no tokenizer in it or beside it"):
        convert(bare, bare.parent / "new" / "hf", to="hf")


def test_what_a_bare_file_does_not_show_is_said_where_it_is_used(bare, tmp_path, monkeypatch, capsys):
    said = r"bare.pth carries no config: .* tiny, whose number of heads \(4\), rope_theta \(1e\+06\) and rms_norm_eps"
    convert_as_typed(bare, tmp_path / "copy.pth", to="torch")
    assert re.search(said, capsys.readouterr().out)
    assert open_model(tmp_path / "copy.pth").note is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data.jsonl").write_text('{"text": "a few words"}\n' * 60)
    load_tokenizer().save(tmp_path / "shipped")
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(init_from="bare.pth", data=("data.jsonl",), tokenizer="shipped", steps=1)
    with pytest.raises(KeyboardInterrupt):
        launch(config, given=(), make_engine=Interrupted, accelerator=None, open_model=open_model)
    assert re.search(said, capsys.readouterr().out)


def test_a_config_that_contradicts_the_weights_is_an_error(tmp_path):
    path, _ = written(tmp_path, SERIES_2)
    write_beside(path, dataclasses.replace(SERIES_2, num_layers=3), load_tokenizer())
    with refused("layers.2.input_layernorm.weight is missing"):
        open_model(path).read_parameters()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_layers": 3}, "layers.2.input_layernorm.weight is missing"),
        ({"hidden_size": 64}, r".*norm.weight is \[32\], not \[64\]"),
    ],
)
def test_a_run_whose_checkpoint_is_of_another_shape_is_an_error(tmp_path, change, problem):
    path, _ = written(tmp_path, SERIES_2)
    convert(path, tmp_path / "run", to="run")
    config = tmp_path / "run" / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"model": fields["model"] | change}))
    with refused(f"checkpoints/0 does not fit its config: {problem}"):
        open_model(tmp_path / "run").read_parameters()


@pytest.mark.parametrize("kind", [transformers.LlamaConfig, transformers.Qwen3Config])
def test_where_a_hugging_face_config_is_silent_transformers_defaults_hold(kind):
    stated = {"vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 96}
    theirs = kind(**stated, num_attention_heads=64)
    fields = {**stated, "model_type": theirs.model_type, "num_attention_heads": 64}
    ours = config_from_hugging_face(fields, where="here")
    for name in ("head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope type 'yarn' is not supported"),
        ({"rope_theta": 5.0}, "rope_theta is 5.0 in one place and 1000000.0 in another"),
    ],
)
def test_a_hugging_face_config_that_is_another_function_is_refused(tmp_path, change, message):
    path, _ = written(tmp_path, SERIES_2)
    convert(path, tmp_path / "hf", to="hf")
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with refused(message):
        open_model(tmp_path / "hf")


# --- What goes wrong ---


@pytest.mark.parametrize("to", list(PATHS))
def test_a_fault_in_what_is_written_is_found_and_nothing_is_left(tmp_path, monkeypatch, to):
    path, _ = written(tmp_path, SERIES_2)
    outside, save = convert_room.to_outside, SafetensorsStore.save

    def save_exchanged(store, step, trees, **options):
        save(store, step, {**trees, "parameters": unflatten(exchanged(flatten(trees["parameters"])))}, **options)

    monkeypatch.setattr(convert_room, "to_outside", lambda *arguments: exchanged(outside(*arguments)))
    monkeypatch.setattr(SafetensorsStore, "save", save_exchanged)
    with nothing_left(tmp_path), refused("back with logits that differ by .*; nothing was kept"):
        convert(path, tmp_path / "new" / "deep" / PATHS[to], to=to)


@pytest.mark.parametrize("to", ["torch", "safetensors", "hf"])
def test_a_fault_in_the_table_of_names_is_found(tmp_path, monkeypatch, to):
    path, _ = written(tmp_path, SERIES_2)
    entries = {entry.name: entry for entry in table(SERIES_2)}
    wrong = [dataclasses.replace(entry, name=name) for name, entry in exchanged(entries).items()]
    monkeypatch.setattr(names, "table", lambda config: wrong)
    with nothing_left(tmp_path), refused("nothing was kept"):
        convert(path, tmp_path / PATHS[to], to=to)


def test_a_tied_head_that_was_written_wrong_is_found(tmp_path, monkeypatch):
    def write_wrong(path, tensors, *, dtype, tied):
        write_pth(path, tensors | {"lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}, dtype=dtype, tied=False)

    path, _ = written(tmp_path, SERIES_2)
    monkeypatch.setattr(convert_room, "write_pth", write_wrong)
    with nothing_left(tmp_path), refused("torch.load read .* nothing was kept"):
        convert(path, tmp_path / "model.pth", to="torch")


def test_a_tokenizer_that_transformers_reads_otherwise_is_found(tmp_path, monkeypatch):
    honest = Tokenizer.save

    def save_without_merges(tokenizer, directory):
        honest(tokenizer, directory)
        fields = json.loads((directory / "tokenizer.json").read_text())
        fields["model"]["merges"] = []
        (directory / "tokenizer.json").write_text(json.dumps(fields))

    path, _ = written(tmp_path, SERIES_2)
    monkeypatch.setattr(Tokenizer, "save", save_without_merges)
    with nothing_left(tmp_path), refused("transformers reads the tokenizer .* otherwise: 'Hello"):
        convert(path, tmp_path / "hf", to="hf")


@pytest.mark.parametrize("to", list(PATHS))
def test_a_full_disk_is_said_and_nothing_is_left(tmp_path, to):
    resource = pytest.importorskip("resource")
    path, _ = written(tmp_path, SERIES_2)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with nothing_left(tmp_path), refused("cannot write"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limit[1]))
        try:
            convert(path, tmp_path / "new" / PATHS[to], to=to)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7e4, "layers.1.mlp.up_proj.kernel has values beyond float16, which ends at 65504; leave --dtype out"),
        (np.nan, "kernel holds values that are not finite"),
    ],
)
def test_weights_that_the_file_cannot_hold_are_not_the_readers_fault(tmp_path, value, message):
    parameters = random_parameters(SERIES_2, dtype="float32")
    parameters["layers"][1]["mlp"]["up_proj"]["kernel"][0, 0] = value
    path, _ = written(tmp_path, SERIES_2, parameters=parameters)
    with nothing_left(tmp_path), refused(message):
        convert(path, tmp_path / "half.pth", to="torch", dtype="float16")


@pytest.mark.parametrize("taken", ["model.pth", "model.pth.json", "model.pth.tokenizer"])
def test_nothing_is_overwritten(tmp_path, taken):
    path, _ = written(tmp_path, SERIES_2)
    (tmp_path / taken).write_text("mine")
    with nothing_left(tmp_path), refused(f"{taken} exists already"):
        convert(path, tmp_path / "model.pth", to="torch")


@pytest.mark.parametrize(
    ("name", "to", "dtype", "message"),
    [
        ("model.pt", "torch", "float32", "--to torch writes a .pth file"),
        ("model.pth", "hf", "float32", "--to hf writes a directory"),
        ("run", "run", "float16", "a run directory holds float32; leave --dtype out"),
        ("hf", "hf", "float32", "the extra hf: "),
    ],
)
def test_what_cannot_be_asked_for_is_refused(tmp_path, monkeypatch, name, to, dtype, message):
    path, _ = written(tmp_path, SERIES_2)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with nothing_left(tmp_path), refused(message):
        convert(path, tmp_path / "new" / name, to=to, dtype=dtype)


def test_a_shape_that_transformers_has_not_is_refused(tmp_path):
    path, _ = written(tmp_path, dataclasses.replace(SERIES_2, num_heads=6))
    with nothing_left(tmp_path), refused(r"Llama takes no hidden_size \(32\) that is not a multiple"):
        convert(path, tmp_path / "hf", to="hf")


def test_what_killed_saves_left_is_removed_and_blocks_none(tmp_path):
    for process in (1, os.getpid()):
        (tmp_path / f".3.{process}.tmp").mkdir()
        (tmp_path / f".3.{process}.tmp" / "parameters.safetensors").write_bytes(b"half")
    trees = {"parameters": {"a": np.ones(2)}, "optimizer": {"updates": np.int32(3)}}
    SafetensorsStore(tmp_path, keep=1).save(3, trees, progress={}, val_loss=None)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_only_the_one_warning_of_orbax_is_silenced():
    class Store:
        def load(self, step, name, abstract):
            warnings.warn("Sharding info not provided when restoring.", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
            return {}

    with pytest.warns(UserWarning, match="something else") as said:
        read_orbax_tree(Store(), 0, "parameters")
    assert len(said) == 1


@pytest.mark.parametrize("content", [b"not a model", b""])
def test_a_damaged_file_is_one_line(tmp_path, content):
    (tmp_path / "bad.pth").write_bytes(content)
    with refused("is not a state dict that torch.save wrote"):
        open_model(tmp_path / "bad.pth")


def test_weights_of_no_preset_ask_for_their_shape(tmp_path):
    save_file({"model.norm.weight": np.ones(3, np.float32)}, tmp_path / "odd.safetensors")
    with refused(r"carries no config .* write its shape .* into .*odd.safetensors.json"):
        open_model(tmp_path / "odd.safetensors")
