"""The tokenizer: nothing lost, nothing trusted, nothing half printed."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from minigpt_jax.data.records import iter_texts
from minigpt_jax.errors import UserError
from minigpt_jax.tokenizer import (
    ADDED_TOKENS,
    TAGS,
    Tokenizer,
    load_tokenizer,
)
from minigpt_jax.tokenizer_training import evaluate_tokenizer, language_of, train_tokenizer, weight_english

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"
ASSETS = REPOSITORY / "minigpt_jax" / "assets" / "tokenizer"
SHIPPED = load_tokenizer()
LIBRARY = tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer.json"))

any_text = st.text(st.characters(exclude_categories=["Cs"]))
markers = st.lists(st.one_of(any_text, st.sampled_from(ADDED_TOKENS))).map("".join)
any_ids = st.lists(st.integers(0, SHIPPED.vocab_size - 1))

SMALL_TEXT = ["The cat sat on the mat. The dog sat on the log.", "猫坐在垫子上，狗坐在木头上。"] * 20

CALL = {"name": "weather", "arguments": {"city": "北京", "days": 2}}
TOOL = {"name": "weather", "description": "a <forecast>", "parameters": {"type": "object"}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "天气 🌦️?"},
    {"role": "assistant", "content": "Let me see.", "reasoning_content": "A tool knows.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": '{"sky": "晴"}'},
    {"role": "tool", "content": '{"sky": "雨"}'},
    {"role": "assistant", "content": "Sunny, then rain."},
]


def small_tokenizer() -> Tokenizer:
    return train_tokenizer(SMALL_TEXT, vocab_size=310)


def outside_definition(
    *,
    special: bool = False,
    normalizer: Any = None,
    ignore_merges: bool = False,
    added: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"),
) -> dict[str, Any]:
    """A tokenizer as others make them: GPT-2's pattern, merges that spell <think>, added tokens at the end."""
    inner = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    inner.pre_tokenizer = pre_tokenizers.Split("nothing", behavior="isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([inner.pre_tokenizer, pre_tokenizers.ByteLevel(False, False, False)])
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=list(added), show_progress=False
    )
    inner.train_from_iterator(["<think>", "<think>a", "thing"] * 9, trainer)
    if normalizer is not None:
        inner.normalizer = normalizer
    definition = json.loads(inner.to_str())
    for token in definition["added_tokens"]:
        token["special"] = special
    return definition


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value) + "\n", encoding="utf-8")
    return path


# --- Nothing lost ---


@given(any_text)
def test_any_text_comes_back_exactly(text):
    assert SHIPPED.decode(SHIPPED.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two  spaces ",
        "\r\n\r\n\t",
        "\x00\x01\x7f",
        "e\u0301 and \u00e9",
        "\u00a0\u3000\ufeff",
        "👩‍👩‍👧‍👦🏳️‍🌈",
        "𠮷野家 㐀 龘 𪚥",
        "İıſK",
        "\U0010ffff\ufffd",
    ],
)
def test_difficult_text_comes_back_exactly(text):
    assert SHIPPED.decode(SHIPPED.encode(text)) == text


def test_every_byte_is_an_entry():
    single = {SHIPPED.token_bytes(id) for id in range(36, 36 + 256)}

    assert single == {bytes([byte]) for byte in range(256)}


@given(any_text)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(text):
    assert b"".join(map(SHIPPED.token_bytes, SHIPPED.encode(text))) == text.encode("utf-8")


@given(any_ids)
def test_any_ids_decode_as_the_library_decodes_them(ids):
    assert SHIPPED.decode(ids) == LIBRARY.decode(ids, skip_special_tokens=False)
    assert SHIPPED.decode(ids, skip_special_tokens=True) == LIBRARY.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("encode", [SHIPPED.encode, lambda text: SHIPPED.encode_batch(["fine", text])])
def test_a_lone_surrogate_is_refused_by_name(encode):
    with pytest.raises(UserError, match=r"lone surrogate U\+D83D at character 3"):
        encode("ab\ud83d")


@given(st.lists(markers, max_size=4))
def test_a_batch_is_each_text_alone(texts):
    batch = SHIPPED.encode_batch(texts)

    assert [ids.tolist() for ids in batch] == [SHIPPED.encode(text) for text in texts]
    assert all(ids.dtype == np.uint16 for ids in batch)


@pytest.mark.parametrize("id", [-1, 6400, 100_000])
def test_an_id_outside_the_vocabulary_is_named(id):
    with pytest.raises(ValueError, match=f"id {id} is not in the vocabulary of 6400 entries"):
        SHIPPED.decode([5, id])


# --- Nothing trusted ---


def test_special_ids_are_where_the_minimind_line_has_them():
    assert (SHIPPED.pad_id, SHIPPED.bos_id, SHIPPED.eos_id) == (0, 1, 2)
    assert [SHIPPED.special_id(tag) for tag in TAGS] == [3, 4, 5, 6, 7, 8]
    assert [SHIPPED.special_id(token) for token in ADDED_TOKENS] == list(range(36))
    assert SHIPPED.vocab_size == 6400


def test_an_unknown_special_token_is_refused():
    with pytest.raises(UserError, match="no added token '<image>'"):
        SHIPPED.special_id("<image>")


@given(markers)
def test_markers_in_text_are_text(text):
    ids = SHIPPED.encode(text)

    assert min(ids, default=36) >= 36
    assert SHIPPED.decode(ids) == text


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("text", ["<think>", "a <|im_end|>\n<think>think<|im_start|>", "<|endoftext|>"])
def test_markers_in_text_are_text_for_an_outside_tokenizer_too(special, ignore_merges, text):
    definition = outside_definition(special=special, ignore_merges=ignore_merges)
    added = {token["id"] for token in definition["added_tokens"]}
    outside = Tokenizer(definition)

    ids = outside.encode(text)

    assert not added & set(ids)
    assert outside.decode(ids) == text
    # The library itself does take them for markers, so this test can fail.
    assert added & set(tokenizers.Tokenizer.from_str(json.dumps(definition)).encode(text).ids)


def test_merges_that_spell_a_marker_are_not_used():
    definition = outside_definition(added=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    spelled = definition["model"]["vocab"]["<think>"]
    definition["added_tokens"].append(dict(definition["added_tokens"][0], id=spelled, content="<think>"))

    ids = Tokenizer(definition).encode("<think>")

    assert spelled not in ids


def test_decoding_can_leave_out_control_tokens_and_keeps_tags():
    ids = [SHIPPED.bos_id, *SHIPPED.encode("a"), SHIPPED.special_id("<think>"), SHIPPED.eos_id, SHIPPED.pad_id]

    assert SHIPPED.decode(ids) == "<|im_start|>a<think><|im_end|><|endoftext|>"
    assert SHIPPED.decode(ids, skip_special_tokens=True) == "a<think>"


# --- Streaming ---


@given(any_ids, st.booleans())
def test_the_joined_stream_is_the_decoded_whole(ids, skip_special_tokens):
    stream = SHIPPED.stream_decoder(skip_special_tokens=skip_special_tokens)

    streamed = "".join(map(stream.push, ids)) + stream.finish()

    assert streamed == SHIPPED.decode(ids, skip_special_tokens=skip_special_tokens)


@given(any_text.filter(lambda text: "\ufffd" not in text), st.randoms(use_true_random=False))
def test_a_stream_never_shows_part_of_a_character(text, random):
    # One id a byte, or the usual ids: characters are split over tokens in both.
    byte_ids = {SHIPPED.token_bytes(id): id for id in range(36, 36 + 256)}
    ids = SHIPPED.encode(text) if random.random() < 0.5 else [byte_ids[bytes([byte])] for byte in text.encode("utf-8")]
    stream = SHIPPED.stream_decoder()

    pieces = [*map(stream.push, ids), stream.finish()]

    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text


def test_a_stream_that_ends_inside_a_character_says_so_once():
    stream = SHIPPED.stream_decoder()
    first_byte = SHIPPED.encode("\U0001f9ff")[0]

    assert stream.push(first_byte) == ""
    assert stream.finish() == "\ufffd"


# --- Chat template ---


def test_a_conversation_renders_as_chatml():
    rendered = SHIPPED.render_chat(CONVERSATION[:2], add_generation_prompt=True)

    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n天气 🌦️?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_reasoning_calls_and_results_have_their_tags():
    rendered = SHIPPED.render_chat(CONVERSATION[2:])

    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "北京", "days": 2}}\n</tool_call>'
    assert rendered == (
        f"<|im_start|>assistant\n<think>\nA tool knows.\n</think>\n\nLet me see.\n{call}\n{call}<|im_end|>\n"
        '<|im_start|>user\n<tool_response>\n{"sky": "晴"}\n</tool_response>\n'
        '<tool_response>\n{"sky": "雨"}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\nSunny, then rain.<|im_end|>\n"
    )


def test_tools_are_listed_in_the_system_turn_after_its_text():
    rendered = SHIPPED.render_chat(CONVERSATION[:2], tools=[TOOL, TOOL])

    listed = json.dumps(TOOL, ensure_ascii=False)
    assert rendered.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert f"<tools>\n{listed}\n{listed}\n</tools>" in rendered
    assert rendered.count("<|im_start|>system") == 1


def test_json_strings_render_as_the_lists_they_hold():
    as_lists = SHIPPED.render_chat(CONVERSATION, tools=[TOOL])
    strings = [dict(message) for message in CONVERSATION]
    strings[0]["tools"] = json.dumps([TOOL])
    strings[2]["tool_calls"] = json.dumps([{"type": "function", "function": CALL}, CALL])

    assert SHIPPED.render_chat(strings) == as_lists


@pytest.mark.parametrize("tools", ["[]", "", None])
def test_null_content_beside_calls_and_an_empty_system_message_add_nothing(tools):
    rendered = SHIPPED.render_chat(
        [
            {"role": "system", "content": "", "tools": tools},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ]
    )

    assert rendered.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<tool_call>\n")
    assert "None" not in rendered


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "robot", "content": "x"}], 'unknown role "robot"'),
        ([{"role": "assistant", "content": "", "tool_calls": "[{"}], "tool_calls is a string that is not JSON"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "the chat template cannot render"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_refused_in_one_line(messages, said):
    with pytest.raises(UserError, match=said) as caught:
        SHIPPED.render_chat(messages)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% for %}", "{{ 1 + 'a' }}"]
)
def test_a_template_cannot_leave_the_sandbox(template):
    tokenizer = Tokenizer(outside_definition(), chat_template=template)

    with pytest.raises(UserError, match="the chat template"):
        tokenizer.render_chat(CONVERSATION)


@given(markers)
def test_the_rendered_template_comes_back_exactly(text):
    rendered = SHIPPED.render_chat([{"role": "user", "content": text}, {"role": "assistant", "content": text}])

    assert SHIPPED.decode(SHIPPED.encode(rendered)) == rendered


# --- transformers ---


@pytest.fixture(scope="module")
def witness(tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="transformers, the outside witness, is not installed")
    directory = tmp_path_factory.mktemp("tokenizer")
    SHIPPED.save(directory)
    return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)


def test_transformers_gives_the_same_ids_and_text(witness):
    # It takes a marker in the text for the marker itself; all other text must agree.
    @given(any_text.filter(lambda text: not any(token in text for token in ADDED_TOKENS)))
    def check(text):
        ids = SHIPPED.encode(text)
        assert witness.encode(text, add_special_tokens=False) == ids
        assert witness.decode(ids) == text

    check()


def test_transformers_knows_the_special_tokens(witness):
    assert (witness.pad_token_id, witness.bos_token_id, witness.eos_token_id) == (0, 1, 2)
    assert len(witness) == 6400
    assert witness("a").input_ids == SHIPPED.encode("a")
    assert witness.convert_tokens_to_ids(list(ADDED_TOKENS)) == list(range(36))
    ids = list(range(36))
    assert witness.decode(ids, skip_special_tokens=True) == SHIPPED.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_transformers_renders_the_same_chat(witness, tools, add_generation_prompt):
    for length in range(1, len(CONVERSATION) + 1):
        theirs = witness.apply_chat_template(
            CONVERSATION[:length], tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        assert theirs == SHIPPED.render_chat(CONVERSATION[:length], tools, add_generation_prompt=add_generation_prompt)


def test_transformers_masks_exactly_what_the_assistant_wrote_and_its_end(witness):
    encoded = witness.apply_chat_template(CONVERSATION, return_dict=True, return_assistant_tokens_mask=True)
    masks, ids = np.array(encoded["assistant_masks"]), np.array(encoded["input_ids"])

    borders = np.flatnonzero(np.diff(masks, prepend=0, append=0))
    turns = [SHIPPED.decode(ids[start:end].tolist()) for start, end in borders.reshape(-1, 2)]

    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "北京", "days": 2}}\n</tool_call>'
    assert turns == [
        f"<think>\nA tool knows.\n</think>\n\nLet me see.\n{call}\n{call}<|im_end|>",
        "Sunny, then rain.<|im_end|>",
    ]


# --- Files ---


def test_a_saved_tokenizer_is_the_same_one(tmp_path):
    SHIPPED.save(tmp_path / "new")
    loaded = load_tokenizer(tmp_path / "new")

    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert loaded.sha256 == SHIPPED.sha256
    assert loaded.chat_template == SHIPPED.chat_template
    assert load_tokenizer(tmp_path / "new" / "tokenizer.json").encode("猫 cat") == SHIPPED.encode("猫 cat")


def test_the_shipped_config_holds_the_shipped_template():
    config = json.loads((ASSETS / "tokenizer_config.json").read_text(encoding="utf-8"))

    assert config["chat_template"] == (ASSETS / "chat_template.jinja").read_text(encoding="utf-8")


def test_the_hash_sees_content_and_not_layout(tmp_path):
    definition = json.loads((ASSETS / "tokenizer.json").read_text(encoding="utf-8"))
    reordered = write_json(tmp_path / "tokenizer.json", dict(reversed(definition.items())))
    definition["model"]["merges"].reverse()

    assert load_tokenizer(reordered).sha256 == SHIPPED.sha256
    assert Tokenizer(definition).sha256 != SHIPPED.sha256


def test_an_outside_tokenizer_keeps_its_template_and_settings(tmp_path):
    write_json(tmp_path / "tokenizer.json", outside_definition())
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "config", "model_max_length": 7})
    outside = load_tokenizer(tmp_path)
    outside.save(tmp_path / "copy")

    assert outside.render_chat(CONVERSATION) == "config"
    saved = json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (saved["model_max_length"], saved["chat_template"], saved["eos_token"]) == (7, "config", "<|im_end|>")
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert load_tokenizer(tmp_path).render_chat(CONVERSATION) == "file"


def test_an_outside_tokenizer_without_a_template_takes_the_shipped_one():
    assert Tokenizer(outside_definition()).render_chat(CONVERSATION) == SHIPPED.render_chat(CONVERSATION)


def test_a_truncating_outside_tokenizer_does_not_cut_text():
    definition = outside_definition()
    definition["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    definition["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "x",
    }  # fmt: skip
    outside = Tokenizer(definition)

    assert outside.decode(outside.encode("more than two")) == "more than two"
    assert outside.decode(outside.encode_batch(["more than two"])[0].tolist()) == "more than two"


def test_special_ids_are_found_by_name_wherever_they_are():
    outside = Tokenizer(outside_definition(added=("<a>", "<|im_end|>", "<|im_start|>", "<|endoftext|>")))

    assert (outside.pad_id, outside.bos_id, outside.eos_id) == (3, 2, 1)


def without_byte(definition: dict[str, Any]) -> dict[str, Any]:
    """The definition without the entry of byte 0xE4, which starts a third of all Chinese characters."""
    definition["model"]["vocab"].pop("ä")
    return definition


WRONG_FILES = [
    ("is not JSON", "{"),
    ("must hold one JSON object", "[]"),
    ("is not a tokenizer", '{"a": 1}'),
    ("is not byte-level BPE", tokenizers.Tokenizer(models.BPE()).to_str()),
    (
        "is not byte-level BPE",
        json.dumps(outside_definition() | {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}),
    ),
    (r"has no added token <\|im_start\|>, <\|im_end\|>", json.dumps(outside_definition(added=("<|endoftext|>",)))),
    ("is not lossless: 'é e", json.dumps(outside_definition(normalizer=normalizers.NFC()))),
    ("is not lossless: ' a'", json.dumps(outside_definition(normalizer=normalizers.Strip()))),
    ("is not lossless: 'Ａ", json.dumps(outside_definition(normalizer=normalizers.Lowercase()))),
    ("is not lossless", json.dumps(without_byte(outside_definition()))),
]


@pytest.mark.parametrize(("said", "content"), WRONG_FILES)
def test_a_file_that_cannot_serve_is_refused_in_one_line(tmp_path, said, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="utf-8")

    with pytest.raises(UserError, match=said) as caught:
        load_tokenizer(path)

    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=f"cannot read {tmp_path}/tokenizer.json: No such file"):
        load_tokenizer(tmp_path)


def test_several_templates_in_one_config_are_refused(tmp_path):
    write_json(tmp_path / "tokenizer.json", outside_definition())
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": [{"name": "default", "template": "x"}]})

    with pytest.raises(UserError, match="chat_template must be one string, not list"):
        load_tokenizer(tmp_path)


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(UserError, match=f"cannot write the tokenizer to {tmp_path}/file"):
        SHIPPED.save(tmp_path / "file")


# --- Training ---


def test_training_twice_gives_the_same_file():
    texts = list(iter_texts([SHARED / "data" / "sft_toolcall.jsonl"])) if SHARED.exists() else SMALL_TEXT
    size = 1500 if SHARED.exists() else 310

    first, second = (train_tokenizer(texts, vocab_size=size) for _ in range(2))

    assert first.sha256 == second.sha256


def test_training_does_not_depend_on_the_order_of_the_texts():
    assert train_tokenizer(reversed(SMALL_TEXT), vocab_size=310).sha256 == small_tokenizer().sha256


def test_a_trained_tokenizer_has_exactly_the_entries_asked_for():
    tokenizer = small_tokenizer()

    assert tokenizer.vocab_size == 310
    assert [tokenizer.special_id(token) for token in ADDED_TOKENS] == list(range(36))
    assert len(tokenizer.encode(SMALL_TEXT[0])) < len(SMALL_TEXT[0])


def test_training_makes_markers_special_and_tags_not():
    assert small_tokenizer().decode(range(36), skip_special_tokens=True) == "".join(TAGS)


def test_a_pair_rarer_than_the_minimum_is_not_merged():
    with pytest.raises(UserError, match="gives only 292 entries, not 300"):
        train_tokenizer(["ab"], vocab_size=300, min_frequency=2)

    assert train_tokenizer(["ab"], vocab_size=293, min_frequency=1).vocab_size == 293


def test_text_of_markers_teaches_no_marker():
    tokenizer = train_tokenizer(["<|im_end|>"] * 9 + SMALL_TEXT, vocab_size=310)

    assert min(tokenizer.encode("<|im_end|>")) >= 36


def test_digits_stand_alone():
    tokenizer = train_tokenizer(["2024 2024 2024"] * 9 + SMALL_TEXT, vocab_size=310)

    assert [tokenizer.decode([id]) for id in tokenizer.encode("2024")] == ["2", "0", "2", "4"]


@pytest.mark.parametrize("wrong", [{"vocab_size": 291}, {"min_frequency": 0}])
def test_sizes_that_cannot_work_are_refused(wrong):
    with pytest.raises(UserError, match="must be at least"):
        train_tokenizer(SMALL_TEXT, **wrong)


def test_weighting_repeats_english_and_leaves_chinese():
    assert list(weight_english(["a", "猫", "b", "c", "d"], 1.25)) == ["a", "猫", "b", "c", "d", "d"]
    assert list(weight_english(["a", "猫", "b"], 0.5)) == ["猫", "b"]
    with pytest.raises(UserError, match="--english-weight must be positive"):
        list(weight_english(["a"], 0.0))


# --- Evaluation ---


@pytest.mark.parametrize(
    ("text", "language"), [("猫坐 on", "zh"), ("猫" * 3 + "a" * 7, "en"), ("猫" * 4 + "a" * 9, "zh"), ("，。", "en")]
)
def test_a_document_is_chinese_above_thirty_percent_of_ideographs(text, language):
    assert language_of(text) == language


def test_evaluation_counts_by_language():
    rows = {row.language: row for row in evaluate_tokenizer(SHIPPED, ["猫" * 10, "cat", "dog"])}

    assert (rows["zh"].documents, rows["zh"].bytes, rows["zh"].characters) == (1, 30, 10)
    assert (rows["en"].documents, rows["en"].bytes, rows["en"].characters) == (2, 6, 6)
    assert (
        rows["all"].tokens
        == rows["zh"].tokens + rows["en"].tokens
        == sum(len(SHIPPED.encode(text)) for text in ("猫" * 10, "cat", "dog"))
    )
    assert rows["all"].bytes_per_token == 36 / rows["all"].tokens


def test_held_out_text_is_written_at_least_as_densely_as_a_plain_training_does():
    path = SHARED / "data" / "heldout_pretrain.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")

    rows = {row.language: row.bytes_per_token for row in evaluate_tokenizer(SHIPPED, iter_texts([path]))}

    assert rows["all"] >= 3.21
    assert rows["zh"] >= 3.22
    assert rows["en"] >= 3.20


# --- The script ---


def run_script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "scripts" / "train_tokenizer.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def corpus(tmp_path):
    """A directory with pretraining text, compressed, and a conversation."""
    directory = tmp_path / "corpus"
    directory.mkdir()
    with gzip.open(directory / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in SMALL_TEXT)
    turns = [{"role": "user", "content": "where is the cat?"}, {"role": "assistant", "content": "on the mat"}]
    write_json(directory / "b.jsonl", {"conversations": turns})
    return directory


def test_the_script_trains_saves_and_evaluates(tmp_path, corpus):
    held_out = write_json(tmp_path / "held_out.jsonl", {"text": "The cat sat."})

    done = run_script(
        corpus, "--out", tmp_path / "made", "--vocab-size", "310", "--min_frequency", "2",
        "--evaluate", held_out, "--json", tmp_path / "report.json",
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")
    made = load_tokenizer(tmp_path / "made")
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert made.vocab_size == report["vocab_size"] == 310
    assert made.sha256 == report["sha256"]
    assert [Path(source["path"]).name for source in report["sources"]] == ["a.jsonl.gz", "b.jsonl"]
    assert report["evaluation"][-1]["tokens"] == len(made.encode("The cat sat."))
    assert f"| all | 1 | 12 | 12 | {len(made.encode('The cat sat.'))} |" in done.stdout


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"--out": None}, "--out"),
        ({"--vocab-size": "12"}, "--vocab-size must be at least 292"),
        ({"--vocab-size": "many"}, "many"),
        ({"--vocab-size": "6400"}, "give more text"),
        ({"--min-frequency": "0"}, "--min-frequency must be at least 1"),
        ({"--english-weight": "-1"}, "--english-weight must be positive"),
        ({"--evaluate": "CORPUS"}, "is both training and held-out text"),
        ({"--evaluate": "/no/such.jsonl"}, "cannot read /no/such.jsonl"),
        ({"--out": "/proc/nowhere"}, "cannot write the tokenizer to /proc/nowhere"),
    ],
)
def test_the_script_refuses_a_mistake_in_one_line(tmp_path, corpus, change, said):
    options = {"--out": str(tmp_path / "made"), "--vocab-size": "310"} | change
    words = [word for name, value in options.items() if value for word in (name, value.replace("CORPUS", str(corpus)))]

    done = run_script(corpus, *words)

    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot read"), ("", "is empty"), ('{"text": 3}\n', ":1: text is not a string"), ("{\n", ":1: not JSON")],
)
def test_the_script_names_bad_input(tmp_path, content, said):
    path = tmp_path / "in.jsonl"
    if content is not None:
        path.write_text(content)

    done = run_script(path, "--out", tmp_path / "made")

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{path}" in done.stderr
    assert said in done.stderr
    assert not (tmp_path / "made").exists()
