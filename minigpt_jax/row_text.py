"""The text of a row whose ids arrive some at a time: no half characters, nothing of a stop string. Framework-free."""

from collections.abc import Sequence

from minigpt_jax.tokenizer import Tokenizer


class RowText:
    """The text of one row: whole characters, up to the first stop string.

    Args:
        tokenizer: of the ids.
        stop: strings before which the text ends.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._characters = tokenizer.stream_decoder(skip_special_tokens=True)
        self._stop = stop
        self._given = 0
        self.text = ""
        """So far; its end may be the beginning of a stop string."""
        self.has_stopped = False
        """A stop string has come, and the text ends before it."""

    def push(self, ids: Sequence[int]) -> int:
        """Take ids; returns how many of them the text needs."""
        for number, id in enumerate(ids):
            self.text += self._characters.push(id)
            if self._cut():
                return number + 1
        return len(ids)

    def finish(self) -> None:
        """No more ids will come."""
        if not self.has_stopped:
            self.text += self._characters.finish()

    def fresh(self, *, is_last: bool) -> str:
        """What has not been given out; the end is held back as long as it may be the beginning of a stop string."""
        end = len(self.text)
        if not is_last:
            end -= max((overlap(self.text, stop) for stop in self._stop), default=0)
        piece = self.text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _cut(self) -> bool:
        places = [place for stop in self._stop if (place := self.text.find(stop)) >= 0]
        if places:
            self.text, self.has_stopped = self.text[: min(places)], True
        return self.has_stopped


def overlap(text: str, mark: str) -> int:
    """Length of the longest beginning of `mark`, short of all of it, that the text ends with."""
    longest = min(len(mark) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)
