"""Reference store and divergence: exact to itself, and equal to the textbook for anything else."""

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
import safetensors
from conftest import ROOT, make_model
from scipy.special import log_softmax, rel_entr, softmax
from store_house import DOCUMENTS, PROMPTS, columns, stored, trajectories, windows_of

from pipeline import diverge, engines, reference
from pipeline.core import artifacts, params, records
from pipeline.core.errors import ArtifactError, DataError, InvalidVariant
from pipeline.divergence import store
from pipeline.divergence.store import Checkpoints, Store, batches, shards
from pipeline.evalset.windows import corpus_windows, prompt_ids
from pipeline.metrics.tokens import NEEDED


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def made(request: Any, tmp_path_factory: pytest.TempPathFactory, tiny: Path, tiny_bf16: Path) -> tuple[Store, Any]:
    engine: Any = engines.load("hf", tiny if request.param == "float32" else tiny_bf16, threads=1)
    return stored(engine, windows_of(engine), tmp_path_factory.mktemp("store") / "reference"), engine


@pytest.fixture(scope="module")
def made16(tmp_path_factory: pytest.TempPathFactory, tiny_bf16: Path) -> tuple[Store, Any]:
    """A store of states (a float32 head may not replay, bit for bit, in blocks of another size)."""
    engine: Any = engines.load("hf", tiny_bf16, threads=1)
    return stored(engine, windows_of(engine), tmp_path_factory.mktemp("store16") / "reference"), engine


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SHARD_BYTES", 8000)


def seen(*kld: float) -> diverge.Seen:
    result = diverge.Seen()
    result.add(np.asarray(kld))
    return result


def test_the_store_keeps_two_bytes_a_dimension_of_a_16_bit_model_and_the_head_once(made16: tuple[Store, Any]) -> None:
    manifest = made16[0].manifest
    assert manifest["kind"] == "hidden" and manifest["bytes_per_token"] == 2 * 64
    assert manifest["state_bytes"] == 2 * 64 * manifest["tokens"] and manifest["head_bytes"] == 2 * 64 * 512
    for part, size in (("states/", manifest["state_bytes"]), ("head/", manifest["head_bytes"])):
        on_disk = sum(file["bytes"] for name, file in manifest["files"].items() if name.startswith(part))
        assert on_disk < size + 8192, "names of the tensors in each file"


def test_the_reference_through_its_own_store_is_exactly_itself(made: tuple[Store, Any]) -> None:
    rows = columns(made[1], made[0])
    assert len(rows["kld"]) == made[0].manifest["tokens"] > 200
    assert not any(np.any(rows[name]) for name in ("kld", "kld_reverse", "jsd"))
    assert rows["logp"] == rows["logp_ref"] and rows["top1"] == rows["top1_ref"] and set(rows["top5_overlap"]) == {5}


def test_another_model_diverges_as_the_textbook_says_at_every_scored_position(made: tuple[Store, Any], tmp_path: Path) -> None:
    other: Any = engines.load("hf", make_model(tmp_path / "other", seed=5), threads=1)
    where, engine = made
    rows = columns(other, where, batch_size=3)
    scored = [(w, p) for part in batches(where.windows, 3) for _, w in part for p in range(w.first, len(w.token_ids))]
    assert list(zip(rows["window"], rows["position"])) == [(w.window, p) for w, p in scored]
    assert rows["token_id"] == [w.token_ids[p] for w, p in scored]
    logits = {w.window: [e.logits(w.token_ids).astype(float) for e in (engine, other)] for w in where.windows}
    kld = [rel_entr(*(softmax(x[p - 1]) for x in logits[w.window])).sum() for w, p in scored]
    logp = [log_softmax(logits[w.window][1][p - 1])[w.token_ids[p]] for w, p in scored]
    np.testing.assert_allclose(rows["kld"], kld, rtol=2e-2, atol=1e-4)
    np.testing.assert_allclose(rows["logp"], logp, rtol=1e-2, atol=1e-3)


# --- windows -----------------------------------------------------------------------------------------------------


def test_trajectories_score_only_what_the_reference_wrote(made: tuple[Store, Any]) -> None:
    windows = [w for w in made[0].windows if w.set == "trajectory"]
    assert [w.document for w in windows] == ["p1", "p2", "p3"] and all(1 <= w.scored <= 10 for w in windows)
    assert windows[1].token_ids[0] == 1, "a chat goes through the model's template"


def test_windows_never_cross_documents_and_lose_no_token(made: tuple[Store, Any]) -> None:
    for document in DOCUMENTS:
        pieces = [t for w in made[0].windows if w.document == document["id"] for t in w.token_ids]
        ids = made[1].tokenizer(document["text"]).input_ids
        assert pieces == ids[: len(pieces)] and len(ids) - len(pieces) < 8


def test_what_has_no_figure_is_counted_and_not_scored() -> None:
    class Bytes:
        bos_token_id, pad_token_id = None, 0

        def __call__(self, text: str, add_special_tokens: bool = True) -> object:
            return SimpleNamespace(input_ids=list(text.encode()))

    texts = ["\0" * 30, "a" * 30, "\0" * 9 + "a" * 9, "b" * 23]
    skipped: Counter[str] = Counter()
    windows = corpus_windows([{"id": str(k), "domain": "x", "text": t} for k, t in enumerate(texts)], Bytes(), 10, skipped)
    assert skipped == {"padding": 3, "short": 1}
    assert [w.window for w in windows] == ["1#0", "1#1", "1#2", "2#0", "2#1", "3#0", "3#1"]
    assert all(w.scored == len(w.token_ids) - 1 for w in windows)


def test_a_prompt_that_gets_no_reply_is_counted(made16: tuple[Store, Any]) -> None:
    silent, skipped = SimpleNamespace(tokenizer=made16[1].tokenizer, sample=lambda *_: [[5, 6], []]), Counter[str]()
    windows = trajectories(silent, [PROMPTS[0], PROMPTS[2]], skipped)
    assert [w.document for w in windows] == ["p1"] and skipped == {"no reply": 1} and windows[0].domain == "d"


def test_every_window_begins_as_the_tokenizer_begins_a_text() -> None:
    class WithBos:
        bos_token_id = 7

        def __call__(self, text: str, add_special_tokens: bool = True) -> object:
            return SimpleNamespace(input_ids=([7] if add_special_tokens else []) + [10 + len(w) for w in text.split()])

    windows = corpus_windows([{"id": "d", "domain": "x", "text": "a bb ccc " * 20}], WithBos(), 31)
    assert [len(w.token_ids) for w in windows] == [31, 31]
    assert all(w.token_ids[0] == 7 and w.first == 1 and 7 not in w.token_ids[1:] for w in windows)


def test_subsets_nest_and_spread_over_domains() -> None:
    rows: Any = [{"id": f"{d}{i}", "domain": d, "text": "t"} for d in "abcd" for i in range(5)]
    chosen = [{r["id"] for r in reference.choose(rows, n, 7)} for n in (4, 9, "all")]
    assert chosen[0] < chosen[1] < chosen[2] and {i[0] for i in chosen[0]} == set("abcd")


def test_a_chat_without_a_template_is_refused() -> None:
    with pytest.raises(DataError, match="no chat template"):
        prompt_ids(PROMPTS[1], SimpleNamespace(chat_template=None))


# --- what is wrong with a store ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["states/hidden-00000.safetensors", "head/model.safetensors", "windows.jsonl"])
def test_a_damaged_store_is_found_and_says_how_to_rebuild(made16: tuple[Store, Any], tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(made16[0].folder, tmp_path / "copy")
    raw = bytearray((folder / name).read_bytes())
    raw[-5] ^= 1
    (folder / name).write_bytes(raw)
    with pytest.raises(ArtifactError, match=f"{Path(name).name} was changed.*delete .*`dvc repro`"):
        Store(folder)


@pytest.mark.parametrize("change, words", [
    ({"model": "another"}, "than its key says; delete .* `dvc repro reference`"), ({"seed": 2}, "than its key says"),
    ({"key": "0" * 64}, "than its key says"), ({"key": None}, "is damaged .key: .*; delete it"),
    ({"shards": {"states/hidden-00000.safetensors": [1]}}, "states of all its windows"),
])  # fmt: skip
def test_a_store_of_other_things_than_its_key_says_is_refused(
    made16: tuple[Store, Any], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = shutil.copytree(made16[0].folder, tmp_path / "copy")
    artifacts.write_json(folder / artifacts.MANIFEST, made16[0].manifest | change)
    with pytest.raises(ArtifactError, match=words):
        Store(folder)


def test_a_store_of_other_tokens_is_refused(made16: tuple[Store, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(made16[0].folder, tmp_path / "copy")
    rows = artifacts.read_jsonl(folder / "windows.jsonl")
    rows[0]["token_ids"][3] += 1
    artifacts.write_jsonl(folder / "windows.jsonl", rows)
    artifacts.write_json(folder / artifacts.MANIFEST, made16[0].manifest | {"files": artifacts.files_of(folder)})
    with pytest.raises(ArtifactError, match="other tokens"):
        Store(folder)


def test_a_head_that_does_not_replay_makes_the_store_keep_logits(tmp_path: Path, tiny: Path, small_shards: None) -> None:
    engine: Any = engines.load("hf", tiny, threads=1)
    honest, calls = engine.head.tensor, itertools.count()
    engine.head.tensor = lambda hidden: honest(hidden) + (1e-3 if next(calls) > 2 else 0)
    where = stored(engine, corpus_windows(DOCUMENTS[:2], engine.tokenizer, 48), tmp_path / "s")
    assert where.manifest["kind"] == "logits" and "differs" in str(where.manifest["why_not_hidden"])
    assert where.manifest["bytes_per_token"] == 4 * 512 and not list(where.folder.rglob("hidden-*"))
    engine.head.tensor = honest
    assert not any(columns(engine, where)["kld"])


@pytest.mark.parametrize("exact", [True, False])
def test_a_disk_that_cannot_hold_the_store_is_refused_before_anything_is_computed(
    made16: tuple[Store, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    engine, where = made16[1], made16[0]
    tokens, pieces = where.manifest["tokens"], Checkpoints(tmp_path / "pieces")
    need = tokens * 2 * (64 if exact else 512) + (where.manifest["head_bytes"] if exact else 0)
    usage = shutil.disk_usage(tmp_path)
    if not exact:
        with pieces.write("inexact.txt") as tmp:
            tmp.write_text("why", encoding="utf-8")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=int(need)))  # a tenth is kept free
    with monkeypatch.context() as patch:
        passes = stop_after(engine, 0, patch)
        with pytest.raises(ArtifactError, match="needs .* GB and .* GB free; score fewer documents"):
            stored(engine, where.windows, tmp_path / "s", pieces)
    assert not passes and not (tmp_path / "s").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=int(need * 1.2)))
    assert stored(engine, where.windows, tmp_path / "s", pieces).manifest["tokens"] == tokens


# --- shards and killed runs --------------------------------------------------------------------------------------


def test_many_bounded_shards_hold_what_one_does_and_only_one_is_open(
    made: tuple[Store, Any], tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = made[0].windows
    plan = shards(windows, 2, 128)
    assert len(plan) > 3 and sorted(i for s in plan for b in s for i, _ in b) == list(range(len(windows)))
    assert all(len(shard) == 1 or sum(w.scored for b in shard for _, w in b) * 128 <= 8000 for shard in plan)
    where = stored(made[1], windows, tmp_path / "s")
    opened: list[str] = []
    plain = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda path, **how: opened.append(f"states/{path.name}") or plain(path, **how))
    assert columns(made[1], where) == columns(made[1], made[0])
    assert where.manifest["shards"].keys() <= set(opened) and len(where.manifest["shards"]) > 3
    assert where.manifest["key"] == made[0].manifest["key"], "the key names what is held, not how it is cut"


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_after(engine: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let an engine be killed after so many forward passes; returns a list that grows with each pass."""
    plain, done = engine.own_logits, []

    def own_logits(batch: Any) -> Any:
        if len(done) >= most:
            kill()
        done.append(len(batch))
        return plain(batch)

    monkeypatch.setattr(engine, "own_logits", own_logits)
    return done


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
@pytest.mark.parametrize("finished", [1, -1], ids=["one shard is finished", "all but one are"])
def test_a_killed_reference_leaves_no_half_store_and_goes_on_where_it_was_and_gives_the_same(
    made16: tuple[Store, Any], tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch, finished: int
) -> None:
    engine, windows = made16[1], made16[0].windows
    whole, plan = stored(engine, windows, tmp_path / "whole"), shards(windows, 2, 128)
    pieces, out = Checkpoints(tmp_path / "pieces"), tmp_path / "reference"
    with monkeypatch.context() as patch:
        stop_after(engine, sum(map(len, plan[:finished])), patch)
        killed(lambda: stored(engine, windows, out, pieces))
    assert not out.exists()
    with monkeypatch.context() as patch:
        passes = stop_after(engine, 99, patch)
        resumed = stored(engine, windows, out, pieces)
    assert len(passes) == sum(map(len, plan[finished:])), "only shards that were not finished are computed"
    assert resumed.manifest == whole.manifest and not any(columns(engine, resumed)["kld"])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "what the killed run left is swept"


@pytest.mark.parametrize("damage", ["flip", "cut", "unsealed"])
def test_a_damaged_piece_is_made_again(
    made16: tuple[Store, Any], tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    engine, windows = made16[1], made16[0].windows
    pieces = Checkpoints(tmp_path / "pieces")
    whole = stored(engine, windows, tmp_path / "whole", pieces)
    piece = pieces.folder / "hidden-00001.safetensors"
    raw = bytearray(piece.read_bytes())
    piece.unlink()  # the finished store is a link to the same bytes: damage a copy
    raw[-5] ^= 1 if damage == "flip" else 0
    piece.write_bytes(raw[:-9] if damage == "cut" else raw)
    if damage == "unsealed":
        piece.with_name(f"{piece.name}.sha256").unlink()
    passes = stop_after(engine, 99, monkeypatch)
    assert stored(engine, windows, tmp_path / "repaired", pieces).manifest == whole.manifest
    assert len(passes) == len(shards(windows, 2, 128)[1]), "only that shard's batches are computed"


def test_other_inputs_find_no_pieces() -> None:
    for seed in (1, 2):
        pieces = Checkpoints.of("reference", {"model": "m", "seed": seed})
        assert not pieces.has("x")
        with pieces.write("x") as tmp:
            tmp.write_text("x", encoding="utf-8")
        assert pieces.has("x")
    pieces.clear()
    assert not list(Path("artifacts/partial").iterdir()), "what older inputs left goes too"


def test_every_input_of_a_store_is_in_what_names_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    settings = params.load()
    window = settings.diverge.model_copy(update={"window": 99})
    changes: list[dict[str, Any]] = [{}, {"seed": 5}, {"threads": 7, "tier": "smoke"}, {"diverge": window}]
    named = {artifacts.digest(reference.inputs(settings.model_copy(update=change), "m")) for change in changes}
    assert len(named | {artifacts.digest(reference.inputs(settings, "n"))}) == 5
    assert all((ROOT / "pipeline" / name).is_file() for name in reference.CODE)


def test_two_heads_are_equal_only_with_equal_weights_and_scaling(made16: tuple[Store, Any], tmp_path: Path) -> None:
    where, engine = Store(made16[0].folder), made16[1]
    assert where._head.equals(engine.head)
    other = engines.load("hf", make_model(tmp_path / "other", seed=5), threads=1)
    assert not where._head.equals(other.head)
    where._head._model.config.logit_scale = 0.5
    assert not where._head.equals(engine.head), "a head that scales its logits otherwise"


# --- rows on their way to the file -------------------------------------------------------------------------------


@pytest.mark.parametrize("kld, is_reference, lossless, error", [
    ([0.0, 0.0], True, True, None), ([0.0, 0.0], False, True, None), ([0.0, 1e-12], False, False, None),
    ([0.0, 0.0], False, False, (InvalidVariant, "was not quantized")), ([], False, True, (InvalidVariant, "no token")),
    *(([0.0, bad], True, True, (ArtifactError, "1 of 2 tokens; delete")) for bad in (1e-9, np.nan, np.inf)),
])  # fmt: skip
def test_a_reference_that_differs_from_itself_and_a_quantized_variant_that_does_not_are_errors(
    kld: list[float], is_reference: bool, lossless: bool, error: Any
) -> None:
    if error is None:
        diverge.check(seen(*kld), is_reference=is_reference, lossless=lossless)
        return
    with pytest.raises(error[0], match=error[1]):
        diverge.check(seen(*kld), is_reference=is_reference, lossless=lossless)


def test_rows_in_groups_are_the_rows_that_were_measured(
    made: tuple[Store, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diverge, "GROUP_ROWS", 60)
    counted = diverge.write(diverge.diverge(made[1], made[0], batch_size=2, threads=1), tmp_path / "rows.parquet")
    file = pq.ParquetFile(tmp_path / "rows.parquet")
    assert file.num_row_groups > 3 and counted.tokens == file.metadata.num_rows == made[0].manifest["tokens"]
    assert file.read().to_pydict() == columns(made[1], made[0])
    assert set(records.TOKEN_COLUMNS) >= set(NEEDED)


def test_an_engine_of_any_lengths_gets_all_windows_at_once_and_gives_the_same_rows(
    made16: tuple[Store, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (store, engine), asked = made16, list[int]()
    plain, expected = engine.logit_blocks, columns(engine, store, batch_size=1)

    def one_by_one(batch: Any, starts: Any, rows: int, whole: bool) -> Any:
        asked.append(len(batch))
        for k, (ids, start) in enumerate(zip(batch, starts)):
            yield from ((k, at, logits) for _, at, logits in plain([ids], [start], rows, whole))

    monkeypatch.setattr(engine, "logit_blocks", one_by_one)
    monkeypatch.setattr(engine, "any_lengths", True, raising=False)
    assert columns(engine, store) == expected and asked == [len(store.windows)]


def test_another_vocabulary_is_refused(made16: tuple[Store, Any]) -> None:
    other = Store(made16[0].folder)
    other.manifest["vocab"] = 7
    with pytest.raises(ArtifactError, match="vocabulary"):
        columns(made16[1], other)


@pytest.mark.parametrize("change", [
    lambda blocks: blocks[:-1], lambda blocks: [*blocks[:-1], (*blocks[-1][:2], blocks[-1][2][:-1])],
    lambda blocks: [(k, at + 1, logits) for k, at, logits in blocks], lambda blocks: [*blocks, blocks[-1]],
], ids=["a block less", "a row less", "shifted", "a block twice"])  # fmt: skip
def test_an_engine_that_gives_other_positions_is_refused_and_loses_none_in_silence(
    made16: tuple[Store, Any], change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = made16[1].logit_blocks
    monkeypatch.setattr(made16[1], "logit_blocks", lambda *arguments: change(list(plain(*arguments))))
    with pytest.raises(ArtifactError, match="positions"):
        columns(made16[1], made16[0])
