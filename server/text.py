"""Token ids in, text out: whole characters only, and nothing of a stop string.

A token may be a part of a character, and a tokenizer may decode a token differently beside others, so each step
decodes a short tail of the ids twice (with and without the new token) and emits the difference, unless it ends in
U+FFFD: then the character is not whole yet. A U+FFFD that the ids truly hold is emitted once something follows it
or the text ends. The pieces joined are the decoded whole, in streaming and in not streaming answers alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "�"


class TextStream:
    """The text of one answer as it grows.

    decode: ids -> text. stop: strings that end the answer; neither they nor what follows is emitted.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []  # not yet emitted, after the context
        self._context = 0  # how many of _ids are emitted already and kept for their effect on what follows
        self._held = ""  # whole characters that may be the beginning of a stop string
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """The text that this token completes, perhaps none. Sets stopped_by when a stop string is complete."""
        self._ids.append(token_id)
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._ids = self._ids[self._context :]
        self._context = len(self._ids)
        return self._hold_back(text)

    def finish(self) -> str:
        """What is left when the answer ends: held text, and a last character that never became whole."""
        left = "" if self.stopped_by is not None else self._hold_back(self._new_text()) + self._held
        self._ids, self._context, self._held = [], 0, ""
        return left

    def _new_text(self) -> str:
        before = self._decode(self._ids[: self._context]) if self._context else ""
        return self._decode(self._ids)[len(before) :]

    def _hold_back(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._held + text
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self._held = ""
            return text[:at]
        keep = max(
            (n for stop in self._stop for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])),
            default=0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
