"""EleutherAI's lm-eval measures our models: its requests, and a task from a file, without any network.

Skipped where lm-eval is not installed: it is the extra `eval`.
"""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed; it is the extra eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from twins import SMALL, random_parameters  # noqa: E402

from minigpt_bridge.decoders import open_scorer  # noqa: E402
from minigpt_bridge.lm_eval_model import LanguageModel  # noqa: E402
from minigpt_bridge.logits import jax_logits  # noqa: E402
from minigpt_jax.config import ModelConfig  # noqa: E402
from minigpt_jax.data.exams import sample_items  # noqa: E402
from minigpt_jax.errors import UserError  # noqa: E402
from minigpt_jax.evaluation import evaluate_loss  # noqa: E402
from minigpt_jax.formats.hugging_face import write_hugging_face  # noqa: E402
from minigpt_jax.formats.names import to_outside  # noqa: E402
from minigpt_jax.multiple_choice import Prompts, evaluate_choices  # noqa: E402
from minigpt_jax.tokenizer import load_tokenizer  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("run_environment"),
    pytest.mark.filterwarnings("default"),  # lm-eval and what it stands on are not ours to keep quiet
]

TOKENIZER = load_tokenizer()
SHAPE = ModelConfig(
    vocab_size=6400, hidden_size=SMALL.hidden_size, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=10,
    intermediate_size=72, max_position_embeddings=256,
)  # fmt: skip
PARAMETERS = random_parameters(SHAPE, dtype="float32")
TEXT = "The cat sat on the mat. 今天天气很好。"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "hf"
    directory.mkdir()
    write_hugging_face(directory, SHAPE, to_outside(PARAMETERS, SHAPE), TOKENIZER)
    return str(directory)


def requests(kind, *arguments):
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_continuation_has_the_log_likelihood_of_its_tokens(source, backend):
    pairs = [("The cat", " sat"), ("The cat ", "sat on it"), ("", "今天"), ("问：二加二等于几？\n答：", "四")]
    found = LanguageModel(source, backend=backend).loglikelihood(requests("loglikelihood", *pairs))
    for (context, continuation), (log_likelihood, is_greedy) in zip(pairs, found, strict=True):
        whole = [TOKENIZER.bos_id, *TOKENIZER.encode(context + continuation)]
        size = len(TOKENIZER.encode(" " * context.endswith(" ") + continuation))
        logits = jax_logits(SHAPE, PARAMETERS, np.array([whole[:-1]]))[0, -size:].astype(np.float64)
        log_probabilities = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        expected = log_probabilities[np.arange(size), whole[-size:]].sum()
        assert log_likelihood == pytest.approx(expected, abs=1e-3)
        assert is_greedy == (logits.argmax(axis=-1) == whole[-size:]).all()


def test_what_it_writes_greedily_is_what_it_finds_likeliest(source):
    model = LanguageModel(source)
    (text,) = model.generate_until(requests("generate_until", ("The cat", {"until": [], "max_gen_toks": 1})))
    (likeliest,) = TOKENIZER.encode(text)
    logits = jax_logits(SHAPE, PARAMETERS, np.array([[TOKENIZER.bos_id, *TOKENIZER.encode("The cat")]]))[0, -1]
    assert likeliest == logits.argmax()
    found = model.loglikelihood(requests("loglikelihood", ("The cat", text), ("The cat", text + text)))
    assert [is_greedy for _, is_greedy in found] == [True, False]


def test_a_text_ends_before_a_stop_string_and_requests_keep_their_order(source):
    model = LanguageModel(source, batch_size=2)
    long, short = {"max_gen_toks": 8, "until": []}, {"max_gen_toks": 3, "until": []}
    contexts = ["one", "two", "three", "four"]
    every = model.generate_until(requests("generate_until", *zip(contexts, [long, long, short, long], strict=True)))
    alone = [model.generate_until(requests("generate_until", (each, long)))[0] for each in contexts]
    assert [every[0], every[1], every[3]] == [alone[0], alone[1], alone[3]]
    assert alone[2].startswith(every[2])
    stop = alone[0][2:4]
    (cut,) = model.generate_until(requests("generate_until", ("one", long | {"until": [stop]})))
    assert cut == alone[0][: alone[0].find(stop)]


def test_an_option_that_is_not_known_is_refused(source):
    with pytest.raises(UserError, match="generation option num_beams is not known"):
        LanguageModel(source).generate_until(requests("generate_until", ("a", {"num_beams": 4})))


def test_a_context_that_does_not_fit_loses_its_beginning(source):
    words, ending = " ".join([TEXT] * 5), " sat"
    (found,) = LanguageModel(source, max_seq_len=16).loglikelihood(requests("loglikelihood", (words, ending)))
    ids, size = TOKENIZER.encode(words + ending), len(TOKENIZER.encode(ending))
    logits = jax_logits(SHAPE, PARAMETERS, np.array([ids[-17:-1]]))[0, -size:].astype(np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    assert found[0] == pytest.approx(log_probabilities[np.arange(size), ids[-size:]].sum(), abs=1e-3)


def test_what_leaves_no_room_is_refused(source):
    model = LanguageModel(source, max_seq_len=16)
    with pytest.raises(UserError, match=r"a continuation has \d+ tokens, and max_seq_len is 16"):
        model.loglikelihood(requests("loglikelihood", ("a", " ".join([TEXT] * 5))))
    with pytest.raises(UserError, match="max_gen_toks 16 leaves no room in 16 tokens"):
        model.generate_until(requests("generate_until", ("a", {"max_gen_toks": 16})))


def test_a_whole_text_has_the_log_likelihood_that_evaluation_gives_it(source, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": TEXT}))
    (log_likelihood,) = LanguageModel(source).loglikelihood_rolling(requests("loglikelihood_rolling", (TEXT,)))
    ready = open_scorer(source)
    total = evaluate_loss(
        [tmp_path / "a.jsonl"], scorer=ready.scorer, tokenizer=TOKENIZER, max_seq_len=128, batch_size=1
    ).total  # fmt: skip
    # Evaluation counts the mark at the end as well.
    ids = [TOKENIZER.bos_id, *TOKENIZER.encode(TEXT)]
    logits = jax_logits(SHAPE, PARAMETERS, np.array([ids]))[0, -1].astype(np.float64)
    of_the_end = logits[TOKENIZER.eos_id] - np.log(np.exp(logits).sum())
    assert log_likelihood == pytest.approx(-total.nats - of_the_end, abs=1e-3)


def test_a_text_longer_than_the_row_counts_each_token_once(source, monkeypatch):
    model = LanguageModel(source, max_seq_len=16)
    long = " ".join([TEXT] * 5)
    scored = []
    score = model._score
    monkeypatch.setattr(model, "_score", lambda rows: scored.extend(rows) or score(rows))
    model.loglikelihood_rolling(requests("loglikelihood_rolling", (long,), ("",), (TEXT,)))
    asked = [id for row in scored for id in row.ids[row.counts]]
    assert asked == [*TOKENIZER.encode(long), *TOKENIZER.encode(TEXT)]
    assert all(row.predictions <= 16 for row in scored)


def test_a_task_from_a_file_gives_the_accuracy_that_evaluation_gives(source, tmp_path):
    items = [item for item in sample_items(count=60) if item.question.isascii()]
    lines = [{"question": item.question, "choices": item.choices, "answer": item.answer} for item in items]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (tmp_path / "task.yaml").write_text(
        f"""
task: sample_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/items.jsonl}}, cache_dir: {tmp_path}/cache}}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_bytes, aggregation: mean, higher_is_better: true}}
"""
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(
        LanguageModel(source), tasks=["sample_choices"], task_manager=manager, bootstrap_iters=0
    )["results"]["sample_choices"]
    prompts = Prompts(TOKENIZER, ask="text", chat=False)
    report = evaluate_choices(items, prompts, scorer=open_scorer(source).scorer, max_seq_len=256, batch_size=8)
    assert found["acc,none"] == report.total.by_sum.share
    assert found["acc_bytes,none"] == report.total.by_byte.share
    assert 0 < found["acc,none"] < 1
