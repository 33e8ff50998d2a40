"""The JAX model against Hugging Face transformers, the outside witness: same weights, same logits.

B batch  T time  V vocabulary
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minigpt_jax.config import ModelConfig
from minigpt_jax.formats.names import map_leaves, to_outside
from minigpt_jax.generate import JaxDecoder
from minigpt_jax.generation import greedy
from minigpt_jax.initialization import initial_parameters
from minigpt_jax.model import model_graph

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from minigpt_bridge.models import open_model  # noqa: E402
from minigpt_torch.generate import TorchDecoder  # noqa: E402
from minigpt_torch.weights import make_model  # noqa: E402

STORIES = Path(__file__).resolve().parents[2] / "shared" / "weights" / "stories260K"

# --- Our model ---


def our_logits(config, parameters, tokens, positions, dtype):
    model = nnx.merge(model_graph(config, dtype=dtype, kernel="blocked"), parameters)
    forward = jax.jit(
        lambda: model.logits(model(tokens, segment_ids=jnp.zeros_like(tokens), positions=jnp.asarray(positions)))
    )
    return np.asarray(forward()).reshape(*tokens.shape, -1)


# --- Their model in float64 ---


class LiteralFloat32IsFloat64(torch.overrides.TorchFunctionMode):
    """Their code, with its literal float32 lifted to float64.

    transformers computes norms, softmax and rotary tables in float32 whatever the model's precision is; a float64
    comparison would see nothing but that rounding.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].to(torch.float64)
        lifted = [self.lift(value) for value in args]
        return func(*lifted, **{name: self.lift(value) for name, value in (kwargs or {}).items()})

    @staticmethod
    def lift(value):
        return torch.float64 if value is torch.float32 else value


def their_model(config):
    llama = not config.qk_norm
    settings = (transformers.LlamaConfig if llama else transformers.Qwen3Config)(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_word_embeddings,
        attn_implementation="eager",
    )
    kind = transformers.LlamaForCausalLM if llama else transformers.Qwen3ForCausalLM
    return kind(settings).eval()


def load(model, config, parameters):
    tensors = {name: torch.from_numpy(array) for name, array in to_outside(parameters, config).items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert unexpected == []
    assert set(missing) <= {"lm_head.weight"}  # A tied head is not a second array with us.
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
def test_logits_are_those_of_transformers(qk_norm, tied, float64, bound, relative_error):
    config = ModelConfig(
        vocab_size=61,
        hidden_size=24,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=10,  # not hidden_size / num_heads
        intermediate_size=40,
        qk_norm=qk_norm,
        norm_weight_before_cast=qk_norm,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-6 if qk_norm else 1e-5,
    )
    rng = np.random.default_rng(0)
    parameters = jax.tree.map(
        lambda leaf: leaf + 0.2 * rng.standard_normal(leaf.shape),
        initial_parameters(config, initializer="scaled_normal", seed=0, dtype="float64"),
    )
    tokens = rng.integers(0, config.vocab_size, (2, 11))
    positions = np.stack([np.arange(11), np.arange(37, 48)])
    with LiteralFloat32IsFloat64(), torch.no_grad():
        theirs = load(their_model(config).double(), config, parameters)(
            torch.from_numpy(tokens), position_ids=torch.from_numpy(positions)
        ).logits.numpy()
    error = relative_error(our_logits(config, parameters, tokens, positions, jnp.float64), theirs)
    print("logits:", error)
    assert theirs.dtype == np.float64
    assert error <= bound.sub_module


# --- Released weights ---


@pytest.fixture(scope="module")
def stories():
    """Our config and parameters of the released 260K model, and its reference outputs."""
    if not STORIES.is_dir():
        pytest.skip(f"the released weights are not at {STORIES}")
    model = open_model(STORIES)
    with np.load(STORIES / "reference_logits.npz") as file:
        reference = dict(file)
    return model.config, model.read_parameters(), reference


def test_released_weights_give_their_reference_logits(stories, bound_float32, relative_error):
    config, parameters, reference = stories
    tokens = reference["input_ids"][None].astype(np.int32)
    positions = np.arange(tokens.shape[1])[None]
    ours = our_logits(config, parameters, tokens, positions, jnp.float32)[0]
    error = relative_error(ours, reference["logits"])
    print("logits:", error)
    assert error <= bound_float32.sub_module


def test_released_weights_continue_greedily_as_their_reference(stories):
    config, parameters, reference = stories
    ids = reference["greedy_ids"][None].astype(np.int32)
    start = reference["input_ids"].size
    scores = our_logits(config, parameters, ids, np.arange(ids.shape[1])[None], jnp.float32)[0]
    np.testing.assert_array_equal(scores[start - 1 : -1].argmax(axis=-1), ids[0, start:])


def test_released_weights_in_the_twin_give_the_reference_logits_and_greedy_tokens(
    stories, bound_float32, relative_error
):
    config, parameters, reference = stories
    twin = make_model(config, parameters, dtype=torch.float32)
    ids = torch.from_numpy(reference["input_ids"][None].astype(np.int64))
    positions = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        logits = twin.logits(twin(ids, segment_ids=torch.ones_like(ids), positions=positions)).numpy()
    assert relative_error(logits, reference["logits"]) <= bound_float32.sub_module
    new = reference["greedy_ids"][ids.shape[1] :].tolist()
    for decoder in (TorchDecoder(twin), JaxDecoder(config, map_leaves(jnp.asarray, parameters))):
        assert greedy(decoder, [ids[0].tolist()], max_new_tokens=len(new), stop_id=-1) == [new]
