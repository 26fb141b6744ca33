"""Real vLLM: its logits are transformers' but for rounding, and its worker's faults are caught.

python tests/bench/vllm_engine.py [MODEL_DIR]       (artifacts/models/bf16; vLLM: see docs/engines-and-servers.md)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from pipeline.divergence.in_vllm import LogitsReader

CLOSE = 0.05  # of the largest logit, in bfloat16


class OneRowLate(LogitsReader):
    """The prompt's logits moved by a row, as if the sampled row were its last."""

    def rows(self, *given: Any) -> Any:
        self._calls[1] = self._calls[1].roll(-1, 0)
        return super().rows(*given)


class AnotherHead(LogitsReader):
    """Logits of a head with two rows exchanged, as where the reference's stands for a quantized one."""

    def rows(self, *given: Any) -> Any:
        self._calls[1] = self._calls[1].roll(1, 1)
        return super().rows(*given)


FAULTS: dict[str, dict[str, object]] = {
    "prefill in chunks": {"max_num_batched_tokens": 64, "enable_chunked_prefill": True},
    "rows one late": {"worker_extension_cls": "tests.bench.vllm_engine.OneRowLate"},
    "another head": {"worker_extension_cls": "tests.bench.vllm_engine.AnotherHead"},
}


def main(folder: Path) -> None:
    import numpy as np

    from pipeline import engines
    from pipeline.core.errors import InvalidVariant
    from pipeline.engines import Sampling, vllm

    base, engine = (engines.load(name, folder, threads=2) for name in ("hf", "vllm"))
    ids = base.tokenizer("The council of the town met on a rainy evening and spoke about the harvest. " * 8).input_ids
    ours, theirs = base.logits(ids), engine.logits(ids)
    off = float(np.abs(ours - theirs).max() / np.abs(ours).max())
    same = float((ours.argmax(1) == theirs.argmax(1)).mean())
    tokens = [[t for t, _ in e.stream(ids, 16, Sampling(stop=False))] for e in (base, engine)]
    print(f"logits of {len(ids)} tokens: at most {off:.2g} of the largest off, {same:.1%} with the same likeliest token")
    print(f"16 greedy tokens: {tokens[0] == tokens[1]}; kernels {engine.kernels()}; {engine.attention}")  # type: ignore[attr-defined]
    engine.close()
    assert off < CLOSE and same > 0.9
    plain = vllm.Driver
    for name, changed in FAULTS.items():
        vllm.Driver = lambda command, arguments, *more, changed=changed: plain(command, arguments | changed, *more)  # type: ignore
        faulty = engines.load("vllm", folder, threads=2)
        try:
            faulty.logits(ids)
        except InvalidVariant as e:
            print(f"{name}: caught: {e}")
        else:
            sys.exit(f"{name}: not caught")
        finally:
            faulty.close()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "artifacts/models/bf16"))
