"""What autoawq.py and autogptq.py share. It runs in their environments, where nothing of pipeline/ can be imported.

Files in: `request.json` {base, out, rows, kept, probe_ids, probe_kept, and the method's own options}.
Files out: the checkpoint in `out`, and `result.json` beside the request: {unsupported} or {config, modules, probe, versions, ...}.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # files in, files out
warnings.filterwarnings("ignore")

# In no config class of transformers 4.51, and without a say in what a model computes.
NOTES = {"_model_name_or_path", "_name_or_path", "architectures", "transformers_version", "is_local", "local_files_only"}


class Unsupported(Exception):
    """The library cannot do this; the message is the reason that is kept with the variant."""


def main(quantize: Callable[[dict[str, Any]], dict[str, Any]], packages: tuple[str, ...]) -> None:
    """Read the request named on the command line, quantize, write the result."""
    file = Path(sys.argv[1])
    try:
        result = quantize(json.loads(file.read_text(encoding="utf-8")))
    except Unsupported as e:
        result = {"unsupported": str(e)}
    versions = {name: metadata.version(name) for name in (*packages, "transformers", "torch")}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    out = file.with_name("result.json")
    out.write_text(json.dumps({**result, "versions": versions, "peak_memory_bytes": peak}), encoding="utf-8")


def check_config(folder: str) -> None:
    """Raise if this transformers does not know the model, or a key of its config: it would be ignored without a word."""
    from transformers import AutoConfig

    given = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    try:
        known = type(AutoConfig.from_pretrained(folder))().to_dict()
    except (ValueError, KeyError) as e:
        raise Unsupported(f"transformers {metadata.version('transformers')} does not know this model: {e}") from None
    lost = sorted(k for k, v in given.items() if k not in known and k not in NOTES and v not in (None, False))
    if lost:
        raise Unsupported(f"transformers {metadata.version('transformers')} does not know {', '.join(lost)} in config.json")


def cast(model: Any, dtype: Any) -> None:
    """Cast what stays unpacked; packed codes and their scales are buffers and stay as they are."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def answer(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """What the packed model in memory says to the probe: {token_ids, at, logits}, as pipeline/quantizers/_probe.py."""
    import torch

    ids = request["probe_ids"]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1].float().cpu()
    values, at = logits.topk(request["probe_kept"])
    return {"token_ids": ids, "at": at.tolist(), "logits": values.tolist()}
