"""Parse server-sent events (HTML standard, section 9.2.6), and the field `error`, which some servers send instead of `data`."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.serving.reply import Fault

MAX_EVENT = 1 << 20  # characters
LINE_END = re.compile(r"\r\n|\r|\n")  # no other: texts may contain Unicode's further line separators


@dataclass(frozen=True)
class Event:
    """kind: `message` unless the server names another."""

    kind: str
    data: str


class Parser:
    """Turns bytes, as they come, into events. Bytes are UTF-8, whatever a header says."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")  # drops a byte order mark at the start
        self.rest, self.after_cr = "", False
        self.kind, self.data = "", list[str]()

    def feed(self, content: bytes) -> Iterator[Event]:
        """The events that `content` completes. Raises `Fault` for an endless one."""
        text = self.decoder.decode(content)
        if self.after_cr and text.startswith("\n"):  # a CR LF cut in two
            text, self.after_cr = text[1:], False
        self.after_cr = text.endswith("\r") if text else self.after_cr
        *lines, self.rest = LINE_END.split(self.rest + text)
        for line in lines:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                self.kind = value
            elif name in ("data", "error"):
                self.data.append(value)
                self.kind = "error" if name == "error" else self.kind
            elif not line:
                event = Event(self.kind or "message", "\n".join(self.data))
                self.kind, self.data = "", []
                if event.data.strip():
                    yield event
        if len(self.rest) + sum(map(len, self.data)) > MAX_EVENT:
            raise Fault("malformed", f"an event has more than {MAX_EVENT} characters")
