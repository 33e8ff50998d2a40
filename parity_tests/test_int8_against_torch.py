"""8-bit weights in both frameworks: the same scores, and the same text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flax import nnx  # noqa: E402
from twins import SMALL, SMALL_3, random_parameters  # noqa: E402

from minigpt_jax.generate import JaxDecoder  # noqa: E402
from minigpt_jax.generation import greedy  # noqa: E402
from minigpt_jax.int8 import int8_graph  # noqa: E402
from minigpt_jax.quantization import int8_parameters  # noqa: E402
from minigpt_torch.generate import TorchDecoder  # noqa: E402
from minigpt_torch.int8 import make_int8_model  # noqa: E402

CONFIGS = pytest.mark.parametrize("config", [SMALL, SMALL_3], ids=["tied", "untied"])
NEVER = -1


@CONFIGS
def test_scores_are_equal_in_float64(config):
    tree = int8_parameters(random_parameters(config))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 29))
    positions = np.broadcast_to(np.arange(29), tokens.shape)
    with jax.enable_x64(True):
        model = nnx.merge(int8_graph(config, dtype=jnp.dtype("float64"), kernel="reference"), tree)
        hidden = model(jnp.asarray(tokens), segment_ids=jnp.ones((2, 29), jnp.int32), positions=jnp.asarray(positions))
        ours = np.asarray(model.logits(hidden))
    twin = make_int8_model(config, tree, dtype=torch.float64)
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        hidden = twin(ids, segment_ids=torch.ones_like(ids), positions=torch.from_numpy(positions.copy()))
        theirs = twin.logits(hidden).numpy()
    assert np.abs(ours - theirs).max() <= 1e-12 * np.abs(ours).max()


@CONFIGS
def test_greedy_text_is_the_same(config):
    tree = int8_parameters(random_parameters(config, dtype="float32"))
    decoders = (
        JaxDecoder(config, jax.tree.map(jnp.asarray, tree), int8=True),
        TorchDecoder(make_int8_model(config, tree, dtype=torch.float32)),
    )
    prompts = [[5, 9, 1, 7, 11, 30, 2], [2], [*range(3, 40)]]
    ours, theirs = (greedy(decoder, prompts, max_new_tokens=40, stop_id=NEVER) for decoder in decoders)
    assert ours == theirs
