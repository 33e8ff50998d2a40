"""Both frameworks find texts and choices equally likely: every log-probability, and every figure made of them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from twins import SMALL, SMALL_3, random_adapters, random_parameters, torch_model  # noqa: E402

from minigpt_jax.data.exams import sample_items  # noqa: E402
from minigpt_jax.data.sample import conversations, validation_texts  # noqa: E402
from minigpt_jax.evaluate import JaxScorer  # noqa: E402
from minigpt_jax.evaluation import evaluate_loss  # noqa: E402
from minigpt_jax.lora_config import LoraConfig  # noqa: E402
from minigpt_jax.multiple_choice import Prompts, evaluate_choices  # noqa: E402
from minigpt_jax.scoring import Row, score_rows  # noqa: E402
from minigpt_jax.tokenizer import load_tokenizer  # noqa: E402
from minigpt_torch.evaluate import TorchScorer  # noqa: E402
from minigpt_torch.lora import adapter_tensors, layer_adapters  # noqa: E402

pytestmark = pytest.mark.usefixtures("float64", "many_small_steps")

TOKENIZER = load_tokenizer()
LORA = LoraConfig(rank=2, alpha=4.0, dropout=0.5, targets=("q_proj", "up_proj"))
FULL = {name: getattr(SMALL, name) for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")}
FULL = type(SMALL)(vocab_size=6400, intermediate_size=72, max_position_embeddings=256, **FULL)
# Of the sums over a document or choice, in nats; float32 to the digits that are shown.
BOUND = {"float64": 1e-9, "float32": 1e-3}


def scorers(config, dtype, *, lora=None):
    parameters = random_parameters(config, dtype=dtype)
    options, adapters = {}, None
    if lora is not None:
        tree = random_adapters(config, lora, dtype=dtype)
        options = {"adapters": jax.tree.map(jnp.asarray, tree), "lora": lora}
        adapters = layer_adapters(adapter_tensors(tree), lora)
    ours = JaxScorer(config, jax.tree.map(jnp.asarray, parameters), dtype=jnp.dtype(dtype), **options)
    return ours, TorchScorer(torch_model(config, parameters, dtype=dtype, kernel="fused"), adapters=adapters)


@pytest.mark.parametrize(("config", "lora"), [(SMALL, None), (SMALL_3, LORA)])
def test_every_token_is_equally_likely_in_both(config, lora):
    rng = np.random.default_rng(0)
    lengths = (2, 17, 64, 65, 90)
    rows = [Row(rng.integers(0, 97, size, np.int32), rng.random(size) < 0.8) for size in lengths]
    ours, theirs = (
        score_rows(scorer, rows, batch_size=2, max_seq_len=128) for scorer in scorers(config, "float64", lora=lora)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.log_probabilities.dtype == other.log_probabilities.dtype == np.float64
        np.testing.assert_allclose(mine.log_probabilities, other.log_probabilities, rtol=0, atol=1e-12)
        assert (mine.is_likeliest == other.is_likeliest).all()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_loss_and_bits_per_byte_agree(tmp_path, dtype):
    texts = [{"text": text} for text in validation_texts(seed=0, target_bytes=4000)]
    chats = [{"conversations": messages} for messages in conversations(seed=0, count=5)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in texts + chats))
    reports = [
        evaluate_loss([tmp_path / "data.jsonl"], scorer=scorer, tokenizer=TOKENIZER, max_seq_len=64, batch_size=8)
        for scorer in scorers(FULL, dtype)
    ]
    ours, theirs = ([report.total, *report.by_language.values()] for report in reports)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.tokens == other.tokens
        assert abs(mine.loss - other.loss) <= BOUND[dtype] / 10
        assert abs(mine.bits_per_byte - other.bits_per_byte) <= BOUND[dtype] / 10


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("ask", ["text", "letter"])
def test_every_choice_is_equally_likely_in_both(dtype, ask):
    prompts = Prompts(TOKENIZER, ask=ask, chat=False)
    items = sample_items(count=16)
    ours, theirs = (
        evaluate_choices(items, prompts, scorer=scorer, max_seq_len=128, batch_size=16).outcomes
        for scorer in scorers(FULL, dtype)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.log_likelihoods == pytest.approx(other.log_likelihoods, rel=0, abs=BOUND[dtype])
