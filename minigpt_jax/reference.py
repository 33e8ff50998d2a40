"""The reference model's log-probabilities in dpo: computed once, before the first step, and kept in the run directory.

Framework-free. They take the place of a second model in memory and of its forward pass at every step.
"""

import hashlib
import io
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.console import say
from minigpt_jax.data.batching import Batch
from minigpt_jax.data.pairs import PairSource, reference_by_document
from minigpt_jax.errors import UserError
from minigpt_jax.files import replace_file
from minigpt_jax.preparation import Run
from minigpt_jax.trainer import Engine

FILE = "reference.npz"


def needs_reference(run: Run) -> bool:
    """Whether the run's batches carry the reference's log-probabilities."""
    return run.train.stage == "dpo" and run.train.reference == "cached"


def compute_reference(run: Run, engine: Engine) -> None:
    """Compute them with the model as it is now, which has not been trained yet; write the file and give them out."""
    say("computing the log-probabilities of all answers under the first model")
    arrays: dict[str, Any] = {}
    for name, source in _sources(run):
        documents: list[tuple[int, ...]] = []
        rows = engine.log_probabilities(_noting(source.each_once(), documents))
        arrays[f"{name}_key"] = np.array(source.key)
        arrays[name] = reference_by_document(source.num_documents, documents, rows)
        arrays[f"{name}_digest"] = np.array(_digest(arrays[name]))
        source.take_reference(arrays[name])
    content = io.BytesIO()
    np.savez(content, **arrays)
    replace_file(_path(run), content.getvalue())


def read_reference(run: Run) -> None:
    """Give out those of the file, for a run that is resumed.

    Raises:
        UserError: the file is missing, damaged, or of other data.
    """
    path = _path(run)
    try:
        with np.load(path) as arrays:
            for name, source in _sources(run):
                values = np.asarray(arrays[name])
                if str(arrays[f"{name}_key"]) != source.key:
                    raise ValueError(f"the {name} data changed")
                if values.shape != (source.num_documents,) or values.dtype != np.float64:
                    raise ValueError(
                        f"it holds {values.dtype} {list(values.shape)}, not {source.num_documents} answers"
                    )
                if str(arrays[f"{name}_digest"]) != _digest(values):
                    raise ValueError(f"its {name} numbers are not those that were computed")
                source.take_reference(values)
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is missing or damaged, and the run cannot be resumed without it ({error})") from error


def _digest(values: NDArray[np.float64]) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()


def _noting(batches: Iterable[Batch], documents: list[tuple[int, ...]]) -> Iterator[Batch]:
    """The batches, one at a time; which documents each has is all that is kept of it."""
    for batch in batches:
        documents.append(batch.documents)
        yield batch


def _path(run: Run) -> Path:
    return run.directory.path / FILE


def _sources(run: Run) -> Iterator[tuple[str, PairSource]]:
    for name, source in (("training", run.corpus.training), ("validation", run.corpus.validation)):
        if source is not None:
            assert isinstance(source, PairSource)
            yield name, source
