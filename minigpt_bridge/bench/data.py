"""Data: a corpus into the token cache against the tokenizers library alone, and steps whose batches are loaded.

The cache is made from a file and written to disk: reading, checking, comparing with what came before, tokenizing and
keeping. The library has the texts in memory already, and its ids are thrown away.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Library

from minigpt_bridge.bench.timing import Row, interleave, rates
from minigpt_bridge.bench.train import ROWS, TIME, jax_engine, step
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.data.batching import Batch, BatchSource, load_batches
from minigpt_jax.data.cache import build_token_cache
from minigpt_jax.data.cache_format import TokenCache
from minigpt_jax.data.corpus import sample_files
from minigpt_jax.formats.names import Parameters
from minigpt_jax.tokenizer import Tokenizer

CORPUS_BYTES = 8_000_000
"""Of text: the sample corpus as often as it takes, each copy with a number of its own behind every text."""


def data_rows(config: ModelConfig, parameters: Parameters, tokenizer: Tokenizer, *, rounds: int) -> Iterator[Row]:
    """Megabytes of text a second into a cache, and training tokens a second with loaded batches.

    Args:
        config: the shape of the model that takes the steps.
        parameters: float32, in the layout of minigpt_jax/initialization.py.
        tokenizer: of the model.
        rounds: how often the sides take turns.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        texts, file = _texts(), directory / "corpus.jsonl"
        file.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), "utf-8")
        fresh = (directory / str(number) for number in range(rounds + 1))
        tokenizer.save(directory / "tokenizer")
        library = Library.from_file(str(directory / "tokenizer" / "tokenizer.json"))
        taken = interleave(
            {
                "ours": lambda: build_token_cache([file], tokenizer, cache_root=next(fresh)),
                "tokenizers": lambda: library.encode_batch_fast(texts, add_special_tokens=False),
            },
            rounds=rounds,
        )
        megabytes = sum(len(text.encode("utf-8")) for text in texts) / 1e6
        yield rates(
            "data, text into a cache, tokenizers alone", taken["ours"], taken["tokenizers"], work=megabytes, unit="MB/s"
        )
        cache = build_token_cache([file], tokenizer, cache_root=directory / "for training")
        yield _loaded(config, parameters, cache, directory / "run", rounds=rounds)


def _texts() -> list[str]:
    sample = sample_files(TrainConfig.seed)["pretrain"].read_text("utf-8")
    texts = [json.loads(line)["text"] for line in sample.splitlines()]
    copies = 1 + CORPUS_BYTES // len(sample.encode("utf-8"))
    return [f"{text} {copy}" for copy in range(copies) for text in texts]


def _loaded(config: ModelConfig, parameters: Parameters, cache: TokenCache, directory: Path, *, rounds: int) -> Row:
    """Steps on batches that are made while the engine works, against steps on the same batches, made before."""
    source = BatchSource(
        cache,
        np.arange(cache.num_documents),
        batching="packed",
        batch_size=ROWS,
        max_seq_len=TIME,
        seed=0,
        num_batches=rounds + 1,
    )
    engine = jax_engine(config, parameters, directory)
    loader, at_hand = load_batches(source), iter([source[number] for number in range(rounds + 1)])

    def steps_on(batches: Iterator[Batch]) -> Callable[[], object]:
        return lambda: step(engine, next(batches))()

    try:
        taken = interleave({"loaded": steps_on(loader), "at hand": steps_on(at_hand)}, rounds=rounds)
    finally:
        loader.close()
    name = f"data, {ROWS} x {TIME} steps on loaded batches, at hand"
    return rates(name, taken["loaded"], taken["at hand"], work=ROWS * TIME, unit="tokens/s")
