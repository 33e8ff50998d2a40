"""What a person reads before a run and after it, and what the model answers.

Framework-free.
"""

from collections import Counter
from collections.abc import Sequence

from minigpt_jax.adapter_tree import adapter_count
from minigpt_jax.config import Stage
from minigpt_jax.config_json import to_json
from minigpt_jax.console import say
from minigpt_jax.cost import parameter_count
from minigpt_jax.data.sample_questions import Question
from minigpt_jax.errors import python
from minigpt_jax.preparation import Run
from minigpt_jax.questions import ANSWER_TOKENS, is_right, prompt_ids
from minigpt_jax.report import last_values, write_report
from minigpt_jax.tracking import read_metrics, write_csv
from minigpt_jax.trainer import Ending, Engine

OPENINGS: tuple[str, ...] = ("The", "\u4eca\u5929", "Once upon a time", "\u4ed6\u8bf4")
"""Beginnings that a model trained on a person's own text is given."""

CHAT_OPENINGS: tuple[str, ...] = (
    "Who are you?",
    "\u4f60\u662f\u8c01\uff1f",
    "What can you do?",
    "\u4f60\u4f1a\u505a\u4ec0\u4e48\uff1f",
)
"""What one that learns to answer is asked."""

NEXT_STAGE: dict[Stage, tuple[Stage, str]] = {
    "pretrain": ("sft", "to make it answer"),
    "sft": ("dpo", "to prefer the better of two answers"),
}
"""What is next, and what for; after sft on the sample alone, for other pairs are a person's own to have."""

SHOWN_SAMPLES = 6


def announce(run: Run, *, accelerator: str | None, chosen: bool) -> None:
    """Say what will be trained on what.

    Args:
        run: what was prepared.
        accelerator: the engine's platform when it is not a CPU.
        chosen: whether the model was left to be chosen.
    """
    train, training = run.train, run.corpus.training
    parameters = parameter_count(run.model)
    if accelerator is None and chosen and not train.resume and run.source is None:
        say(
            f"No accelerator found: training the {train.model} preset ({parameters / 1e6:.1f}M parameters) on the CPU; "
            "--model minimind2-small chooses the 26M one."
        )
    trained = ""
    if train.stage == "lora":
        count = adapter_count(run.model, train.lora)
        trained = f", {count:,} more in adapters, which alone are trained ({count / parameters:.2%})"
    learned = f", {training.supervised_per_epoch:,} of them learned" if train.has_unlearned_tokens else ""
    say(
        f"{train.model or 'custom'}: {parameters:,} parameters{trained}, {train.dtype}; {run.total_updates} updates of "
        f"{train.batch_size} x {train.accumulation_steps} {'pairs' if train.stage == 'dpo' else 'rows'} of "
        f"{train.max_seq_len}; "
        f"{training.predictions_per_epoch:,} tokens a pass{learned}, {training.real_fraction:.1%} of positions real; "
        f"validating on {run.corpus.validation_documents} documents; writing {run.directory.path}"
    )
    if run.source is not None and run.source.note is not None:
        say(run.source.note)
    if run.corpus.overlap:
        say(f"{run.corpus.overlap} of the validation documents are in the training data as well")
    if training.rows_left_out:
        rows = "pairs" if train.stage == "dpo" else "rows"
        say(f"--drop-last leaves {training.rows_left_out} {rows} out of each pass, others in each")
    if run.corpus.left_out:
        say(f"left out: {run.corpus.left_out}")


def conclude(run: Run, engine: Engine, ending: Ending, *, step: int) -> None:
    """Write table and report, and say how the run ended and what can be done next."""
    path = run.directory.path
    samples = _write_samples(run, engine) if ending == "finished" else []
    write_csv(path)
    write_report(path, config=to_json(run.train), model=to_json(run.model), samples=samples)
    last = last_values(read_metrics(path))
    figures = ", ".join(
        f"{label} {last[name]:.3f}"
        for name, label in (
            ("loss", "loss"),
            ("val_loss", "validation loss"),
            ("val_bits_per_byte", "validation bits per byte"),
        )
        if name in last
    )
    again = f"{python()} scripts/train.py --resume --out {path}"
    if ending == "finished":
        say(f"Finished at step {step}: {figures}. Curves: {path}/loss.png, {path}/report.html")
        if run.train.stage in NEXT_STAGE and (run.train.stage == "pretrain" or not run.train.data):
            next_stage, what_for = NEXT_STAGE[run.train.stage]
            say(f"Next, {what_for}: {python()} scripts/train.py --stage {next_stage} --init-from {path}")
        if run.train.data or run.train.stage != "pretrain":
            is_lora = run.train.stage == "lora"
            source, merging = (run.train.init_from, f" --merge-lora {path}") if is_lora else (path, "")
            say(f"Next, to use it elsewhere: {python()} scripts/convert.py {source} {path}-hf --to hf{merging}")
        else:
            say(
                'Or, on your own text (one JSON object with a "text" a line): '
                f"{python()} scripts/train.py --data YOUR.jsonl"
            )
    elif ending == "interrupted":
        say(f"Interrupted at step {step}; everything is saved. Continue with: {again}")
    else:
        can_roll_back = run.train.on_non_finite == "stop"
        say(
            f"Stopped at step {step}: {run.train.max_non_finite_steps} micro-batches in a row had a loss or gradient "
            f"that was not finite (their records are in {path}/events.jsonl). The model before them is saved. "
            "Start again with a lower --learning-rate" + (", or add --on-non-finite rollback" * can_roll_back)
        )


def _write_samples(run: Run, engine: Engine) -> list[tuple[str, str]]:
    """Show what the model writes now; returns (prompt, continuation) pairs for the report."""
    questions = run.corpus.questions
    if run.train.stage == "pretrain":
        prompts = [question.prompt for question in questions] or OPENINGS
    else:
        prompts = [question.question for question in questions] or CHAT_OPENINGS
    continued = _continue(run, engine, prompts, max_new_tokens=ANSWER_TOKENS if questions else 48)
    shown = list(zip(prompts, continued, strict=True))[:SHOWN_SAMPLES]
    for prompt, text in shown:
        say(f"  {prompt.strip()} -> {text.strip() or '(nothing)'}".replace("\n", " / "))
    if questions:
        say(_score(questions, continued))
    return shown


def answer_before(run: Run, engine: Engine) -> None:
    """Say how many of the sample's questions the model answers that a stage starts from."""
    questions = run.corpus.questions
    if questions:
        continued = _continue(run, engine, [question.question for question in questions], max_new_tokens=ANSWER_TOKENS)
        say(f"Before: {_score(questions, continued)}")


def _score(questions: Sequence[Question], continued: Sequence[str]) -> str:
    """How many answers are right, in all and by kind: the first line has to be the answer to the letter."""
    asked, right = Counter(question.kind for question in questions), Counter[str]()
    for question, text in zip(questions, continued, strict=True):
        right[question.kind] += is_right(question, text)
    kinds = ", ".join(f"{kind} {right[kind]}/{asked[kind]}" for kind in asked)
    return f"It answers {right.total()} of {len(questions)} questions that no text it has seen contains: {kinds}."


def _continue(run: Run, engine: Engine, prompts: Sequence[str], *, max_new_tokens: int) -> list[str]:
    """What the model writes after each prompt: goes on with it, or answers it as the user's turn of a chat."""
    ids = prompt_ids(prompts, run.tokenizer, chat=run.train.stage != "pretrain")
    continued = engine.generate(ids, max_new_tokens=max_new_tokens, stop_id=run.tokenizer.eos_id)
    return [run.tokenizer.decode(new) for new in continued]
