"""Reference store and divergence: exact to itself, and equal to the textbook for anything else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_model
from scipy.special import log_softmax, rel_entr, softmax

from pipeline import artifacts, diverge, engines, reference
from pipeline.errors import ArtifactError, DataError, InvalidVariant
from pipeline.params import Trajectories
from pipeline.store import Store, Window, batches, estimate_bytes, refuse_if_too_large

SETUP = Trajectories(prompts="", tokens=10, temperature=1.0)
PROMPTS = [
    {"id": "p1", "domain": "d", "prompt": "The council met on"},
    {"id": "p2", "domain": "d", "messages": [{"role": "user", "content": "Say something."}]},
    {"id": "p3", "domain": "d", "prompt": "Rain"},
]
DOCUMENTS = [{"id": f"doc{i}", "domain": "ab"[i % 2], "text": f"The council of {i} met and spoke of rain. " * 6} for i in range(4)]


def build(folder: Path, model: Path) -> tuple[Store, Any]:
    engine: Any = engines.load("hf", model, threads=2)
    windows = reference.corpus_windows(DOCUMENTS, engine.tokenizer, 48)
    windows += reference.trajectories(engine, PROMPTS, SETUP, seed=1)
    with artifacts.atomic_dir(folder) as out:
        facts = reference.write_store(engine, windows, out, batch_size=2)
        manifest = {**facts, "vocab": engine.vocab_size, "files": artifacts.files_of(out)}
        artifacts.write_json(out / artifacts.MANIFEST, manifest)
    return Store(folder), engine


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny: Path, tiny_bf16: Path
) -> tuple[Store, Any]:
    model = tiny if request.param == "float32" else tiny_bf16
    return build(tmp_path_factory.mktemp("store") / "reference", model)


def columns(engine: Any, store: Store, batch_size: int = 2) -> dict[str, list[Any]]:
    return diverge.diverge(engine, store, batch_size=batch_size, threads=2)


def test_the_store_keeps_states_of_a_16_bit_model_and_not_logits(tmp_path: Path, tiny_bf16: Path) -> None:
    manifest = build(tmp_path / "s", tiny_bf16)[0].manifest
    assert manifest["kind"] == "hidden" and manifest["state_bytes"] == manifest["tokens"] * 64 * 2


def test_the_reference_through_its_own_store_is_exactly_itself(made: tuple[Store, Any]) -> None:
    found = columns(made[1], made[0])
    assert len(found["kld"]) == made[0].manifest["tokens"] > 200
    assert not np.any(found["kld"]) and not np.any(found["jsd"])
    assert found["logp"] == found["logp_ref"] and found["top1"] == found["top1_ref"]
    diverge.check(found, is_reference=True, lossless=True)


def test_another_model_diverges_as_the_textbook_says(made: tuple[Store, Any], tmp_path: Path) -> None:
    other: Any = engines.load("hf", make_model(tmp_path / "other", seed=5), threads=2)
    store, engine = made
    found = columns(other, store)
    order = [w for part in batches(store.windows, 2) for _, w in part]
    expected, true = [], []
    for w in order:
        keep = slice(w.first - 1, len(w.token_ids) - 1)
        p = softmax(engine.logits(w.token_ids)[keep].astype(float), -1)
        q = softmax(other.logits(w.token_ids)[keep].astype(float), -1)
        expected.append(rel_entr(p, q).sum(-1))
        logp = log_softmax(other.logits(w.token_ids)[keep].astype(float), -1)
        true.append(logp[np.arange(len(logp)), list(w.token_ids[w.first :])])
    np.testing.assert_allclose(found["kld"], np.concatenate(expected), rtol=2e-2, atol=1e-4)
    np.testing.assert_allclose(found["logp"], np.concatenate(true), rtol=1e-2, atol=1e-3)


def test_every_scored_position_is_there_once_with_its_token(made: tuple[Store, Any]) -> None:
    found = columns(made[1], made[0], batch_size=3)
    seen = {(w, p): t for w, p, t in zip(found["window"], found["position"], found["token_id"])}
    assert len(seen) == len(found["kld"])
    for w in made[0].windows:
        for p in range(w.first, len(w.token_ids)):
            assert seen[w.window, p] == w.token_ids[p]


def test_trajectories_score_only_what_the_reference_wrote(made: tuple[Store, Any]) -> None:
    own = [w for w in made[0].windows if w.set == "trajectory"]
    assert [w.document for w in own] == ["p1", "p2", "p3"]
    assert all(1 <= w.scored <= 10 for w in own)
    assert own[1].token_ids[0] == 1, "a chat goes through the model's template"


def test_windows_never_cross_documents_and_lose_no_token(made: tuple[Store, Any]) -> None:
    tokenizer = made[1].tokenizer
    for document in DOCUMENTS:
        pieces = [t for w in made[0].windows if w.document == document["id"] for t in w.token_ids]
        ids = tokenizer(document["text"]).input_ids
        assert pieces == ids[: len(pieces)] and len(ids) - len(pieces) < 8


def test_every_window_begins_as_the_tokenizer_begins_a_text() -> None:
    class WithBos:
        bos_token_id = 7

        def __call__(self, text: str, add_special_tokens: bool = True) -> object:
            ids = ([7] if add_special_tokens else []) + [10 + len(w) for w in text.split()]
            return type("Encoded", (), {"input_ids": ids})

    found = reference.corpus_windows([{"id": "d", "domain": "x", "text": "a bb ccc " * 20}], WithBos(), 31)
    assert [len(w.token_ids) for w in found] == [31, 31]
    assert all(w.token_ids[0] == 7 and w.first == 1 and 7 not in w.token_ids[1:] for w in found)


def test_a_damaged_store_is_found(made: tuple[Store, Any], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in made[0].folder.rglob("*"):
        if file.is_file():
            target = folder / file.relative_to(made[0].folder)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(file.read_bytes())
    raw = bytearray((folder / "states.safetensors").read_bytes())
    raw[-5] ^= 1
    (folder / "states.safetensors").write_bytes(raw)
    with pytest.raises(ArtifactError, match=r"states.safetensors was changed"):
        Store(folder)


def test_a_head_that_does_not_replay_makes_the_store_keep_logits(tmp_path: Path, tiny: Path) -> None:
    engine: Any = engines.load("hf", tiny, threads=2)
    honest = engine.head.tensor
    engine.head.tensor = lambda hidden: honest(hidden) + 1e-3
    windows = reference.corpus_windows(DOCUMENTS[:1], engine.tokenizer, 48)
    (tmp_path / "s").mkdir()
    facts = reference.write_store(engine, windows, tmp_path / "s", batch_size=2)
    assert facts["kind"] == "logits" and "differs" in facts["why_not_hidden"]
    artifacts.write_json(
        tmp_path / "s" / artifacts.MANIFEST, {**facts, "vocab": engine.vocab_size, "files": artifacts.files_of(tmp_path / "s")}
    )
    engine.head.tensor = honest
    assert not any(columns(engine, Store(tmp_path / "s"))["kld"])


def test_a_quantized_variant_that_equals_the_reference_is_an_error() -> None:
    same = {"kld": [0.0, 0.0]}
    with pytest.raises(InvalidVariant, match="was not quantized"):
        diverge.check(same, is_reference=False, lossless=False)
    diverge.check(same, is_reference=False, lossless=True)


def test_a_reference_that_differs_from_itself_is_an_error() -> None:
    with pytest.raises(ArtifactError, match="1 of 2 tokens"):
        diverge.check({"kld": [0.0, 1e-9]}, is_reference=True, lossless=True)


def test_another_vocabulary_is_refused(made: tuple[Store, Any]) -> None:
    store, engine = made
    other = Store(store.folder)
    other.manifest = other.manifest | {"vocab": 7}
    with pytest.raises(ArtifactError, match="vocabulary"):
        columns(engine, other)


def test_the_stores_size_is_known_before_it_is_written(tmp_path: Path) -> None:
    windows = [Window("s", str(i), str(i), tuple(range(513)), 1) for i in range(256)]
    assert estimate_bytes(windows, 151936, 2) == pytest.approx(39.8e9, rel=0.01)  # logits
    assert estimate_bytes(windows, 4096, 2) == pytest.approx(1.07e9, rel=0.01)  # states
    with pytest.raises(ArtifactError, match="needs .* GB and"):
        refuse_if_too_large(1 << 60, tmp_path)


def test_batches_hold_windows_of_one_length() -> None:
    windows = [Window("s", str(n), str(n), tuple(range(n)), 1) for n in (10, 20, 10, 30, 10, 20)]
    found = list(batches(windows, 2))
    assert all(len({len(w.token_ids) for _, w in part}) == 1 and len(part) <= 2 for part in found)
    assert sorted(i for part in found for i, _ in part) == list(range(6))


def test_subsets_nest_and_spread_over_domains() -> None:
    rows = [{"id": f"{d}{i}", "domain": d, "text": "t"} for d in "abcd" for i in range(5)]
    chosen = [{r["id"] for r in reference.choose(rows, n, 7)} for n in (4, 9, "all")]
    assert chosen[0] < chosen[1] < chosen[2] and {i[0] for i in chosen[0]} == set("abcd")


def test_a_chat_without_a_template_is_refused(made: tuple[Store, Any]) -> None:
    class Plain:
        chat_template = None

    with pytest.raises(DataError, match="no chat template"):
        reference.prompt_ids(PROMPTS[1], Plain())


def test_a_window_is_plain_data() -> None:
    w = Window("s", "w", "d", (1, 2, 3), 1)
    assert replace(w, first=2).scored == 1 and json.dumps(w.token_ids) == "[1, 2, 3]"
