"""Read a streamed reply: server-sent events, their text, usage and arrival times. Pure: no network, no clock."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeline.core.records import Json, Phases, Said

REASONING = ("reasoning_content", "reasoning")  # llama.cpp, SGLang and vLLM use the first, newer vLLM the second
MAX_TOKENS = 2**40  # no reply has more
MAX_EVENT = 1 << 20  # characters
ABORTED = ("error", "abort")  # finish reasons of a server that gave up
LINE_END = re.compile(r"\r\n|\r|\n")  # no other: texts may contain Unicode's further line separators


class Fault(Exception):
    """Why a request failed. kind: connect, timeout, http, in_band, cut, reset, malformed, short or unsent."""

    def __init__(self, kind: str, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.kind, self.retry_after = kind, retry_after


def part(value: Any, *path: str | int) -> Any:
    """The part of a server's JSON at a path of keys and indices, or None."""
    try:
        for key in path:
            value = value[key]
    except (LookupError, TypeError):
        return None
    return value


def message_of(error: Any) -> str:
    """The message of an error, which is text or an object with a message or a nested error."""
    inner = part(error, "message") or part(error, "error")
    return message_of(inner) if inner else str(error)


def error_in(reply: Any) -> Any:
    """The error in a server's object, even an empty one, or None."""
    error = part(reply, "error")
    if error not in (None, "", False):
        return error
    return reply if "error" in (part(reply, "object"), part(reply, "type")) else None


def paired(text: str) -> str:
    """`text` with surrogate pairs joined, as JSON escapes them; a lone surrogate, which cannot be encoded, becomes U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def said_in(logprobs: Any) -> list[Said]:
    """Tokens with the gap between the two likeliest, as llama.cpp and chats send them (`content`), or vLLM's completions."""
    several = [(t["token"], [top["logprob"] for top in t["top_logprobs"]]) for t in part(logprobs, "content") or []]
    several += [(t, list(tops.values())) for t, tops in zip(part(logprobs, "tokens") or [], part(logprobs, "top_logprobs") or [])]
    best = [(token, sorted(values)[-2:]) for token, values in several]
    return [{"token": paired(token), "gap": values[1] - values[0]} for token, values in best]


def _in_stream(error: Any) -> Fault:
    return Fault("in_band", f"error in the stream: {message_of(error)}")


class Event(NamedTuple):
    data: str
    kind: str = "message"


async def events(stream: AsyncIterable[bytes]) -> AsyncIterator[Event]:
    """Read server-sent events (HTML standard, section 9.2.6) from bytes, always as UTF-8. Raises `Fault` for an endless event.
    Not httpx2's: older llama.cpp servers send a field `error`, and no event may wait for the bytes that follow it."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")  # drops a byte order mark at the start
    rest, after_cr, kind, data = "", False, "", list[str]()
    async for content in stream:
        text = decoder.decode(content)
        if after_cr and text.startswith("\n"):  # a CR LF cut in two
            text, after_cr = text[1:], False
        after_cr = text.endswith("\r") if text else after_cr
        *lines, rest = LINE_END.split(rest + text)
        for line in lines:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                kind = value
            elif name in ("data", "error"):
                data.append(value)
                kind = "error" if name == "error" else kind
            elif not line:
                event = Event("\n".join(data), kind or "message")
                kind, data = "", []
                if event.data.strip():
                    yield event
        if len(rest) + sum(map(len, data)) > MAX_EVENT:
            raise Fault("malformed", f"an event has more than {MAX_EVENT} characters")


@dataclass
class Reply:
    """A reply so far. Times are arrivals of events in this process, in seconds of the caller's clock.

    t_chunks: events with text (reasoning, content or a tool call); t_empty: events without text, role and finish; t_finish: the
    event with the finish reason. clean: removes the API key from the server's text.
    """

    status: int | None = None  # HTTP, once there are headers
    phases: Phases = field(default_factory=lambda: Phases(connected=None, headers=None))
    t_chunks: list[float] = field(default_factory=list)
    t_empty: list[float] = field(default_factory=list)
    t_finish: float | None = None
    t_content: float | None = None
    t_done: float | None = None
    text: str = ""
    reasoning: str = ""
    tools: str = ""
    said: list[Said] = field(default_factory=list)
    usage: Json | None = None
    t_used: float | None = None
    used_at: int = 0  # events with text before the last usage, which does not count later ones
    finish: str | None = None
    clean: Callable[[str], str] = field(default=str, repr=False)

    def take(self, event: Event, now: float) -> None:
        """Take one event. Raises `Fault` for an error in the stream and for anything that is not a reply."""
        data = event.data
        if "error" in event.kind.lower():
            try:
                raise _in_stream(json.loads(data))
            except ValueError:
                raise _in_stream(data) from None
        if data.strip() == "[DONE]":
            self.t_done = now
            return
        if event.kind != "message" and not data.lstrip().startswith("{"):
            return  # a ping as plain text
        try:
            chunk = json.loads(data)
            if (error := error_in(chunk)) is not None:
                raise _in_stream(error)
            for choice in chunk.get("choices") or []:
                self._hear(choice, now)
            if isinstance(usage := chunk.get("usage"), dict):  # some servers send it with every event: the last one counts
                self.usage, self.used_at, self.t_used = usage, len(self.t_chunks), now
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise Fault("malformed", f"an event is not a completion chunk: {self.clean(data)[:80]!r}") from None

    def _hear(self, choice: Json, now: float) -> None:
        if (error := error_in(choice)) is not None:
            raise _in_stream(error)
        delta = choice.get("delta") or {}
        content = choice.get("text") or delta.get("content") or ""
        thought = next((delta[k] for k in REASONING if delta.get(k)), "")
        calls = delta.get("tool_calls") or []
        self.text, self.reasoning = self.text + content, self.reasoning + thought
        self.tools += "".join(part(call, "function", "arguments") or "" for call in calls)
        self.said += said_in(choice.get("logprobs"))
        finish = choice.get("finish_reason")
        if content or thought or calls:
            self.t_chunks.append(now)
        elif not finish and not delta.get("role"):
            self.t_empty.append(now)
        if content and self.t_content is None:
            self.t_content = now
        if finish:
            self.finish, self.t_finish = paired(str(finish)), now
        if self.finish in ABORTED:
            raise Fault("in_band", f"the server ended the reply with finish_reason {self.finish!r}")

    def t_whole(self) -> float | None:
        """When the reply was complete: at [DONE], or once both its finish and its usage had come; None before."""
        counted = self.used("completion_tokens") and self.used_at == len(self.t_chunks)
        if self.t_done is not None or not counted or self.t_used is None or self.t_finish is None:
            return self.t_done
        return max(self.t_used, self.t_finish)

    def check_end(self) -> None:
        """Raise `Fault` unless the stream was complete: a closed connection alone proves nothing."""
        if self.t_done is None and self.finish is None:
            raise Fault("cut", f"the stream closed without its end, after {len(self.t_chunks)} chunks")
        if not self.t_chunks and not self.used("completion_tokens"):
            raise Fault("cut", "the stream ended without a token")

    def used(self, *path: str) -> int | None:
        """A number of tokens in the server's usage; None if it is missing or impossible."""
        value = part(self.usage, *path)
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS else None

    def output_tokens(self, count: Callable[[str], int] | None) -> tuple[int | None, str]:
        """(number of tokens or None, how it was counted). count: tokens of a text, for servers without usage. Events are not
        counted: one may carry several tokens."""
        used = self.used("completion_tokens")
        if used and self.used_at == len(self.t_chunks):
            return used, "usage"
        lacks = "the server sent no usage" + (" after the last text" if used else "" if self.usage is None else " that counts")
        if count is None:
            return None, f"not counted: {lacks} and no tokenizer was given"
        return count(paired(self.reasoning + self.text + self.tools)), f"tokenizer, joined text: {lacks}"

    def arrivals(self, tokens: int | None) -> list[float]:
        """Arrivals of tokens. Events without text count (as buffered partial characters) only if with them each token has an event;
        otherwise they may be keep-alives."""
        every = sorted(self.t_chunks + self.t_empty)
        return every if tokens == len(every) else self.t_chunks

    def t_last(self, tokens: int | None) -> float | None:
        """Arrival of the last token, or of the reply's finish if not every token was seen."""
        seen = self.arrivals(tokens)
        unseen = tokens is not None and len(seen) < tokens and self.t_finish is not None
        return self.t_finish if unseen else seen[-1] if seen else None
