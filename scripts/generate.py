"""Let a model write: `python scripts/generate.py out/sft-tiny` opens a conversation at the terminal."""

import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import tyro

from minigpt_jax.chat_session import ChatSession
from minigpt_jax.cli import run
from minigpt_jax.config import Backend, DType
from minigpt_jax.data.chat import ChatEncoder
from minigpt_jax.errors import UserError
from minigpt_jax.files import require_writable, write_json
from minigpt_jax.generation import GenerationConfig, generate
from minigpt_jax.terminal_chat import chat
from minigpt_jax.tokenizer import Tokenizer


@dataclass(frozen=True)
class Command(GenerationConfig):
    """Continue texts, or answer questions. Without --prompt a conversation at the terminal begins."""

    model: tyro.conf.Positional[str] = ""
    """A run directory (its best checkpoint), a Hugging Face directory, a .safetensors or a .pth file."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to go on with. Given again, another one beside it."""
    chat: bool = False
    """Take each prompt as a user's message and answer it by the chat template."""
    system: str | None = None
    """A system message that opens each conversation."""
    samples: int = 1
    """Continuations of each prompt."""
    lora: str | None = None
    """An adapter, applied without merging it: a run of --stage lora, a PEFT directory or MiniMind's .pth."""
    context: int = 2048
    """The most tokens of a conversation or text; beyond it the oldest turns go, whole. What a model was not trained on
    (rows of 512 by default) it handles worse."""
    backend: Backend = "jax"
    """Framework that computes: jax, or torch (the twin). A seed draws the same in both."""
    dtype: DType = "float32"
    """Precision of the computation."""
    int8: bool = False
    """Hold the weights of linear layers as 8-bit integers, a quarter of their float32 bytes; the numbers are a little
    off."""
    json: str | None = None
    """With --prompt: write ids, texts and rates to this file as well."""


def main(command: Command) -> None:
    """Load the model and let it write."""
    _check(command)
    from minigpt_bridge.decoders import open_decoder

    ready = open_decoder(
        command.model, backend=command.backend, dtype=command.dtype, int8=command.int8, adapter=command.lora
    )
    if ready.note is not None:
        print(ready.note, file=sys.stderr)
    context = min(command.context, ready.config.max_position_embeddings)
    config = GenerationConfig(**{field.name: getattr(command, field.name) for field in fields(GenerationConfig)})
    if not command.prompt:
        chat(ChatSession(ready.decoder, ready.tokenizer, context=context, system=command.system), config)
        return
    prompts = [_prompt_ids(prompt, ready.tokenizer, command) for prompt in command.prompt]
    begin = time.perf_counter()
    streams = len(prompts) * command.samples == 1
    completions = generate(
        ready.decoder,
        ready.tokenizer,
        prompts,
        config,
        context=context,
        samples=command.samples,
        on_text=_show if streams else None,
    )
    seconds = time.perf_counter() - begin
    rows = [
        {
            "prompt": command.prompt[number // command.samples],
            "ids": done.ids,
            "text": done.text,
            "finish_reason": done.finish_reason,
            "tokens_per_second": len(done.ids) / seconds,
        }
        for number, done in enumerate(completions)
    ]
    if streams:
        print()
    else:
        for row in rows:
            print(f"=== {row['prompt']}\n{row['text']}")
    if any(done.finish_reason == "length" for done in completions):
        print("(cut at --max-new-tokens or --context; the text may go on)", file=sys.stderr)
    if command.json is not None:
        write_json(Path(command.json), rows)


def _check(command: Command) -> None:
    if not command.model:
        raise UserError("name a model: a run directory, a Hugging Face directory, a .safetensors or a .pth file")
    for name, least in (("samples", 1), ("context", 2)):
        if getattr(command, name) < least:
            raise UserError(f"--{name} must be at least {least}, got {getattr(command, name)}")
    if "" in command.prompt:
        raise UserError("--prompt is empty")
    if command.system is not None and command.prompt and not command.chat:
        raise UserError("--system opens a conversation; add --chat")
    if command.json is not None:
        if not command.prompt:
            raise UserError("--json writes what follows a --prompt; give one")
        require_writable(Path(command.json), option="--json")


def _prompt_ids(prompt: str, tokenizer: Tokenizer, command: Command) -> list[int]:
    if not command.chat:
        return [tokenizer.bos_id, *tokenizer.encode(prompt)]
    system = [] if command.system is None else [{"role": "system", "content": command.system}]
    return ChatEncoder(tokenizer).encode_prompt([*system, {"role": "user", "content": prompt}])


def _show(_: int, piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


if __name__ == "__main__":
    run(main, Command)
