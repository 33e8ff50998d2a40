"""Weights that travel: every pair of formats, bit for bit; files of others; and what is refused."""

import dataclasses
import json
import subprocess
import sys
from itertools import pairwise, permutations

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import save_file  # noqa: E402
from twins import random_parameters  # noqa: E402

from minigpt_bridge import convert as convert_room  # noqa: E402
from minigpt_bridge.convert import convert, jax_logits  # noqa: E402
from minigpt_bridge.models import open_model  # noqa: E402
from minigpt_jax.config import PRESETS, ModelConfig  # noqa: E402
from minigpt_jax.errors import UserError  # noqa: E402
from minigpt_jax.formats.model_files import write_beside  # noqa: E402
from minigpt_jax.formats.names import flatten, from_outside, table, to_outside  # noqa: E402
from minigpt_jax.initialization import initial_parameters  # noqa: E402
from minigpt_jax.tokenizer import load_tokenizer  # noqa: E402

SERIES_2 = ModelConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=10, intermediate_size=48,
    max_position_embeddings=128,
)  # fmt: skip
SERIES_3 = dataclasses.replace(
    SERIES_2, qk_norm=True, norm_weight_before_cast=True, rms_norm_eps=1e-6, tie_word_embeddings=False
)
PATHS = {"torch": "model.pth", "safetensors": "model.safetensors", "hf": "hugging-face", "run": "run"}


def written(directory, config, *, dtype="float32"):
    """A .pth file of a random model, with shape and tokenizer beside it; and its parameters."""
    from minigpt_torch.pth import write_pth

    directory.mkdir(exist_ok=True)
    parameters = random_parameters(config, dtype="float32")
    path = directory / "source.pth"
    write_pth(path, to_outside(parameters, config), dtype=dtype, tied=config.tie_word_embeddings)
    write_beside(path, config, load_tokenizer())
    return path, parameters


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


@pytest.mark.parametrize("config", [SERIES_2, SERIES_3], ids=["2-series", "3-series"])
def test_out_and_back_is_bit_identical(config):
    parameters = random_parameters(config, dtype="float32")
    assert_same(from_outside(to_outside(parameters, config), config, where="here"), parameters)


def test_everything_that_is_wrong_is_said_at_once():
    tensors = to_outside(random_parameters(SERIES_2, dtype="float32"), SERIES_2)
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(UserError) as error:
        from_outside(tensors, SERIES_2, where="file.pth")
    for part in (
        "file.pth",
        "model.norm.weight is missing",
        "model.layers.2.mlp.up_proj.weight is unexpected",
        "model.layers.1.mlp.up_proj.weight is [32, 48], not [48, 32]",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_that_wrappers_lengthen_are_understood(prefix):
    parameters = random_parameters(SERIES_2, dtype="float32")
    tensors = {prefix + name: tensor for name, tensor in to_outside(parameters, SERIES_2).items()}
    tensors["model.freqs_cos"] = np.zeros(3, np.float32)
    assert_same(from_outside(tensors, SERIES_2, where="here"), parameters)


def test_a_head_that_differs_is_no_tied_head():
    tensors = to_outside(random_parameters(SERIES_2, dtype="float32"), SERIES_2)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    with pytest.raises(UserError, match=r"lm_head.weight differs from model.embed_tokens.weight, which"):
        from_outside(tensors, SERIES_2, where="here")


# --- Every pair of formats ---


EVERY_FORMAT = ("hf", "run", "safetensors", "torch")
EVERY_PAIR = (*EVERY_FORMAT, "run", "hf", "safetensors", "run", "torch", "safetensors", "hf", "torch", "hf")


def test_the_chain_of_formats_has_every_ordered_pair_in_it():
    assert set(pairwise(("torch", *EVERY_PAIR))) == set(permutations(PATHS, 2))


@pytest.mark.parametrize(
    ("config", "formats"), [(SERIES_2, EVERY_PAIR), (SERIES_3, EVERY_FORMAT)], ids=["2-series", "3-series"]
)
def test_a_model_goes_through_every_format_bit_for_bit(tmp_path, config, formats):
    path, parameters = written(tmp_path, config)
    for number, to in enumerate(formats):
        target = tmp_path / str(number) / PATHS[to]
        done = convert(path, target, to=to)
        assert done.logit_difference <= convert_room.LARGEST_DIFFERENCE
        assert done.rounding == 0
        model = open_model(target)
        assert model.config == config
        assert model.require_tokenizer().sha256 == load_tokenizer().sha256
        assert_same(model.read_parameters(), parameters)
        path = target


def test_float16_is_written_as_minimind_does_and_read_as_float32(tmp_path):
    path, parameters = written(tmp_path, SERIES_2)
    done = convert(path, tmp_path / "half.pth", to="torch", dtype="float16")
    state = torch.load(done.path, weights_only=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert done.rounding > 0
    halves = jax.tree.map(lambda leaf: leaf.astype(np.float16).astype(np.float32), parameters)
    assert_same(open_model(done.path).read_parameters(), halves)


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


def test_a_fresh_process_loads_the_directory_with_transformers_and_continues_greedily_alike(tmp_path):
    path, parameters = written(tmp_path, SERIES_2)
    convert(path, tmp_path / "hf", to="hf")
    program = (
        "import sys, json, torch; from transformers import AutoModelForCausalLM, AutoTokenizer;"
        "t = AutoTokenizer.from_pretrained(sys.argv[1]); m = AutoModelForCausalLM.from_pretrained(sys.argv[1]);"
        "ids = t('Hello', return_tensors='pt', add_special_tokens=False).input_ids;"
        "out = m.generate(ids, attention_mask=torch.ones_like(ids), max_length=None, max_new_tokens=12,"
        " do_sample=False, eos_token_id=None);"
        "chat = t.apply_chat_template([{'role': 'user', 'content': 'Hi'}], tokenize=False, add_generation_prompt=True);"
        "print(json.dumps([out[0].tolist(), chat]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "hf")],
        capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    theirs, chat = json.loads(done.stdout.splitlines()[-1])
    ids = load_tokenizer().encode("Hello")
    while len(ids) < len(theirs):
        ids.append(int(jax_logits(SERIES_2, parameters, np.array([ids]))[0, -1].argmax()))
    assert theirs == ids
    assert chat.startswith("<|im_start|>")


# --- Shape and tokenizer ---


def test_a_bare_minimind_file_is_known_by_its_tensors(tmp_path):
    from minigpt_torch.pth import write_pth

    config = PRESETS["tiny"]
    parameters = initial_parameters(config, initializer="xavier", seed=0)
    write_pth(tmp_path / "bare.pth", to_outside(parameters, config), dtype="float32", tied=True)
    model = open_model(tmp_path / "bare.pth")
    assert model.config == config
    with pytest.raises(UserError, match="has no tokenizer in it or beside it"):
        convert(tmp_path / "bare.pth", tmp_path / "hf", to="hf")
    assert not (tmp_path / "hf").exists()


def test_a_config_that_contradicts_the_weights_is_an_error(tmp_path):
    path, _ = written(tmp_path, SERIES_2)
    write_beside(path, dataclasses.replace(SERIES_2, num_layers=3), load_tokenizer())
    with pytest.raises(UserError, match=r"layers.2.input_layernorm.weight is missing"):
        open_model(path).read_parameters()


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
    with pytest.raises(UserError, match=message):
        open_model(tmp_path / "hf")


# --- What goes wrong ---


@pytest.mark.parametrize("to", list(PATHS))
def test_a_failed_check_leaves_nothing_behind(tmp_path, monkeypatch, to):
    path, _ = written(tmp_path / "source", SERIES_2)
    honest = convert_room.jax_logits
    monkeypatch.setattr(convert_room, "jax_logits", lambda *args: honest(*args) + np.random.default_rng().random())
    with pytest.raises(UserError, match="nothing was kept"):
        convert(path, tmp_path / PATHS[to], to=to)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_nothing_is_overwritten(tmp_path):
    path, _ = written(tmp_path, SERIES_2)
    with pytest.raises(UserError, match=r"source.pth exists already"):
        convert(path, path, to="torch")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"not a model", "is not a state dict that torch.save wrote"), (b"", "is not a state dict that torch.save wrote")],
)
def test_a_damaged_file_is_one_line(tmp_path, content, message):
    (tmp_path / "bad.pth").write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_model(tmp_path / "bad.pth")


def test_weights_of_no_preset_ask_for_their_shape(tmp_path):
    save_file({"model.norm.weight": np.ones(3, np.float32)}, tmp_path / "odd.safetensors")
    with pytest.raises(UserError, match=r"carries no config .* write its shape .* into .*odd.safetensors.json"):
        open_model(tmp_path / "odd.safetensors")
