"""What a person asks of an evaluation. Framework-free."""

from dataclasses import dataclass
from typing import Literal

from minigpt_jax.errors import UserError
from minigpt_jax.multiple_choice import Asking

Task = Literal["loss", "multiple-choice", "questions"]


@dataclass(frozen=True)
class EvaluationConfig:
    """What is measured, on what, and how a model is asked. Validated when it is made.

    Raises:
        UserError: a value that cannot be, or an option of another task.
    """

    task: Task = "loss"
    """loss: of texts and of what the assistant says in conversations; multiple-choice: how often the right choice is
    the likeliest; questions: how many of the sample's held-out questions it answers to the letter."""
    data: tuple[str, ...] = ()
    """For loss JSONL files of texts or conversations, or directories of them. For multiple-choice .jsonl or .csv with
    question, choices (or A, B, C, D) and answer, as MMLU, C-Eval and CMMLU have them. The sample's when not given."""
    ask: Asking = "text"
    """multiple-choice: compare the text of each choice, or show all and compare their letters."""
    few_shot: int = 0
    """multiple-choice: examples with their answers before each question."""
    few_shot_data: tuple[str, ...] = ()
    """Files that they come from: items of the same subject where there are enough, else the first ones; never an item
    that is evaluated."""
    chat: bool = False
    """Ask as a user by the chat template; for a model that learned to answer."""
    max_seq_len: int = 512
    """loss and multiple-choice: tokens that the model reads at once. Longer documents are cut into windows, each token
    counted once; longer prompts lose their beginning."""
    batch_size: int = 16
    """loss and multiple-choice: rows that are read at once; decides speed and memory, and nothing of the result beyond
    rounding."""

    def __post_init__(self) -> None:
        for name, least in (("few_shot", 0), ("max_seq_len", 2), ("batch_size", 1)):
            value = getattr(self, name)
            _require(value >= least, f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        is_exam = self.task == "multiple-choice"
        _require(
            is_exam or (self.ask, self.few_shot, self.few_shot_data) == ("text", 0, ()),
            "--ask, --few-shot and --few-shot-data go with --task multiple-choice",
        )
        _require(
            not (self.task == "loss" and self.chat),
            "--chat asks questions; the loss of conversations is by the chat template in any case",
        )
        _require(
            not (self.task == "questions" and self.data), "--task questions asks the sample's own; leave --data out"
        )
        _require(
            (self.few_shot > 0) == bool(self.few_shot_data),
            "--few-shot N takes its examples from --few-shot-data; give both",
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)
