"""Sections of params.yaml on their own; params.py puts them together. What servers are asked, and which."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def shaped(pattern: str, words: str) -> AfterValidator:
    """Text that matches a pattern as a whole; else the fault is told in `words`, as a pattern tells nobody."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"must be {words}")
        return value

    return AfterValidator(check)


class Load(Section):
    """What a server is asked: so many requests at once (closed loop), so many a second (open loop); see serving/load.py."""

    concurrency: list[Count] = []
    rates: list[Positive] = []
    requests: Count  # a level and round, but never fewer than four for each at once
    rounds: Count
    warmups: Annotated[int, Field(ge=0)] = 2
    prompt_tokens: Count
    output_tokens: Count

    @model_validator(mode="after")
    def _some(self) -> Load:
        if not (self.concurrency or self.rates):
            raise ValueError("nothing to measure: give concurrency: [1, 2, 4] or rates: [0.5, 1]")
        return self


class Server(Section):
    """A variant's server: started here (launch), or found at its address (url); its API key is in the variable key_env."""

    launch: Literal["llamacpp", "vllm"] | None = None
    url: str | None = None
    key_env: Annotated[str, shaped(r"[A-Za-z_][A-Za-z0-9_]{0,63}", "a variable's name: the key is in it")] = "QUANTGATE_API_KEY"
    model: str = ""  # its name there, where there are several
    chat: bool = False

    @model_validator(mode="after")
    def _one(self) -> Server:
        if (self.launch is None) == (self.url is None):
            raise ValueError("give launch: llamacpp (or vllm), or the url of a server; one of the two")
        return self


class Limits(Section):
    """What a request must keep to count as good (goodput); what is left out is not asked."""

    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    e2e_ms: Positive | None = None


class Serving(Section):
    """Which variants are measured as servers too, and how; how much: the tier's `serving`."""

    variants: dict[str, Server] = {}
    prompts: str = ""
    objective: Limits | None = None
    timeout_s: Positive | None = None  # for a whole reply

    @model_validator(mode="after")
    def _whole(self) -> Serving:
        missing = [k for k in ("prompts", "objective", "timeout_s") if not getattr(self, k)]
        if self.variants and missing:
            raise ValueError(f"{missing[0]} is needed and missing, as variants are to be served")
        return self
