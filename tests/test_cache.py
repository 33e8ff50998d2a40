"""The token cache: made once, whole or not at all, in memory that does not grow with the corpus."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import minigpt_jax.data.cache as cache_module
from minigpt_jax.data.batching import BatchSource
from minigpt_jax.data.cache import build_token_cache, open_token_cache, split_documents, write_token_cache
from minigpt_jax.errors import UserError


class CharacterTokenizer:
    """One id a character: its code point. NUL is id 0, as the padding id is."""

    bos_id, eos_id = 1, 2

    def __init__(self, *, vocab_size: int = 256, sha256: str = "a" * 64):
        self.vocab_size = vocab_size
        self.sha256 = sha256
        self.calls = 0

    def encode_batch(self, texts):
        self.calls += 1
        return [np.array([ord(character) for character in text], np.int32) for text in texts]


@pytest.fixture
def corpus(tmp_path):
    def write(*lines, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        return path

    return write


def text(value: str) -> dict[str, str]:
    return {"text": value}


def document(cache, number: int) -> list[int]:
    start = cache.starts[number]
    return cache.tokens[start : start + cache.lengths[number]].tolist()


# --- Content ---


def test_a_document_is_its_text_between_the_two_marks(corpus, tmp_path):
    path = corpus(text("ab"), text("c\u00e9"))
    cache = build_token_cache([path], CharacterTokenizer(), cache_root=tmp_path / "root")
    assert [document(cache, 0), document(cache, 1)] == [[1, 97, 98, 2], [1, 99, 233, 2]]
    assert cache.text_bytes.tolist() == [2, 3]
    assert (cache.num_documents, cache.num_tokens, cache.report.text_bytes) == (2, 8, 5)
    assert (cache.tokenizer_sha256, cache.vocab_size) == ("a" * 64, 256)


def test_documents_of_many_chunks_lie_one_after_another(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_CHUNK_BYTES", 10)
    texts = [f"text {number}" * (number % 5 + 1) for number in range(50)]
    tokenizer = CharacterTokenizer()
    cache = build_token_cache([corpus(*map(text, texts))], tokenizer, cache_root=tmp_path / "root")
    assert tokenizer.calls > 10
    assert ["".join(map(chr, document(cache, number)[1:-1])) for number in range(50)] == texts


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "uint16"), (1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_ids_are_as_wide_as_the_vocabulary_needs(corpus, tmp_path, vocab_size, dtype):
    highest = chr(vocab_size - 1)
    tokenizer = CharacterTokenizer(vocab_size=vocab_size)
    cache = build_token_cache([corpus(text(highest))], tokenizer, cache_root=tmp_path / "root")
    assert cache.tokens.dtype == dtype
    assert document(cache, 0) == [1, vocab_size - 1, 2]


def test_an_id_outside_the_vocabulary_is_refused(corpus, tmp_path):
    tokenizer = CharacterTokenizer(vocab_size=100)
    with pytest.raises(UserError, match="gave id 100, but says that its vocabulary has 100 entries"):
        build_token_cache([corpus(text("abcd"))], tokenizer, cache_root=tmp_path / "root")


def test_equal_texts_are_kept_once_and_counted(corpus, tmp_path):
    first = corpus(text("a"), text("b"), text("a"))
    second = corpus(text("b"), {"text": "c", "more": 1}, name="second.jsonl")
    cache = build_token_cache([first, second], CharacterTokenizer(), cache_root=tmp_path / "root")
    assert [document(cache, number)[1] for number in range(3)] == [ord("a"), ord("b"), ord("c")]
    assert (cache.report.records, cache.report.duplicates, cache.report.documents) == (5, 2, 3)
    assert cache.record_id(1) == f"{first}:2"
    assert cache.record_id(2) == f"{second}:2"


def test_skipped_lines_are_reported_by_reason(corpus, tmp_path):
    path = corpus(text("a"), "\n", {"text": None}, text("b"))
    with pytest.raises(UserError, match=re.escape(f"{path}:2: empty line")):
        build_token_cache([path], CharacterTokenizer(), cache_root=tmp_path / "root")
    cache = build_token_cache([path], CharacterTokenizer(), cache_root=tmp_path / "root", skip_bad_lines=True)
    assert cache.report.skipped == {"empty line": 1, "text is null": 1}
    assert cache.record_id(1) == f"{path}:4"


def test_padding_id_inside_a_text_keeps_its_label(corpus, tmp_path):
    path = corpus(text("a\0b"))
    cache = build_token_cache([path], CharacterTokenizer(), cache_root=tmp_path / "root")
    everything = np.arange(1)
    batch = BatchSource(cache, everything, batching="padded", batch_size=1, max_seq_len=8, seed=0, num_epochs=1)[0]
    assert batch.targets[0].tolist() == [97, 0, 98, 2, 0, 0, 0, 0]
    assert batch.loss_weights[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert batch.segment_ids[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


# --- Reuse ---


def test_a_cache_that_is_there_is_not_made_again(corpus, tmp_path):
    path, root = corpus(text("a")), tmp_path / "root"
    first = build_token_cache([path], CharacterTokenizer(), cache_root=root)
    written = (first.directory / "tokens.bin").stat().st_mtime_ns
    os.utime(path)
    tokenizer = CharacterTokenizer()
    second = build_token_cache([path], tokenizer, cache_root=root)
    assert tokenizer.calls == 0
    assert second.directory == first.directory
    assert (second.directory / "tokens.bin").stat().st_mtime_ns == written


def test_the_key_changes_with_content_tokenizer_and_options(corpus, tmp_path):
    root, path = tmp_path / "root", corpus(text("a"))
    keys = [
        build_token_cache([path], CharacterTokenizer(), cache_root=root).key,
        build_token_cache([path], CharacterTokenizer(sha256="b" * 64), cache_root=root).key,
        build_token_cache([path], CharacterTokenizer(), cache_root=root, skip_bad_lines=True).key,
        build_token_cache([corpus(text("b"))], CharacterTokenizer(), cache_root=root).key,
    ]
    assert len(set(keys)) == 4


def test_another_tokenizer_than_the_caches_is_refused(corpus, tmp_path):
    cache = build_token_cache([corpus(text("a"))], CharacterTokenizer(), cache_root=tmp_path / "root")
    cache.require_tokenizer(CharacterTokenizer())
    with pytest.raises(UserError, match="made with another tokenizer"):
        cache.require_tokenizer(CharacterTokenizer(sha256="b" * 64))


def test_a_named_directory_holds_the_same_cache_or_nothing_else(corpus, tmp_path):
    path, out = corpus(text("a")), tmp_path / "out"
    write_token_cache([path], CharacterTokenizer(), directory=out)
    tokenizer = CharacterTokenizer()
    assert write_token_cache([path], tokenizer, directory=out).num_documents == 1
    assert tokenizer.calls == 0
    with pytest.raises(UserError, match="holds a cache of other data"):
        write_token_cache([corpus(text("b"))], tokenizer, directory=out)
    with pytest.raises(UserError, match="is not a token cache; choose another directory"):
        write_token_cache([path], tokenizer, directory=tmp_path)
    assert open_token_cache(out).num_documents == 1


def test_progress_ends_at_the_size_of_the_sources(corpus, tmp_path):
    seen = []
    path = corpus(text("a"), text("b"))
    build_token_cache(
        [path], CharacterTokenizer(), cache_root=tmp_path, on_progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)


# --- Whole or not at all ---


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_full_disk_is_one_sentence_and_leaves_nothing(corpus, tmp_path, monkeypatch):
    def full(file, values):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_module, "_append", full)
    with pytest.raises(UserError, match=r"cannot write the token cache .*: No space left on device; free space"):
        build_token_cache([corpus(text("a"))], CharacterTokenizer(), cache_root=tmp_path / "root")
    assert names(tmp_path / "root") == []


def test_a_real_write_failure_is_one_sentence_and_leaves_nothing(corpus, tmp_path):
    # A limit on file sizes fails inside the operating system, in whichever file is the first to reach it.
    path, root = corpus(*(text(f"{number} " * 40) for number in range(4000))), tmp_path / "root"
    done = run_child(path, root, "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))")
    assert "UserError: cannot write the token cache" in done.stderr
    assert names(root) == []


def test_a_directory_without_write_permission_is_one_sentence(corpus, tmp_path):
    (tmp_path / "root").write_text("a file where the directory should be")
    with pytest.raises(UserError, match="cannot write the token cache"):
        build_token_cache([corpus(text("a"))], CharacterTokenizer(), cache_root=tmp_path / "root")


def test_a_bad_line_or_an_interrupt_leaves_nothing(corpus, tmp_path):
    class Interrupted(CharacterTokenizer):
        def encode_batch(self, texts):
            raise KeyboardInterrupt

    with pytest.raises(UserError):
        build_token_cache([corpus(text("a"), "broken")], CharacterTokenizer(), cache_root=tmp_path / "root")
    with pytest.raises(KeyboardInterrupt):
        build_token_cache([corpus(text("a"))], Interrupted(), cache_root=tmp_path / "root")
    assert names(tmp_path / "root") == []


def test_a_source_that_changes_while_it_is_read_is_refused(corpus, tmp_path):
    class Writer(CharacterTokenizer):
        def encode_batch(self, texts):
            corpus(text("a"), text("b"))
            return super().encode_batch(texts)

    with pytest.raises(UserError, match="changed while it was read"):
        build_token_cache([corpus(text("a"))], Writer(), cache_root=tmp_path / "root")
    assert names(tmp_path / "root") == []


CHILD = """
import resource, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_cache import CharacterTokenizer
from minigpt_jax.data.cache import build_token_cache
class Tokenizer(CharacterTokenizer):
    def encode_batch(self, texts):
        {during}
        return super().encode_batch(texts)
{before}
build_token_cache([{path!r}], Tokenizer(), cache_root=Path({root!r}))
print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))
"""


def child(path: Path, root: Path, before: str = "", during: str = "") -> list[str]:
    program = CHILD.format(
        tests=str(Path(__file__).parent), path=str(path), root=str(root), before=before, during=during
    )
    return [sys.executable, "-c", program]


def run_child(path: Path, root: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(child(path, root, before), capture_output=True, text=True, check=False)


def test_a_killed_build_is_never_opened_and_cleaned_by_the_next(corpus, tmp_path):
    path, root = corpus(text("a")), tmp_path / "root"
    process = subprocess.Popen(child(path, root, during="print('encoding', flush=True); time.sleep(100)"), stdout=-1)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
        build_token_cache([corpus(text("other"), name="other.jsonl")], CharacterTokenizer(), cache_root=root)
        (running,) = [name for name in names(root) if name.startswith(".building-")]
        process.send_signal(signal.SIGKILL)
        process.wait()
    long_ago = time.time() - 3600
    os.utime(root / running, (long_ago, long_ago))

    cache = build_token_cache([path], CharacterTokenizer(), cache_root=root)
    assert document(cache, 0) == [1, 97, 2]
    assert not [name for name in names(root) if name.startswith(".building-")]


def test_a_running_build_is_not_cleaned_however_old(corpus, tmp_path):
    class Slow(CharacterTokenizer):
        def encode_batch(self, texts):
            (running,) = (tmp_path / "root").glob(".building-*")
            os.utime(running, (0, 0))
            build_token_cache([corpus(text("b"), name="b.jsonl")], CharacterTokenizer(), cache_root=tmp_path / "root")
            return super().encode_batch(texts)

    assert build_token_cache([corpus(text("a"))], Slow(), cache_root=tmp_path / "root").num_documents == 1


def test_a_build_that_is_just_being_set_up_is_not_cleaned(corpus, tmp_path):
    beginning = tmp_path / "root" / ".building-other"
    beginning.mkdir(parents=True)
    (beginning / "lock").touch()
    build_token_cache([corpus(text("a"))], CharacterTokenizer(), cache_root=tmp_path / "root")
    assert beginning.exists()


def test_two_builds_of_the_same_cache_at_once_both_succeed(corpus, tmp_path):
    path, root = corpus(text("a")), tmp_path / "root"

    class Overtaken(CharacterTokenizer):
        def encode_batch(self, texts):
            build_token_cache([path], CharacterTokenizer(), cache_root=root)
            return super().encode_batch(texts)

    cache = build_token_cache([path], Overtaken(), cache_root=root)
    assert document(cache, 0) == [1, 97, 2]
    assert names(root) == [cache.key]


# --- Opening ---


def test_a_directory_that_is_not_a_cache_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a token cache"):
        open_token_cache(tmp_path)
    (tmp_path / "cache.json").write_text('{"format": "something else"}')
    with pytest.raises(UserError, match="is not a token cache"):
        open_token_cache(tmp_path)


def damage_tokens(directory: Path) -> None:
    os.truncate(directory / "tokens.bin", 3)


def damage_documents(directory: Path) -> None:
    os.truncate(directory / "documents.bin", 0)


def remove_tokens(directory: Path) -> None:
    (directory / "tokens.bin").unlink()


def change_meta(directory: Path, **fields) -> None:
    meta = json.loads((directory / "cache.json").read_text())
    (directory / "cache.json").write_text(json.dumps({**meta, **fields}))


def cut_meta(directory: Path) -> None:
    os.truncate(directory / "cache.json", 50)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_tokens, "tokens.bin has 3 bytes, not 6"),
        (damage_documents, "documents.bin has 0 bytes, not 32"),
        (remove_tokens, "No such file"),
        (lambda directory: change_meta(directory, report={}), "is damaged"),
        (lambda directory: change_meta(directory, dtype="<u4"), "tokens.bin has 6 bytes, not 12"),
        (lambda directory: change_meta(directory, version=0), "is not a token cache of version 1"),
        (cut_meta, "is not JSON"),
    ],
)
def test_a_damaged_cache_is_named(corpus, tmp_path, damage, reason):
    cache = build_token_cache([corpus(text("a"))], CharacterTokenizer(), cache_root=tmp_path / "root")
    damage(cache.directory)
    with pytest.raises(UserError, match=reason) as error:
        open_token_cache(cache.directory)
    assert str(cache.directory) in str(error.value)


# --- Held-out split ---


def split_texts(cache) -> tuple[set[str], set[str]]:
    sides = split_documents(cache, val_fraction=0.1)
    first, second = ({"".join(map(chr, document(cache, number)[1:-1])) for number in side} for side in sides)
    return first, second


def test_the_text_alone_decides_the_side_of_the_split(corpus, tmp_path):
    texts = [f"document {number}" for number in range(1000)]
    one = build_token_cache([corpus(*map(text, texts))], CharacterTokenizer(), cache_root=tmp_path / "root")
    other_order = [*reversed(texts[:500]), *texts[500:], *(f"new {number}" for number in range(500))]
    two = build_token_cache([corpus(*map(text, other_order))], CharacterTokenizer(), cache_root=tmp_path / "root")
    train, held_out = split_texts(one)
    train_of_more, held_out_of_more = split_texts(two)
    assert train | held_out == set(texts)
    assert not train & held_out
    assert 50 < len(held_out) < 200
    assert held_out <= held_out_of_more
    assert train <= train_of_more


@pytest.mark.parametrize("val_fraction", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_both_sides_of_a_split_have_a_document(corpus, tmp_path, count, val_fraction):
    path = corpus(*(text(f"document {number}") for number in range(count)))
    cache = build_token_cache([path], CharacterTokenizer(), cache_root=tmp_path / "root")
    train, held_out = split_documents(cache, val_fraction=val_fraction)
    assert len(train) >= 1
    assert len(held_out) >= 1
    assert sorted([*train, *held_out]) == list(range(count))


def test_a_single_document_is_trained_on(corpus, tmp_path):
    cache = build_token_cache([corpus(text("a"))], CharacterTokenizer(), cache_root=tmp_path / "root")
    train, held_out = split_documents(cache)
    assert (train.tolist(), held_out.tolist()) == ([0], [])


# --- Memory ---


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_a_ten_times_larger_corpus_needs_no_more_memory(corpus, tmp_path):
    def peak_kibibytes(documents: int) -> int:
        path = corpus(*(text(f"{number} " * 300) for number in range(documents)), name=f"{documents}.jsonl")
        done = run_child(path, tmp_path / "root")
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    small, large = peak_kibibytes(2_000), peak_kibibytes(20_000)
    assert large - small < 15 * 1024, f"{small} KiB for 3 MB of text, {large} KiB for 30 MB"
