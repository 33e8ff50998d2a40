"""What a stage trains and what it leaves alone, as NumPy trees, before the first step. Framework-free."""

from dataclasses import dataclass

from minigpt_jax.formats.names import Parameters, digest
from minigpt_jax.initialization import initial_adapters, initial_parameters
from minigpt_jax.preparation import Run


@dataclass(frozen=True)
class FirstWeights:
    """The two trees of an engine's `init`."""

    trained: Parameters
    """The model's parameters, or adapters in lora."""
    frozen: Parameters | None
    """The base in lora, the teacher in distill, the reference in dpo when it is a copy; else None."""

    @property
    def frozen_digest(self) -> str:
        """SHA-256 over what is frozen; empty where nothing is."""
        return "" if self.frozen is None else digest(self.frozen)


def first_weights(run: Run) -> FirstWeights:
    """The weights that the run starts with; on resume, what is trained is only their shapes.

    Raises:
        UserError: the weights of a model are missing, damaged, or not those of its config.
    """
    train = run.train
    if run.source is not None:
        start = run.source.read_parameters()
    else:
        start = initial_parameters(run.model, initializer=train.initializer, seed=train.seed)
    if train.stage == "lora":
        return FirstWeights(initial_adapters(run.model, train.lora, seed=train.seed), start)
    if train.stage == "distill":
        assert run.teacher is not None
        return FirstWeights(start, run.teacher.read_parameters())
    return FirstWeights(start, start if train.holds_first_model else None)
