"""Reference store and divergence: exact to itself, and equal to the textbook for anything else."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, make_model
from scipy.special import log_softmax, rel_entr, softmax

from pipeline import diverge, engines, reference
from pipeline.core import artifacts, params
from pipeline.core.errors import ArtifactError, DataError, InvalidVariant
from pipeline.core.params import Trajectories
from pipeline.divergence import store
from pipeline.divergence.checkpoints import Partial
from pipeline.divergence.store import Store, Window, batches, estimate_bytes, refuse_if_too_large, shards
from pipeline.evalset.windows import corpus_windows, prompt_ids
from pipeline.metrics.tokens import NEEDED

SETUP = Trajectories(prompts="", tokens=10, temperature=1.0)
PROMPTS = [
    {"id": "p1", "domain": "d", "prompt": "The council met on"},
    {"id": "p2", "domain": "d", "messages": [{"role": "user", "content": "Say something."}]},
    {"id": "p3", "domain": "d", "prompt": "Rain"},
]
DOCUMENTS = [{"id": f"doc{i}", "domain": "ab"[i % 2], "text": f"The council of {i} met and spoke of rain. " * 6} for i in range(4)]


def windows_of(engine: Any) -> list[Window]:
    windows = corpus_windows(DOCUMENTS, engine.tokenizer, 48)
    return windows + reference.trajectories(engine, PROMPTS, SETUP, seed=1)


def finish(engine: Any, windows: list[Window], folder: Path, **more: Any) -> Store:
    """Write a store as `reference` does, and open it."""
    with artifacts.atomic_dir(folder) as out:
        facts = reference.write_store(engine, windows, out, 2, model="m", seed=1, **more)
        artifacts.write_json(
            out / artifacts.MANIFEST, {**facts, "vocab": engine.vocab_size, "files": artifacts.files_of(out)}
        )  # fmt: skip
    return Store(folder)


def build(folder: Path, model: Path) -> tuple[Store, Any]:
    engine: Any = engines.load("hf", model, threads=1)
    return finish(engine, windows_of(engine), folder), engine


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny: Path, tiny_bf16: Path
) -> tuple[Store, Any]:
    model = tiny if request.param == "float32" else tiny_bf16
    return build(tmp_path_factory.mktemp("store") / "reference", model)


@pytest.fixture(scope="module")
def made16(tmp_path_factory: pytest.TempPathFactory, tiny_bf16: Path) -> tuple[Store, Any]:
    """A store of states (a float32 head may not replay, bit for bit, in blocks of another size)."""
    return build(tmp_path_factory.mktemp("store16") / "reference", tiny_bf16)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SHARD_BYTES", 8000)


def columns(engine: Any, where: Store, batch_size: int = 2) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for block in diverge.diverge(engine, where, batch_size=batch_size, threads=1):
        for name, values in block.items():
            found.setdefault(name, []).extend(values)
    return found


def seen(kld: Any) -> diverge.Seen:
    found = diverge.Seen()
    found.add(np.asarray(kld))
    return found


def test_the_store_keeps_two_bytes_a_dimension_of_a_16_bit_model_and_the_head_once(tmp_path: Path, tiny_bf16: Path) -> None:
    where = build(tmp_path / "s", tiny_bf16)[0]
    manifest = where.manifest
    assert manifest["kind"] == "hidden" and manifest["bytes_per_token"] == 2 * 64
    assert manifest["state_bytes"] == 2 * 64 * manifest["tokens"] and manifest["head_bytes"] == 2 * 64 * 512
    sizes = {name: file["bytes"] for name, file in manifest["files"].items()}
    headers = 8192  # names of the tensors in each file
    assert sum(n for name, n in sizes.items() if name.startswith("states/")) < manifest["state_bytes"] + headers
    assert sum(n for name, n in sizes.items() if name.startswith("head/")) < manifest["head_bytes"] + headers


def test_the_reference_through_its_own_store_is_exactly_itself(made: tuple[Store, Any]) -> None:
    found = columns(made[1], made[0])
    assert len(found["kld"]) == made[0].manifest["tokens"] > 200
    assert not any(np.any(found[name]) for name in ("kld", "kld_reverse", "jsd"))
    assert found["logp"] == found["logp_ref"] and found["top1"] == found["top1_ref"] and set(found["top5_overlap"]) == {5}
    diverge.check(seen(found["kld"]), is_reference=True, lossless=True)


def test_another_model_diverges_as_the_textbook_says(made: tuple[Store, Any], tmp_path: Path) -> None:
    other: Any = engines.load("hf", make_model(tmp_path / "other", seed=5), threads=1)
    where, engine = made
    found = columns(other, where)
    order = [w for part in batches(where.windows, 2) for _, w in part]
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


def test_what_has_no_figure_is_counted_and_not_scored() -> None:
    class Bytes:
        bos_token_id, pad_token_id = None, 0

        def __call__(self, text: str, add_special_tokens: bool = True) -> object:
            return type("Encoded", (), {"input_ids": list(text.encode())})

    documents = [
        {"id": str(k), "domain": "x", "text": t} for k, t in enumerate(["\0" * 30, "a" * 30, "\0" * 9 + "a" * 9, "b" * 23])
    ]
    skipped: Counter[str] = Counter()
    found = corpus_windows(documents, Bytes(), 10, skipped)
    assert skipped == {"padding": 3, "short": 1}
    assert [w.window for w in found] == ["1#0", "1#1", "1#2", "2#0", "2#1", "3#0", "3#1"]
    assert all(w.scored == len(w.token_ids) - 1 for w in found)


def test_a_prompt_that_gets_no_reply_is_counted() -> None:
    class Silent:
        class tokenizer:
            bos_token_id = None

            def __new__(cls, text: str, add_special_tokens: bool = True) -> Any:  # type: ignore[misc]
                return SimpleNamespace(input_ids=[1, 2])

        @staticmethod
        def sample(ids: list[list[int]], n: int, sampling: object) -> list[list[int]]:
            return [[5, 6], []]

    skipped: Counter[str] = Counter()
    found = reference.trajectories(Silent(), [PROMPTS[0], PROMPTS[2]], SETUP, 1, skipped)
    assert [w.document for w in found] == ["p1"] and skipped == {"no reply": 1} and found[0].domain == "d"


def test_every_window_begins_as_the_tokenizer_begins_a_text() -> None:
    class WithBos:
        bos_token_id = 7

        def __call__(self, text: str, add_special_tokens: bool = True) -> object:
            ids = ([7] if add_special_tokens else []) + [10 + len(w) for w in text.split()]
            return type("Encoded", (), {"input_ids": ids})

    found = corpus_windows([{"id": "d", "domain": "x", "text": "a bb ccc " * 20}], WithBos(), 31)
    assert [len(w.token_ids) for w in found] == [31, 31]
    assert all(w.token_ids[0] == 7 and w.first == 1 and 7 not in w.token_ids[1:] for w in found)


@pytest.mark.parametrize("name", ["states/hidden-00000.safetensors", "head/model.safetensors", "windows.jsonl"])
def test_a_damaged_store_is_found_and_says_how_to_rebuild(made16: tuple[Store, Any], tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(made16[0].folder, tmp_path / "copy")
    raw = bytearray((folder / name).read_bytes())
    raw[-5] ^= 1
    (folder / name).write_bytes(raw)
    with pytest.raises(ArtifactError, match=f"{Path(name).name} was changed.*delete .*`dvc repro`"):
        Store(folder)


def test_a_store_of_other_things_than_its_key_says_or_of_an_older_version_is_refused(
    made: tuple[Store, Any], tmp_path: Path
) -> None:
    folder, whole = shutil.copytree(made[0].folder, tmp_path / "copy"), made[0].manifest
    ((name, own), *_), other = whole["shards"].items(), "than its key says; delete .* `dvc repro reference`"
    for manifest, words in (
        (whole | {"model": "another"}, other), (whole | {"seed": 2}, other), (whole | {"key": "0" * 64}, other),
        ({k: v for k, v in whole.items() if k != "key"}, "older version; delete"),
        (whole | {"shards": {name: own[1:]}}, "states of all its windows"),
    ):  # fmt: skip
        artifacts.write_json(folder / artifacts.MANIFEST, manifest)
        with pytest.raises(ArtifactError, match=words):
            Store(folder)
    rows = artifacts.read_jsonl(folder / "windows.jsonl")
    rows[0]["token_ids"][3] += 1
    artifacts.write_jsonl(folder / "windows.jsonl", rows)
    artifacts.write_json(folder / artifacts.MANIFEST, whole | {"files": artifacts.files_of(folder)})
    with pytest.raises(ArtifactError, match="other tokens"):
        Store(folder)


def test_a_head_that_does_not_replay_makes_the_store_keep_logits(tmp_path: Path, tiny: Path, small_shards: None) -> None:
    engine: Any = engines.load("hf", tiny, threads=1)
    honest, calls = engine.head.tensor, [0]

    def wrong_later(hidden: Any) -> Any:
        calls[0] += 1
        return honest(hidden) + (1e-3 if calls[0] > 3 else 0)

    engine.head.tensor = wrong_later
    where = finish(engine, corpus_windows(DOCUMENTS[:2], engine.tokenizer, 48), tmp_path / "s")
    assert where.manifest["kind"] == "logits" and "differs" in where.manifest["why_not_hidden"]
    assert where.manifest["bytes_per_token"] == 4 * 512 and not list(where.folder.rglob("hidden-*"))
    engine.head.tensor = honest
    assert not any(columns(engine, where)["kld"])


# --- shards and killed runs --------------------------------------------------------------------------------------


def test_shards_are_bounded_and_hold_every_window_once(made: tuple[Store, Any], small_shards: None) -> None:
    windows = made[0].windows
    found = shards(windows, 2, 128)
    assert len(found) > 3 and sorted(i for s in found for b in s for i, _ in b) == list(range(len(windows)))
    for shard in found:
        assert len(shard) == 1 or sum(w.scored for b in shard for _, w in b) * 128 <= 8000


def test_many_shards_hold_what_one_does_and_only_one_is_open(
    made: tuple[Store, Any], tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = finish(made[1], made[0].windows, tmp_path / "s")
    opened: list[str] = []
    plain = store._open
    monkeypatch.setattr(store, "_open", lambda path: opened.append(path.name) or plain(path))
    assert columns(made[1], where) == columns(made[1], made[0])
    ours = [name for name in opened if (where.folder / "states" / name).exists()]
    assert len(where.manifest["shards"]) > 3
    assert len(set(ours)) == len(where.manifest["shards"]), "each is opened"
    assert where.manifest["key"] == made[0].manifest["key"], "the key names what is held, not how it is cut"


class Stopped(Exception):
    pass


def stop() -> None:
    raise Stopped


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_after(engine: Any, batches_done: int, monkeypatch: pytest.MonkeyPatch, how: Callable[[], object] = stop) -> list[int]:
    """Make an engine stop after so many forward passes; returns a list that grows with each pass."""
    plain, done = engine.own_logits, []

    def own_logits(batch: Any) -> Any:
        if len(done) >= batches_done:
            how()
        done.append(len(batch))
        return plain(batch)

    monkeypatch.setattr(engine, "own_logits", own_logits)
    return done


def test_a_stopped_reference_goes_on_where_it_was_and_gives_the_same_store(
    made16: tuple[Store, Any], tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, windows = made16[1], made16[0].windows
    whole = finish(engine, windows, tmp_path / "whole")
    plan = shards(windows, 2, int(whole.manifest["bytes_per_token"]))
    passes = sum(map(len, plan))
    partial = Partial(tmp_path / "partial" / "reference-1")
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(engine, passes - 1, patch)
        finish(engine, windows, tmp_path / "resumed", partial=partial)
    assert not (tmp_path / "resumed").exists() and not list(tmp_path.glob(".resumed*"))
    with monkeypatch.context() as patch:
        again = stop_after(engine, passes, patch)
        resumed = finish(engine, windows, tmp_path / "resumed", partial=partial)
    assert len(again) == len(plan[-1]) < passes, "only the shard that was not finished is computed"
    assert resumed.manifest == whole.manifest


def killed(work: Callable[[], object]) -> None:
    """Do this in a child that kills itself before it is done."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_killed_reference_leaves_no_half_store_and_goes_on(
    made16: tuple[Store, Any], tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, windows = made16[1], made16[0].windows
    plan = shards(windows, 2, 128)
    partial, out = Partial(tmp_path / "partial" / "reference-1"), tmp_path / "reference"
    passes = sum(map(len, plan[: len(plan) // 2])) + 1  # into the shard in the middle
    with monkeypatch.context() as patch:
        stop_after(engine, passes, patch, kill)
        killed(lambda: finish(engine, windows, out, partial=partial))
    assert not out.exists()
    with monkeypatch.context() as patch:
        again = stop_after(engine, 99, patch)
        resumed = finish(engine, windows, out, partial=partial)
    assert 0 < len(again) <= sum(map(len, plan)) - passes + 1 < sum(map(len, plan))
    assert resumed.manifest["key"] == made16[0].manifest["key"] and not any(columns(engine, resumed)["kld"])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [], "what the killed run left is swept"


@pytest.mark.parametrize("damage", ["flip", "cut", "unsealed"])
def test_a_damaged_piece_is_made_again(
    made16: tuple[Store, Any], tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    engine, windows = made16[1], made16[0].windows
    partial = Partial(tmp_path / "partial" / "reference-1")
    whole = finish(engine, windows, tmp_path / "whole", partial=partial)
    piece = partial.folder / "hidden-00001.safetensors"
    # the finished store is a link to the same bytes: damage a copy
    raw = bytearray(piece.read_bytes())
    piece.unlink()
    raw[-5] ^= 1 if damage == "flip" else 0
    piece.write_bytes(raw[:-9] if damage == "cut" else raw)
    if damage == "unsealed":
        piece.with_name(f"{piece.name}.sha256").unlink()
    with monkeypatch.context() as patch:
        again = stop_after(engine, 99, patch)
        repaired = finish(engine, windows, tmp_path / "repaired", partial=partial)
    assert len(again) == len(shards(windows, 2, 128)[1]), "only that shard's batches are computed"
    assert repaired.manifest == whole.manifest


def test_other_inputs_find_no_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        piece = Partial.of("reference", {"model": "m", "seed": seed})
        assert not piece.has("x")
        with piece.write("x") as tmp:
            tmp.write_text("x", encoding="utf-8")
        assert piece.has("x")
    Partial.of("reference", {"model": "m", "seed": 2}).clear()
    assert not list(Path("artifacts/partial").iterdir()), "what older inputs left goes too"


def test_every_input_of_a_store_is_in_what_names_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = params.load(ROOT / "params.yaml")
    with monkeypatch.context() as patch:
        patch.chdir(ROOT)
        base = artifacts.digest(reference.inputs(settings, "m"))
        others = [settings.model_copy(update={"seed": 5}), settings.model_copy(update={"threads": 7, "tier": "smoke"})]
        others.append(settings.model_copy(update={"diverge": settings.diverge.model_copy(update={"window": 99})}))
        found = {artifacts.digest(reference.inputs(s, "m")) for s in others} | {artifacts.digest(reference.inputs(settings, "n"))}
    assert len(found | {base}) == 5
    assert all((ROOT / "pipeline" / name).is_file() for name in reference.CODE)


def test_windows_made_once_are_not_made_again(tmp_path: Path) -> None:
    partial, calls = Partial(tmp_path / "p"), []

    def make(skipped: Any) -> list[Window]:
        calls.append(1)
        skipped["short"] += 2
        return [Window("s", "w", "d", (1, 2, 3), 1, "news")]

    first, second = reference.keep_windows(partial, make), reference.keep_windows(partial, make)
    assert first == second == ([Window("s", "w", "d", (1, 2, 3), 1, "news")], {"short": 2}) and len(calls) == 1


# --- one copy of the head ----------------------------------------------------------------------------------------


def test_the_reference_and_variants_with_its_head_replay_through_one_copy_and_no_others(
    made16: tuple[Store, Any], tmp_path: Path
) -> None:
    where, engine = Store(made16[0].folder), made16[1]
    assert where.share_head(engine) and not any(columns(engine, where)["kld"])
    where, other = Store(made16[0].folder), engines.load("hf", make_model(tmp_path / "other", seed=5), threads=1)
    assert not where.share_head(other) and not where.share_head(SimpleNamespace())
    where._head._model.config.logit_scale = 0.5
    assert not where.share_head(engine), "a head that scales its logits otherwise"


# --- rows on their way to the file -------------------------------------------------------------------------------


def test_a_quantized_variant_that_equals_the_reference_is_an_error_and_no_rows_are_never_a_result() -> None:
    same = seen([0.0, 0.0])
    with pytest.raises(InvalidVariant, match="was not quantized"):
        diverge.check(same, is_reference=False, lossless=False)
    diverge.check(same, is_reference=False, lossless=True)
    diverge.check(seen([0.0, 1e-12]), is_reference=False, lossless=False)
    with pytest.raises(InvalidVariant, match="no token"):
        diverge.check(diverge.Seen(), is_reference=False, lossless=True)


@pytest.mark.parametrize("bad", [1e-9, np.nan, np.inf])
def test_a_reference_that_differs_from_itself_is_an_error(bad: float) -> None:
    with pytest.raises(ArtifactError, match="1 of 2 tokens; delete"):
        diverge.check(seen([0.0, bad]), is_reference=True, lossless=True)


def test_rows_in_groups_are_the_rows_that_were_measured(
    made: tuple[Store, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diverge, "GROUP_ROWS", 60)
    counted = diverge.write(diverge.diverge(made[1], made[0], batch_size=2, threads=1), tmp_path / "rows.parquet")
    file = pq.ParquetFile(tmp_path / "rows.parquet")
    assert file.num_row_groups > 3 and counted.tokens == file.metadata.num_rows == made[0].manifest["tokens"]
    assert file.read().to_pydict() == columns(made[1], made[0])
    assert set(diverge.SCHEMA) >= set(NEEDED)


def test_a_failure_between_groups_leaves_the_old_file(made: tuple[Store, Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_text("old", encoding="utf-8")

    def failing() -> Any:
        yield from itertools.islice(diverge.diverge(made[1], made[0], batch_size=2, threads=1), 3)
        raise Stopped

    with pytest.raises(Stopped), artifacts.atomic_file(path) as tmp:
        diverge.write(failing(), tmp)
    assert path.read_text(encoding="utf-8") == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_between_groups_leaves_no_file_and_the_next_run_sweeps(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"

    def block(k: int) -> dict[str, Any]:
        if k == 300:
            kill()
        return {name: ["x"] * 128 if kind == "string" else np.zeros(128) for name, kind in diverge.SCHEMA.items()}

    def write() -> None:
        with artifacts.atomic_file(path) as tmp:
            diverge.write(map(block, itertools.count()), tmp)

    killed(write)
    assert not path.exists() and len(list(tmp_path.iterdir())) == 1
    with artifacts.atomic_file(path) as tmp:
        diverge.write([], tmp)
    assert list(tmp_path.iterdir()) == [path] and pq.read_table(path).num_rows == 0


def test_another_vocabulary_is_refused(made: tuple[Store, Any]) -> None:
    where, engine = made
    other = Store(where.folder)
    other.manifest = other.manifest | {"vocab": 7}
    with pytest.raises(ArtifactError, match="vocabulary"):
        columns(engine, other)


@pytest.mark.parametrize("change", [
    lambda blocks: blocks[:-1], lambda blocks: [*blocks[:-1], (*blocks[-1][:2], blocks[-1][2][:-1])],
    lambda blocks: [(k, at + 1, logits) for k, at, logits in blocks], lambda blocks: [*blocks, blocks[-1]],
], ids=["a block less", "a row less", "shifted", "a block twice"])  # fmt: skip
def test_an_engine_that_gives_other_positions_is_refused_and_loses_none_in_silence(
    made: tuple[Store, Any], change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = made[1].logit_blocks
    monkeypatch.setattr(made[1], "logit_blocks", lambda *arguments: change(list(plain(*arguments))))
    with pytest.raises(ArtifactError, match="positions"):
        columns(made[1], made[0])


def test_the_stores_size_is_known_before_it_is_written(tmp_path: Path) -> None:
    windows = [Window("s", str(i), str(i), tuple(range(513)), 1) for i in range(256)]
    assert estimate_bytes(windows, 151936, 2) == pytest.approx(39.8e9, rel=0.01)  # logits
    assert estimate_bytes(windows, 4096, 2) == pytest.approx(1.07e9, rel=0.01)  # states
    with pytest.raises(ArtifactError, match="needs .* GB and .* GB free; score fewer documents"):
        refuse_if_too_large(1 << 60, tmp_path)


@pytest.mark.parametrize("exact", [True, False])
def test_a_disk_that_cannot_hold_the_store_is_refused_before_anything_is_computed(
    made16: tuple[Store, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    engine, windows = made16[1], made16[0].windows
    tokens, states = made16[0].manifest["tokens"], made16[0].manifest["bytes_per_token"]
    need = tokens * states + made16[0].manifest["head_bytes"] if exact else tokens * 2 * engine.vocab_size
    usage = shutil.disk_usage(tmp_path)
    partial = Partial(tmp_path / "partial" / "reference-1")
    if not exact:
        with partial.write("inexact.txt") as tmp:
            tmp.write_text("why", encoding="utf-8")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=int(need)))  # a tenth is kept free
    with monkeypatch.context() as patch:
        done = stop_after(engine, 0, patch)
        with pytest.raises(ArtifactError, match="the reference store needs"):
            finish(engine, windows, tmp_path / "s", partial=partial)
    assert not done and not (tmp_path / "s").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=int(need * 1.2)))
    assert finish(engine, windows, tmp_path / "s", partial=partial).manifest["tokens"] == made16[0].manifest["tokens"]


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
        prompt_ids(PROMPTS[1], Plain())
