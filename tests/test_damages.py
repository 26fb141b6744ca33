"""Twenty seeded damages to a trained model: what catches each, and that none costs more than the margin and passes unseen.

The model is tiny and trained here, in seconds, on the project's own texts, so that its predictions mean something. The gate's
own rules on divergence, as they stand in params.yaml, judge sixty documents; what a damage truly costs is read off the others.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, make_model

from pipeline import engines
from pipeline.core import artifacts, params
from pipeline.core.params import Compare
from pipeline.divergence.distributions import compare_logits
from pipeline.gating.rules import bound_of, judge, worst
from pipeline.metrics.builder import Builder
from pipeline.metrics.tokens import token_metrics

WINDOW, STEPS, BATCH = 128, 220, 16
JUDGED = 60  # documents that the gate sees; all others are the truth
Weights = dict[str, Any]
Config = dict[str, Any]
Damage = Callable[[Weights, Config], object]


def documents() -> list[list[str]]:
    files = sorted((ROOT / "evalsets/corpus").glob("*.jsonl")), sorted((ROOT / "evalsets/calibration").glob("*.jsonl"))
    return [[row["text"] for file in own for row in artifacts.read_jsonl(file)] for own in files]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama trained on the corpus and the calibration texts: it shall know them, not generalize."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = make_model(tmp_path_factory.mktemp("trained") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.set_num_threads(1)  # products as small as these only wait for a second thread
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = json.loads((folder / "config.json").read_text("utf-8"))
        config["initializer_range"] = 0.02
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        stream = torch.tensor([t for part in documents() for text in part for t in tokenizer(text).input_ids])
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = 4e-3 * min(1.0, (step + 1) / 20, 2 * (STEPS - step) / STEPS)
            at = torch.randint(0, len(stream) - WINDOW, (BATCH,))
            ids = torch.stack([stream[a : a + WINDOW] for a in at])
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.save_pretrained(folder)
    assert float(loss.detach()) < 4.2, "the model has learned too little for its damages to mean anything"
    return folder


# --- the damages -------------------------------------------------------------------------------------------------


def part(name: str) -> str:
    """A weight of the second layer."""
    return f"model.layers.1.{name}.weight"


def coarse(tensor: Any, levels: int) -> None:
    """Round a tensor to so many steps on each side of 0, with one scale."""
    step = tensor.abs().max() / levels
    tensor[:] = (tensor / step).round() * step


def each(change: Callable[[Any], object], name: str = "proj") -> Damage:
    """The same damage to every weight whose name holds `name`."""
    return lambda w, c: [change(tensor) for key, tensor in w.items() if name in key]


def column_clipped(w: Weights, c: Config) -> None:
    column = w[part("mlp.down_proj")][:, 3]
    column.clamp_(-0.2 * column.abs().max(), 0.2 * column.abs().max())


def embeddings_swapped(w: Weights, c: Config) -> None:
    rows = w["model.embed_tokens.weight"]
    rows[[300, 301]] = rows[[301, 300]].clone()


def layer_skipped(w: Weights, c: Config) -> None:
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        w[part(name)].zero_()


def gate_and_up_swapped(w: Weights, c: Config) -> None:
    gate, up = w[part("mlp.gate_proj")], w[part("mlp.up_proj")]
    held = gate.clone()
    gate[:], up[:] = up.clone(), held


def noise(w: Weights, c: Config) -> None:
    import torch

    made = torch.Generator().manual_seed(3)
    each(lambda t: t.add_(0.05 * t.std() * torch.randn(t.shape, generator=made)))(w, c)


# name: (damage, what surely catches it; None: it costs less than every margin, so that it may pass)
DAMAGES: dict[str, tuple[Damage, str | None]] = {
    "one layer's q x1.02": (lambda w, c: w[part("self_attn.q_proj")].mul_(1.02), None),
    "one layer's v x1.02": (lambda w, c: w[part("self_attn.v_proj")].mul_(1.02), None),
    "one layer's down x1.6": (lambda w, c: w[part("mlp.down_proj")].mul_(1.6), "top1_agreement"),
    "one head zeroed": (lambda w, c: w[part("self_attn.o_proj")][:, :16].zero_(), "top1_agreement"),
    "one column clipped": (column_clipped, None),
    "every matrix clipped at two deviations": (each(lambda t: t.clamp_(-2 * t.std(), 2 * t.std())), "kld_mean"),
    "wrong rope base": (lambda w, c: c.update(rope_parameters={"rope_type": "default", "rope_theta": 500.0}), "kld_mean"),
    "one norm's weights dropped": (lambda w, c: w[part("post_attention_layernorm")].fill_(1), None),
    "final norm x1.1": (lambda w, c: w["model.norm.weight"].mul_(1.1), None),
    "two embeddings swapped": (embeddings_swapped, None),
    "embeddings in 4 bits, one scale": (lambda w, c: coarse(w["model.embed_tokens.weight"], 7), "kld_mean"),
    "4 bits, one scale a matrix": (each(lambda t: coarse(t, 7)), "top1_agreement"),
    "3 bits in one layer's v": (lambda w, c: coarse(w[part("self_attn.v_proj")], 3), None),
    "one layer skipped": (layer_skipped, "kld_mean"), "gate and up swapped": (gate_and_up_swapped, "kld_mean"),
    "another activation": (lambda w, c: c.update(hidden_act="relu"), "kld_mean"),
    "a loose epsilon": (lambda w, c: c.update(rms_norm_eps=0.05), "kld_mean"),
    "signs of eight rows of v flipped": (lambda w, c: w[part("self_attn.v_proj")][:8].mul_(-1), "kld_mean"),
    "noise of 5 % in every matrix": (noise, None),
    "one weight not a number": (lambda w, c: w[part("mlp.up_proj")][0, :1].fill_(float("nan")), "not finite"),
}  # fmt: skip
HARMLESS: dict[str, Damage] = {
    "nothing": lambda w, c: None,
    "8 bits, one scale a matrix": each(lambda t: coarse(t, 127)),
    "one weight in a million": lambda w, c: w[part("mlp.up_proj")][0, :1].mul_(1.01),
}


def damaged(base: Path, out: Path, damage: Damage) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, out)
    weights, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text("utf-8"))
    damage(weights, config)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config), "utf-8")
    return out


# --- what the gate sees, and what is true ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(trained: Path) -> tuple[list[list[int]], list[Any]]:
    """(token ids of a window a document, the trained model's logits there)."""
    engine = engines.load("hf", trained, threads=1)
    corpus, other = documents()
    ids = [engine.tokenizer(text).input_ids[:WINDOW] for text in [*corpus, *other]]
    assert {len(row) for row in ids} == {WINDOW}
    order = np.random.default_rng(1).permutation(len(ids))
    ids = [ids[i] for i in order]
    return ids, logits_of(engine, ids)


def logits_of(engine: Any, ids: list[list[int]]) -> list[Any]:
    """Logits of each window's next tokens."""
    batches = (ids[k : k + BATCH] for k in range(0, len(ids), BATCH))
    return [logits for batch in batches for _, _, logits in engine.logit_blocks(batch, [0] * len(batch), WINDOW)]


def token_rows(engine: Any, texts: Any, which: slice) -> dict[str, Any]:
    n, parts = WINDOW - 1, []
    for k, (ids, expected, logits) in enumerate(zip(texts[0][which], texts[1][which], logits_of(engine, texts[0][which]))):
        labels = {"token_class": "words", "set": "text", "document": f"d{k}", "window": f"d{k}#0"}
        rows = vars(compare_logits(expected, logits, np.asarray(ids[1:])))
        parts.append(rows | {name: [text] * n for name, text in labels.items()} | {"position": range(1, n + 1)})
    return {name: np.concatenate([rows[name] for rows in parts]) for name in parts[0]}


def rules() -> list[Any]:
    """The default gate's rules on divergence."""
    bounds = [bound_of(r) for r in params.load(ROOT / "params.yaml").gate.rules if r.required]
    return [b for b in bounds if b.metric in ("kld_mean", "top1_agreement", "ppl_ratio")]


def verdict(rows: dict[str, Any]) -> tuple[str, set[str]]:
    """(the gate's verdict, the rules that do not pass)."""
    builder = Builder(Compare(resamples=300), 1)
    if fault := token_metrics(builder, rows):
        return "FAIL", {fault}
    judged = {b.metric: judge(b, builder.metrics.get(b.metric)).verdict for b in rules()}
    return worst(list(judged.values())), {m for m, v in judged.items() if v != "PASS"}


def too_dear(rows: dict[str, Any]) -> bool:
    """Whether the true cost is past any margin, or not a number."""
    kld, logp, logp_ref, top1, top1_ref = (np.asarray(rows[k]) for k in ("kld", "logp", "logp_ref", "top1", "top1_ref"))
    cost = {"kld_mean": kld.mean(), "top1_agreement": (top1 == top1_ref).mean(), "ppl_ratio": np.exp((logp_ref - logp).mean())}
    sign = {"lower": 1, "higher": -1}
    return not all(sign[b.better] * (cost[b.metric] - b.threshold) <= 0 for b in rules())


@pytest.mark.parametrize("name", DAMAGES)
def test_no_damage_that_costs_more_than_a_margin_passes(trained: Path, texts: Any, tmp_path: Path, name: str) -> None:
    damage, catcher = DAMAGES[name]
    folder = damaged(trained, tmp_path / "m", damage)
    engine = engines.load("hf", folder, threads=1)
    seen, by = verdict(token_rows(engine, texts, slice(JUDGED)))
    dear = too_dear(token_rows(engine, texts, slice(JUDGED, None)))
    summary = f"{name}: {seen} by {sorted(by)}; costs more than a margin: {dear}"
    assert not dear or seen != "PASS", summary
    if catcher:  # so that the test can fail: it would prove nothing if no damage here were dear
        assert dear and any(catcher in rule for rule in by), summary


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_no_harm_passes(trained: Path, texts: Any, tmp_path: Path, name: str) -> None:
    engine = engines.load("hf", damaged(trained, tmp_path / "m", HARMLESS[name]), threads=1)
    assert verdict(token_rows(engine, texts, slice(JUDGED))) == ("PASS", set())
