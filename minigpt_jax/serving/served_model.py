"""From a request to what the batcher is asked, and to the answer that its events fill. Framework-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minigpt_jax.chat_session import PromptTooLongError, fitting_prompt, room_for_prompt
from minigpt_jax.data.chat import ChatEncoder
from minigpt_jax.errors import UserError
from minigpt_jax.serving.answers import END_THINK, THINK
from minigpt_jax.serving.api import Asked, ChatRequest, chat_request, completion_request
from minigpt_jax.serving.fields import RequestError
from minigpt_jax.serving.requests import GenerationRequest
from minigpt_jax.serving.responses import Answer, ChatAnswer, CompletionAnswer
from minigpt_jax.tokenizer import Tokenizer


@dataclass(frozen=True)
class Job:
    """One request, understood."""

    requests: tuple[GenerationRequest, ...]
    """One for each choice."""
    answer: Answer
    streams: bool


class ServedModel:
    """A model under the name by which it is asked for.

    Args:
        name: the name.
        tokenizer: of the model.
        context: the most tokens of a request, new ones included.
        most_choices: of one request.

    Raises:
        UserError: its chat template is not Jinja.
    """

    def __init__(self, name: str, tokenizer: Tokenizer, *, context: int, most_choices: int):
        self.name, self._tokenizer, self._context, self._most_choices = name, tokenizer, context, most_choices
        self._encoder = ChatEncoder(tokenizer)

    def chat(self, body: Any) -> Job:
        """A body of /v1/chat/completions.

        Raises:
            RequestError: it cannot be answered.
        """
        request = chat_request(body, context=self._context)
        self._require_known(request)
        self._require_few(request.n, "n")
        ids = tuple(self._chat_prompt(request))
        answer = ChatAnswer(
            request,
            model=self.name,
            tokenizer=self._tokenizer,
            prompt_tokens=len(ids),
            is_thinking=self._is_thinking(ids),
        )
        return Job(_requests([ids], request), answer, request.streams)

    def completion(self, body: Any) -> Job:
        """A body of /v1/completions.

        Raises:
            RequestError: it cannot be answered.
        """
        request = completion_request(body, context=self._context)
        self._require_known(request)
        self._require_few(len(request.prompts) * request.n, "n" if len(request.prompts) == 1 else "prompt")
        prompts = [self._completion_prompt(prompt) for prompt in request.prompts]
        answer = CompletionAnswer(request, model=self.name, tokenizer=self._tokenizer, prompts=prompts)
        return Job(_requests(prompts, request), answer, request.streams)

    def require_named(self, name: str) -> None:
        """Refuse another model's name.

        Raises:
            RequestError: there is no such model here.
        """
        if name != self.name:
            raise RequestError(
                f"there is no model {name!r} here; this server has {self.name!r}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def _require_known(self, request: Asked) -> None:
        if request.model is not None:
            self.require_named(request.model)

    def _require_few(self, choices: int, param: str) -> None:
        if choices > self._most_choices:
            raise RequestError(
                f"{choices} texts were asked for, and one request can have {self._most_choices}; send several requests",
                param=param,
                code="invalid_value",
            )

    def _chat_prompt(self, request: ChatRequest) -> list[int]:
        """The ids up to the answer. The oldest turns go where there are too many; the system message stays."""
        known = self._encoder.template_variables
        for name, value in request.variables.items():
            if name not in known and value is not False:
                raise RequestError(
                    f"the model's chat template does not read {name}; it reads {', '.join(sorted(known)) or 'nothing'}",
                    param="open_thinking" if name == "open_thinking" else f"chat_template_kwargs.{name}",
                    code="unsupported_parameter",
                )
        messages = request.messages
        opening = next((number for number, each in enumerate(messages) if each["role"] != "system"), len(messages))
        try:
            ids, _ = fitting_prompt(
                self._encoder,
                messages[:opening],
                messages[opening:],
                room=room_for_prompt(self._context, request.config.max_new_tokens),
                most=self._context - 1,
                tools=request.tools or None,
                variables={name: value for name, value in request.variables.items() if name in known},
            )
        except PromptTooLongError as error:
            raise RequestError(str(error), param="messages", code="context_length_exceeded") from error
        except UserError as error:
            raise RequestError(str(error), param="messages", code="invalid_value") from error
        return ids

    def _completion_prompt(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        tokenizer = self._tokenizer
        ids = (tokenizer.bos_id, *tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
        highest = tokenizer.vocab_size - 1
        if not 0 <= min(ids) <= max(ids) <= highest:
            raise RequestError(
                f"prompt has an id that is no token's; they go from 0 to {highest}",
                param="prompt",
                code="invalid_value",
            )
        if len(ids) >= self._context:
            raise RequestError(
                f"the prompt takes {len(ids)} tokens, and there is room for {self._context - 1}; shorten it",
                param="prompt",
                code="context_length_exceeded",
            )
        return ids

    def _is_thinking(self, ids: Sequence[int]) -> bool:
        """Whether the prompt ends within the reasoning, which some templates open."""
        marks = self._tokenizer.added_tokens
        ends = (self._tokenizer.bos_id, marks.get(END_THINK))
        for id in reversed(ids):
            if id in ends:
                return False
            if id == marks.get(THINK):
                return True
        return False


def _requests(prompts: Sequence[tuple[int, ...]], asked: Asked) -> tuple[GenerationRequest, ...]:
    # Every choice draws numbers of its own, also where two prompts are the same.
    each = (prompt for prompt in prompts for _ in range(asked.n))
    return tuple(
        GenerationRequest(prompt, asked.config, row=row, num_logprobs=asked.num_logprobs)
        for row, prompt in enumerate(each)
    )
