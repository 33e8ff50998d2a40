"""Low-rank adapters: one function with one set of gradients in both frameworks, PEFT as outside witness, and merging.

B batch  T time  S = B*T positions
"""

import re
import runpy
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flax import nnx  # noqa: E402
from twins import SMALL, SMALL_3, jax_batch, random_batch, random_parameters, to_numpy, torch_batch, torch_model  # noqa: E402

from minigpt_bridge import convert as convert_room  # noqa: E402
from minigpt_bridge.convert import convert, convert_adapter  # noqa: E402
from minigpt_bridge.models import open_adapter, open_model  # noqa: E402
from minigpt_jax.adapter_tree import merge  # noqa: E402
from minigpt_jax.cli import parse  # noqa: E402
from minigpt_jax.errors import UserError  # noqa: E402
from minigpt_jax.formats.adapters import Adapter, to_minimind, write_peft  # noqa: E402
from minigpt_jax.formats.model_files import write_beside  # noqa: E402
from minigpt_jax.formats.names import flatten, map_leaves, to_outside  # noqa: E402
from minigpt_jax.initialization import initial_adapters  # noqa: E402
from minigpt_jax.lora import adapter_masks  # noqa: E402
from minigpt_jax.lora import layer_adapters as jax_adapters  # noqa: E402
from minigpt_jax.lora_config import TARGETS, LoraConfig  # noqa: E402
from minigpt_jax.loss import next_token_loss as jax_loss  # noqa: E402
from minigpt_jax.model import model_graph  # noqa: E402
from minigpt_torch.lora import adapter_tensors, draw_adapter_masks  # noqa: E402
from minigpt_torch.lora import layer_adapters as torch_adapters  # noqa: E402
from minigpt_torch.loss import next_token_loss as torch_loss  # noqa: E402
from minigpt_torch.pth import write_pth  # noqa: E402

LORA = LoraConfig(rank=4, alpha=6.0, dropout=0.25, targets=tuple(TARGETS))
FEW = replace(LORA, targets=("o_proj", "down_proj"))
"""Two layers with inputs of unlike width: every mask takes a while to compile."""
SQUARE = LoraConfig(rank=4, alpha=6.0, dropout=0.0, targets=("q_proj", "o_proj"))
CASES = [(SMALL, "float64"), (SMALL, "float32"), (SMALL_3, "float64")]
IDS = ["2-series-float64", "2-series-float32", "3-series-float64"]


def random_adapters(config, lora=LORA, *, dtype="float64", seed=0):
    """Initial adapters moved by noise, so that no B is 0."""
    rng = np.random.default_rng(seed)
    start = initial_adapters(config, lora, seed=seed, dtype="float64")
    return map_leaves(lambda leaf: (leaf + 0.1 * rng.standard_normal(leaf.shape)).astype(dtype), start)


@cache
def compiled(config, lora, dtype):
    """(base, adapters, batch, key) -> ((loss, logits), gradients of the adapters alone)."""
    graph = model_graph(config, dtype=jnp.dtype(dtype), kernel="reference")

    def loss(adapters, base, batch, key):
        model = nnx.merge(graph, base)
        low_rank = jax_adapters(adapters, lora, dropout_key=key)
        options = {"segment_ids": batch.segment_ids, "positions": batch.positions, "adapters": low_rank}
        hidden = model(batch.tokens, **options)
        total = jax_loss(hidden, model.head, batch.targets.reshape(-1), batch.loss_weights.reshape(-1))
        return total, model.logits(hidden)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def in_jax(config, base, adapters, batch, *, dtype, lora=LORA, key=None):
    """(loss, logits, gradients by path)."""
    trees = (jax.tree.map(jnp.asarray, tree) for tree in (adapters, base))
    (loss, logits), gradients = compiled(config, lora, dtype)(*trees, jax_batch(batch), key)
    return float(loss), np.asarray(logits), flatten(gradients)


def in_torch(config, base, adapters, batch, *, dtype, lora=LORA, masks=None):
    """The same of the twin, whose base takes no gradient."""
    model, arrays = torch_model(config, base, dtype=dtype).requires_grad_(False), torch_batch(batch)
    tree = adapter_tensors(adapters)
    low_rank = torch_adapters(tree, lora, dropout_masks=masks)
    options = {"segment_ids": arrays.segment_ids, "positions": arrays.positions, "adapters": low_rank}
    hidden = model(arrays.tokens, **options)
    loss = torch_loss(hidden, model.head, arrays.targets.reshape(-1), arrays.loss_weights.reshape(-1))
    leaves = flatten(tree)
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())
    return loss.item(), to_numpy(model.logits(hidden)), {path: leaf.numpy() for path, leaf in gradients.items()}


def torch_logits(config, base, batch, *, dtype, adapters=None):
    model, arrays = torch_model(config, base, dtype=dtype), torch_batch(batch)
    low_rank = None if adapters is None else torch_adapters(adapter_tensors(adapters), LORA)
    options = {"segment_ids": arrays.segment_ids, "positions": arrays.positions, "adapters": low_rank}
    return to_numpy(model.logits(model(arrays.tokens, **options)))


# --- The same function ---


@pytest.mark.parametrize(("config", "dtype"), CASES, ids=IDS)
def test_logits_loss_and_every_gradient_of_the_adapters_are_the_same(
    config, dtype, float64, bound, bound_float32, relative_error
):
    limit = bound if dtype == "float64" else bound_float32
    base, adapters = random_parameters(config, dtype=dtype), random_adapters(config, dtype=dtype)
    batch = random_batch(config)
    loss, logits, gradients = in_jax(config, base, adapters, batch, dtype=dtype)
    their_loss, their_logits, theirs = in_torch(config, base, adapters, batch, dtype=dtype)
    assert relative_error(logits, their_logits) <= limit.sub_module
    assert abs(loss - their_loss) / their_loss <= limit.gradient
    assert gradients.keys() == theirs.keys() == flatten(adapters).keys()
    assert max(relative_error(gradients[path], theirs[path]) for path in theirs) <= limit.gradient
    assert min(np.abs(gradient).max() for gradient in theirs.values()) > 1e3 * limit.gradient


def test_dropout_with_the_same_masks_is_the_same_function(float64, bound, relative_error):
    base, adapters, batch = random_parameters(SMALL), random_adapters(SMALL, FEW), random_batch(SMALL)
    key = jax.random.key(5)
    masks = adapter_masks(SMALL, FEW, num_positions=batch[0].size, dropout_key=key)
    given = [torch.from_numpy(np.array(mask)) for mask in masks]
    options = {"dtype": "float64", "lora": FEW}
    _, logits, gradients = in_jax(SMALL, base, adapters, batch, **options, key=key)
    _, their_logits, theirs = in_torch(SMALL, base, adapters, batch, **options, masks=given)
    assert relative_error(logits, their_logits) <= bound.sub_module
    assert max(relative_error(gradients[path], theirs[path]) for path in theirs) <= bound.gradient
    assert relative_error(logits, in_torch(SMALL, base, adapters, batch, **options)[1]) > 1e-3


def test_masks_that_torch_draws_are_those_that_the_adapters_take():
    theirs = draw_adapter_masks(SMALL, FEW, num_positions=400, generator=torch.Generator().manual_seed(1))
    ours = adapter_masks(SMALL, FEW, num_positions=400, dropout_key=jax.random.key(0))
    assert [tuple(mask.shape) for mask in theirs] == [mask.shape for mask in ours]
    assert all(mask.dtype == torch.bool for mask in theirs)
    assert all(abs(mask.double().mean().item() - 0.75) < 5 * (0.1875 / mask.numel()) ** 0.5 for mask in theirs)


@pytest.mark.parametrize(("config", "dtype"), CASES, ids=IDS)
def test_merged_weights_give_the_logits_of_base_and_adapter(
    config, dtype, float64, bound, bound_float32, relative_error
):
    limit = bound if dtype == "float64" else bound_float32
    base, adapters = random_parameters(config, dtype=dtype), random_adapters(config, dtype=dtype)
    batch, merged = random_batch(config), merge(base, adapters, LORA)
    zero = map_leaves(np.zeros_like, adapters)
    apart = in_jax(config, base, adapters, batch, dtype=dtype)[1]
    assert relative_error(in_jax(config, merged, zero, batch, dtype=dtype)[1], apart) <= limit.sub_module
    apart = torch_logits(config, base, batch, dtype=dtype, adapters=adapters)
    assert relative_error(torch_logits(config, merged, batch, dtype=dtype), apart) <= limit.sub_module
    assert relative_error(torch_logits(config, base, batch, dtype=dtype), apart) > 1e3 * limit.sub_module


# --- PEFT ---

# Of transformers, which peft asks under its old name.
old_name = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft")


TOKENS = np.random.default_rng(0).integers(0, SMALL.vocab_size, (2, 11))
ONE_SEGMENT = (
    TOKENS, TOKENS, np.ones(TOKENS.shape), np.ones_like(TOKENS), np.broadcast_to(np.arange(11), TOKENS.shape)
)  # fmt: skip


def llama(base):
    """transformers' model with the same weights."""
    settings = transformers.LlamaConfig(
        vocab_size=SMALL.vocab_size,
        hidden_size=SMALL.hidden_size,
        intermediate_size=SMALL.intermediate_size,
        num_hidden_layers=SMALL.num_layers,
        num_attention_heads=SMALL.num_heads,
        num_key_value_heads=SMALL.num_kv_heads,
        head_dim=SMALL.head_dim,
        rms_norm_eps=SMALL.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": SMALL.rope_theta},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(settings)
    tensors = {name: torch.from_numpy(array) for name, array in to_outside(base, SMALL).items()}
    assert model.load_state_dict(tensors, strict=False).unexpected_keys == []
    return model.eval()


@torch.no_grad()
def their_logits(model):
    return model(torch.from_numpy(TOKENS)).logits.numpy().reshape(-1, SMALL.vocab_size)


@old_name
def test_peft_computes_our_logits_from_our_directory(peft, tmp_path, bound_float32, relative_error):
    base, adapters = random_parameters(SMALL, dtype="float32"), random_adapters(SMALL, dtype="float32")
    write_peft(tmp_path, Adapter("here", LORA, adapters))
    theirs = their_logits(peft.PeftModel.from_pretrained(llama(base), tmp_path).eval())
    ours = torch_logits(SMALL, base, ONE_SEGMENT, dtype="float32", adapters=adapters)
    assert relative_error(ours, theirs) <= bound_float32.sub_module
    assert relative_error(their_logits(llama(base)), theirs) > 1e-2


@old_name
@pytest.mark.parametrize("stabilised", [False, True])
def test_what_peft_saved_computes_its_logits_with_us(peft, tmp_path, stabilised, bound_float32, relative_error):
    base = random_parameters(SMALL, dtype="float32")
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=list(TARGETS), use_rslora=stabilised,
        init_lora_weights=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(base), settings).eval()
    theirs = their_logits(model)
    model.save_pretrained(tmp_path)
    read = open_adapter(tmp_path)
    read.require_fit(SMALL)
    merged = merge(base, read.tree, read.lora)
    assert read.lora.scale == (3.0 if stabilised else 1.5)
    assert relative_error(torch_logits(SMALL, merged, ONE_SEGMENT, dtype="float32"), theirs) <= bound_float32.sub_module
    assert relative_error(their_logits(llama(base)), theirs) > 1e-2


# --- On the command line ---


def write_model(directory, config=SMALL_3):
    """A .safetensors file with its shape beside it; and its parameters."""
    from safetensors.numpy import save_file

    parameters = random_parameters(config, dtype="float32")
    save_file(to_outside(parameters, config), directory / "base.safetensors")
    write_beside(directory / "base.safetensors", config, None)
    return directory / "base.safetensors", parameters


def write_adapter(path, lora, *, seed=0):
    """A PEFT directory, or MiniMind's file where the name says so; and the adapter."""
    adapter = Adapter(str(path), lora, random_adapters(SMALL_3, lora, dtype="float32", seed=seed))
    if path.suffix == ".pth":
        write_pth(path, to_minimind(adapter), dtype="float32", tied=False)
    else:
        path.mkdir()
        write_peft(path, adapter)
    return adapter


def convert_as_typed(*arguments):
    """What scripts/convert.py does with this command line."""
    script = runpy.run_path(str(Path(__file__).resolve().parents[1] / "scripts" / "convert.py"))
    script["main"](parse(script["Convert"], list(map(str, arguments))))


@contextmanager
def refused(directory, message):
    """A UserError of one line, after which the directory holds what it held."""
    before = sorted(directory.rglob("*"))
    with pytest.raises(UserError, match=message) as error:
        yield
    assert "\n" not in str(error.value)
    assert sorted(directory.rglob("*")) == before


def test_adapters_are_merged_one_after_the_other_and_the_equality_is_printed(tmp_path, capsys, bound_float32):
    path, base = write_model(tmp_path)
    first = write_adapter(tmp_path / "peft", LORA)
    second = write_adapter(tmp_path / "lora.pth", SQUARE, seed=1)
    adapters = (str(tmp_path / "peft"), str(tmp_path / "lora.pth"))
    options = [part for adapter in adapters for part in ("--merge-lora", adapter)]
    convert_as_typed(path, tmp_path / "merged.pth", "--to", "torch", *options)
    printed = capsys.readouterr().out
    for adapter in adapters:
        said = re.search(rf"{adapter}: merged; largest logit difference from base and adapter (\S+)\n", printed)
        assert 1e-9 < float(said[1]) <= bound_float32.sub_module
    expected = merge(merge(base, first.tree, LORA), second.tree, SQUARE)
    merged = flatten(open_model(tmp_path / "merged.pth").read_parameters())
    for name, leaf in flatten(expected).items():
        np.testing.assert_allclose(merged[name], leaf, rtol=0, atol=1e-6)


def test_the_same_adapter_is_not_merged_twice(tmp_path):
    path, _ = write_model(tmp_path)
    write_adapter(tmp_path / "peft", LORA)
    write_adapter(tmp_path / "again", LORA)
    with refused(tmp_path, "again and .*peft are the same adapter; merge it once"):
        convert(path, tmp_path / "merged.pth", to="torch", merge_lora=[tmp_path / "peft", tmp_path / "again"])


def test_a_wrong_merge_is_found_and_nothing_is_left(tmp_path, monkeypatch):
    path, _ = write_model(tmp_path)
    write_adapter(tmp_path / "peft", LORA)
    monkeypatch.setattr(convert_room, "merge", lambda base, adapters, lora: base)
    with refused(tmp_path, "peft merged gives logits that differ by .* nothing was kept"):
        convert(path, tmp_path / "new" / "merged.pth", to="torch", merge_lora=[tmp_path / "peft"])


def test_a_minimind_adapter_becomes_a_peft_directory_and_comes_back_bit_for_bit(tmp_path, capsys):
    write_adapter(tmp_path / "lora.pth", SQUARE)
    convert_as_typed(tmp_path / "lora.pth", tmp_path / "peft", "--to", "peft")
    assert "peft: read back; every number is the same. Done." in capsys.readouterr().out
    convert_as_typed(tmp_path / "peft", tmp_path / "again.pth", "--to", "torch")
    first, second = (torch.load(tmp_path / name, weights_only=True) for name in ("lora.pth", "again.pth"))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_an_adapter_that_was_written_wrong_is_found_and_nothing_is_left(tmp_path, monkeypatch):
    write_adapter(tmp_path / "lora.pth", SQUARE)
    honest = convert_room.write_peft

    def write_wrong(directory, adapter):
        honest(directory, Adapter(adapter.where, adapter.lora, map_leaves(lambda leaf: -leaf, adapter.tree)))

    monkeypatch.setattr(convert_room, "write_peft", write_wrong)
    with refused(tmp_path, "new/peft was read back as another adapter; nothing was kept"):
        convert_adapter(tmp_path / "lora.pth", tmp_path / "new" / "peft", to="peft")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (
            "base.safetensors",
            "--to peft",
            "base.safetensors: an adapter is a run of --stage lora, a PEFT directory or a .pth file",
        ),
        ("base.pth", "--to peft", "base.pth holds no adapter: it has no tensor that is named like"),
        ("nowhere", "--to peft", "there is no adapter at .*nowhere"),
        ("empty", "--to peft", "empty holds no adapter: it is no run of --stage lora and has no adapter_config.json"),
        ("n" * 300, "--to peft", "cannot read n*: File name too long"),
        ("peft", "--to hf", "peft is an adapter: write it as peft or torch, or merge it into a model"),
        ("peft", "--to peft --dtype float16", "an adapter is written in float32 and as it is"),
        ("peft", "--to peft --merge-lora peft", "an adapter is written in float32 and as it is"),
        ("peft", "--to torch", "square layers alone, and layers.0.mlp.gate_proj is 48 x 72"),
        ("base.safetensors", "--to torch --merge-lora base.pth", "base.pth holds no adapter"),
        ("base.safetensors", "--to torch --merge-lora other.pth", "other.pth does not fit the model: l"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for_is_refused(tmp_path, monkeypatch, source, options, message):
    monkeypatch.chdir(tmp_path)
    _, base = write_model(tmp_path)
    write_pth(tmp_path / "base.pth", to_outside(base, SMALL_3), dtype="float32", tied=False)
    write_adapter(tmp_path / "peft", LORA)
    square = to_minimind(Adapter("here", SQUARE, random_adapters(SMALL_3, SQUARE, dtype="float32")))
    half = {name: tensor for name, tensor in square.items() if "layers.0" in name}
    write_pth(tmp_path / "other.pth", half, dtype="float32", tied=False)
    (tmp_path / "empty").mkdir()
    with refused(tmp_path, message):
        convert_as_typed(source, "new.pth" if "torch" in options else "new", *options.split())
