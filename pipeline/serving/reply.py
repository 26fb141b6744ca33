"""Collect a streamed reply from its events and their arrival times. Pure: no network, no clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# llama.cpp, SGLang and vLLM use the first, newer vLLM the second.
REASONING = ("reasoning_content", "reasoning")
MAX_TOKENS = 2**40  # no reply has more
ABORTED = ("error", "abort")  # finish reasons of a server that gave up


class Fault(Exception):
    """Why a request failed. kind: connect, timeout, http, in_band, cut, reset, malformed, short or unsent."""

    def __init__(self, kind: str, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.kind, self.retry_after = kind, retry_after


def message_of(error: Any) -> str:
    """An error's message: the error is text, or an object with a message or a nested error."""
    inner = (error.get("message") or error.get("error")) if isinstance(error, dict) else None
    return message_of(inner) if inner else str(error)


def error_in(reply: dict[str, Any]) -> Any:
    """The error in a server's object, even an empty one; None if there is none."""
    if reply.get("error") not in (None, "", False):
        return reply["error"]
    return reply if "error" in (reply.get("object"), reply.get("type")) else None


def _amount(value: Any) -> int | None:
    """A number of tokens; None for an impossible one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS else None


def _in_stream(error: Any) -> Fault:
    return Fault("in_band", f"error in the stream: {message_of(error)}")


def paired(text: str) -> str:
    """`text` with surrogate pairs joined, as JSON escapes them; a lone surrogate, which no file takes, becomes U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@dataclass
class Reply:
    """A reply so far. Times are arrivals of events in this process, in seconds of the caller's clock.

    t_chunks: events with text (reasoning, content or a tool call); t_empty: events that could have had text, without a role or a
    finish; t_finish: the event with the finish reason. clean: removes the API key from the server's text, before it is shortened:
    part of a key could not be recognized.
    """

    status: int | None = None  # HTTP, once there are headers
    t_chunks: list[float] = field(default_factory=list)
    t_empty: list[float] = field(default_factory=list)
    t_finish: float | None = None
    t_content: float | None = None
    t_done: float | None = None
    text: str = ""
    reasoning: str = ""
    tools: str = ""
    usage: dict[str, Any] | None = None
    t_used: float | None = None
    used_at: int = 0  # events with text before the last usage; it does not count later ones
    finish: str | None = None
    clean: Callable[[str], str] = field(default=str, repr=False)

    def take(self, data: str, now: float, kind: str = "message") -> None:
        """Take one event; kind: the event's name. Raises `Fault` for an error inside the stream and for anything but a reply."""
        if "error" in kind.lower():
            try:
                raise _in_stream(json.loads(data))
            except ValueError:
                raise _in_stream(data) from None
        if data.strip() == "[DONE]":
            self.t_done = now
            return
        if kind != "message" and not data.lstrip().startswith("{"):
            return  # a ping as plain text
        try:
            chunk = json.loads(data)
            if (error := error_in(chunk)) is not None:
                raise _in_stream(error)
            for choice in chunk.get("choices") or []:
                self._hear(choice, now)
            if isinstance(chunk.get("usage"), dict):  # some send it with every event: the last one counts
                self.usage, self.used_at, self.t_used = chunk["usage"], len(self.t_chunks), now
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise Fault("malformed", f"an event is not a completion chunk: {self.clean(data)[:80]!r}") from None

    def _hear(self, choice: dict[str, Any], now: float) -> None:
        if (error := error_in(choice)) is not None:
            raise _in_stream(error)
        delta = choice.get("delta") or {}
        content = choice.get("text") or delta.get("content") or ""
        thought = next((delta[k] for k in REASONING if delta.get(k)), "")
        arguments = "".join((c.get("function") or {}).get("arguments") or "" for c in delta.get("tool_calls") or [])
        self.text, self.reasoning, self.tools = self.text + content, self.reasoning + thought, self.tools + arguments
        if content or thought or delta.get("tool_calls"):
            self.t_chunks.append(now)
        elif not choice.get("finish_reason") and not delta.get("role"):
            self.t_empty.append(now)
        if content and self.t_content is None:
            self.t_content = now
        if choice.get("finish_reason"):
            self.finish, self.t_finish = paired(str(choice["finish_reason"])), now
        if self.finish in ABORTED:
            raise Fault("in_band", f"the server ended the reply with finish_reason {self.finish!r}")

    def t_whole(self) -> float | None:
        """When the reply was complete: at [DONE], or when both its finish and its usage had come; None before."""
        counted = self._used("completion_tokens") and self.used_at == len(self.t_chunks)
        if self.t_done is not None or not counted or self.t_used is None or self.t_finish is None:
            return self.t_done
        return max(self.t_used, self.t_finish)

    def check_end(self) -> None:
        """Raise `Fault` unless the stream was complete: a closed connection alone is not an end."""
        if self.t_done is None and self.finish is None:
            raise Fault("cut", f"the stream closed without its end, after {len(self.t_chunks)} chunks")
        if not self.t_chunks and not self._used("completion_tokens"):
            raise Fault("cut", "the stream ended without a token")

    def _used(self, name: str) -> int | None:
        return _amount((self.usage or {}).get(name))

    def output_tokens(self, count: Callable[[str], int] | None) -> tuple[int | None, str]:
        """(number of tokens or None, how it was counted). count: tokens of a text, for servers without usage. Events are never
        counted as tokens: one may carry several."""
        used = self._used("completion_tokens")
        if used and self.used_at == len(self.t_chunks):
            return used, "usage"
        lacks = "the server sent no usage" + (" after the last text" if used else "" if self.usage is None else " that counts")
        if count is None:
            return None, f"not counted: {lacks} and no tokenizer was given"
        return count(paired(self.reasoning + self.text + self.tools)), f"tokenizer, joined text: {lacks}"

    def arrivals(self, tokens: int | None) -> list[float]:
        """Arrivals of tokens. Events without text count as tokens (buffered partial characters) only if with them every token has
        its event; otherwise they may be keep-alives."""
        every = sorted(self.t_chunks + self.t_empty)
        return every if tokens == len(every) else self.t_chunks

    def t_last(self, tokens: int | None) -> float | None:
        """Arrival of the last token; the reply's finish, if not every token was seen."""
        seen = self.arrivals(tokens)
        unseen = tokens is not None and len(seen) < tokens and self.t_finish is not None
        return self.t_finish if unseen else seen[-1] if seen else None

    def prompt_tokens(self) -> int | None:
        return self._used("prompt_tokens")

    def cached_tokens(self) -> int | None:
        """Prompt tokens from a prefix cache; None if the server does not say."""
        details = (self.usage or {}).get("prompt_tokens_details")
        return _amount(details.get("cached_tokens")) if isinstance(details, dict) else None
