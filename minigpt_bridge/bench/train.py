"""A training step: the JAX engine against the PyTorch twin, eager and compiled, on the same weights and batch."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which

import numpy as np

from minigpt_bridge.bench.limits import Limits
from minigpt_bridge.bench.timing import Row, interleave, part_of, rates
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.cost import training_flops_per_token
from minigpt_jax.data.batching import Batch
from minigpt_jax.engine import JaxEngine
from minigpt_jax.formats.names import Parameters
from minigpt_jax.trainer import Engine
from minigpt_torch.engine import TorchEngine

ROWS = 4
TIME = 512
"""Tokens of a row."""
TOTAL = 1000
"""Updates of the schedule; what is measured lies in its beginning."""
TRAIN = TrainConfig(batch_size=ROWS, max_seq_len=TIME, accumulation_steps=1, learning_rate=1e-4, warmup_steps=0)


def train_rows(config: ModelConfig, parameters: Parameters, limits: Limits, *, rounds: int) -> Iterator[Row]:
    """Tokens a second of ROWS x TIME against each peer, and the part of the matrix-product rate in model FLOPs.

    Args:
        config: the model's shape.
        parameters: float32, in the layout of minigpt_jax/initialization.py.
        limits: of the machine, measured in the same run.
        rounds: how often the sides take turns.
    """
    batch = _batch(config)
    with tempfile.TemporaryDirectory() as directory:
        engines = _engines(config, parameters, Path(directory))
        taken = interleave({name: step(engine, batch) for name, engine in engines.items()}, rounds=rounds)
    tokens = ROWS * TIME
    for peer in list(engines)[1:]:
        yield rates(f"train, {ROWS} x {TIME}, {peer}", taken["ours"], taken[peer], work=tokens, unit="tokens/s")
    gflops = tokens * training_flops_per_token(config, time=TIME) / 1e9
    name = f"train, {ROWS} x {TIME}, of the matrix-product rate"
    yield part_of(name, taken["ours"], limits.matmul_gflops, work=gflops, unit="GFLOP/s")


def _engines(config: ModelConfig, parameters: Parameters, directory: Path) -> dict[str, Engine]:
    made: dict[str, Engine] = {"ours": jax_engine(config, parameters, directory)}
    names = ["PyTorch, eager"]
    # On a CPU torch.compile writes C++ and needs somebody to compile it.
    if which("c++"):
        names.append("torch.compile")
    for name in names:
        twin = TorchEngine(config, TRAIN, total_updates=TOTAL, checkpoints=directory)
        twin.init(parameters)
        if name == "torch.compile":
            twin.state.model.compile()
        made[name] = twin
    return made


def jax_engine(config: ModelConfig, parameters: Parameters, directory: Path) -> JaxEngine:
    """The engine whose steps are timed, with a directory that nothing is written to."""
    engine = JaxEngine(config, TRAIN, total_updates=TOTAL, checkpoints=directory)
    engine.init(parameters)
    return engine


def step(engine: Engine, batch: Batch) -> Callable[[], object]:
    """One update on a batch, waited for."""
    return lambda: engine.read([engine.train_step(batch)])


def _batch(config: ModelConfig) -> Batch:
    """One segment a row and every token learned, as in packed pretraining on long documents."""
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, TIME + 1), dtype=np.int32)
    shape = (ROWS, TIME)
    return Batch(
        tokens=ids[:, :-1],
        targets=ids[:, 1:],
        loss_weights=np.ones(shape, np.float32),
        segment_ids=np.ones(shape, np.int32),
        positions=np.broadcast_to(np.arange(TIME, dtype=np.int32), shape),
        documents=(),
        index=0,
        epoch=0,
    )
