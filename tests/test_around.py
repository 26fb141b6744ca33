"""What people have around their files changes nothing: droppings of desktops, editors and notebooks, and git's line ends."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from dvc.cli import main as dvc
from dvc.repo import Repo

from pipeline import download, evalset
from pipeline.core import artifacts, explain, git, isolate, params
from pipeline.core.droppings import DROPPINGS, data_files
from pipeline.core.errors import ArtifactError, DownloadError, Unsupported
from pipeline.evalset import tasks, windows
from pipeline.evalset.calibration import Calibration
from pipeline.gating import freshness
from pipeline.model.headers import read_headers
from pipeline.quantizers import gguf


def litter(folder: Path) -> list[Path]:
    """Beside every file of a folder what macOS, Windows, Emacs, vim, Jupyter and a dead link leave there; returns it."""
    left: list[Path] = []
    for file in [p for p in folder.rglob("*") if p.is_file()]:
        home, name = file.parent, file.name
        (home / ".ipynb_checkpoints").mkdir(exist_ok=True)
        names = (f"._{name}", f"{name}~", f"#{name}#", f".{name}.swp", ".DS_Store", "Thumbs.db", "desktop.ini")
        files = [home / n for n in names] + [home / ".ipynb_checkpoints" / f"{file.stem}-checkpoint{file.suffix}"]
        for one in files:
            one.write_bytes(b"\x00\x05\x16\x07 nobody meant this")
        (home / f".#{name}").symlink_to("someone@host.1234:1700000000")
        left += [*files, home / f".#{name}"]
    return left


def test_droppings_are_no_sets_no_tasks_no_backends_and_no_change(tmp_path: Path) -> None:
    for name in ("evalsets", "envs", "pipeline/quantizers"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("constraints.txt", "pipeline/protocol.yaml", "params.yaml"):
        shutil.copyfile(ROOT / name, tmp_path / name)

    def seen() -> tuple[object, ...]:
        corpus = Path("evalsets/corpus")
        named = [p.stem for p in data_files(tmp_path / "pipeline/quantizers", "[!_]*.py")]
        return evalset.load_texts(corpus), evalset.sets_digest(corpus), tasks.local_tasks(), named, freshness.inputs(params.load())

    before = seen()
    assert len(litter(tmp_path)) > 100
    assert seen() == before and before[3] == explain.backends("quantizers")


def test_droppings_are_no_part_of_a_model_and_no_damage_to_it(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    out.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "sub/vocab.txt"):
        artifacts.write_text(model / name, name)
    manifest = {"files": artifacts.files_of(model)}
    litter(model)
    (model / "gone.safetensors").symlink_to("nowhere")
    (model / "._chat_template.jinja").write_bytes(b"\x00")
    artifacts.verify_files(model, manifest)
    download._from_path(params.PathModel(source="path", path=str(model)), out)
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert windows.chat_template(model) is None


@pytest.mark.filterwarnings("ignore")  # DVC's own
def test_dvc_ignores_what_the_pipeline_takes_for_droppings_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    patterns = (ROOT / ".dvcignore").read_text(encoding="utf-8").splitlines()
    assert [p for p in patterns if p[0] not in "#/"] == list(DROPPINGS)
    (tmp_path / "news.jsonl").write_text("{}")
    asked = [f"evalsets/{p.relative_to(tmp_path)}" for p in litter(tmp_path)] + ["evalsets/news.jsonl", "evalsets/#1.jsonl"]
    assert dvc(["check-ignore", *asked]) == 0 and capsys.readouterr().out.split() == asked[:-2]


def test_a_clone_under_autocrlf_holds_the_same_bytes(tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "-q", "--shared", "-c", "core.autocrlf=true", str(ROOT), str(tmp_path / "clone")], check=True)
    ends = subprocess.run(["git", "ls-files", "--eol"], cwd=tmp_path / "clone", capture_output=True, text=True, check=True).stdout
    assert "w/lf" in ends and "w/crlf" not in ends and "w/mixed" not in ends


def test_the_hook_lets_through_whatever_names_the_judged_commit_and_refuses_another_by_its_name(tmp_path: Path) -> None:
    def git(*command: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *command], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q", "-b", "main")
    artifacts.write_text(tmp_path / "pipeline/gate.py", "print('judged')")
    git("add", "-A")
    git("commit", "-qm", "old")
    old = git("rev-parse", "HEAD")
    git("commit", "-q", "--allow-empty", "-m", "new")
    git("tag", "-a", "v1", "-m", "v1")
    git("notes", "add", "-m", "a note")
    head, tag, note, none = git("rev-parse", "HEAD"), git("rev-parse", "v1"), git("rev-parse", "refs/notes/commits"), "0" * 40
    assert tag != head
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONDONTWRITEBYTECODE": "1"}
    pushed = {
        f"refs/tags/v1 {tag}": "judged", f"refs/heads/main {head}\nrefs/tags/v1 {tag}": "judged", f"HEAD {head}": "judged",
        f"refs/notes/commits {note}": "", f"refs/notes/commits {note}\nrefs/tags/v1 {tag}": "judged", f"(delete) {none}": "",
        f"refs/heads/old {old}": "pre-push: refs/heads/old is not checked out",
        f"refs/tags/v1 {tag}\nrefs/heads/old {old}": "pre-push: refs/heads/old is not checked out",
    }  # fmt: skip
    for refs, said in pushed.items():
        asked = "".join(f"{line} refs/x {none}\n" for line in refs.split("\n"))
        hook = ["sh", str(ROOT / ".github/hooks/pre-push")]
        done = subprocess.run(hook, cwd=tmp_path, input=asked, capture_output=True, text=True, env=env)
        assert (done.stdout + done.stderr).startswith(said) and bool(done.stdout + done.stderr) == bool(said), refs
        assert done.returncode == (2 if "not checked" in said else 0)


@pytest.mark.filterwarnings("ignore")  # DVC's own
def test_another_machines_timings_are_not_restored_from_a_shared_cache_and_quality_is(tmp_path: Path) -> None:
    ran, a, b = tmp_path / "ran", tmp_path / "a", tmp_path / "b"
    key = {"params": [{"reports/machine.yaml": ["machine"]}]}
    cmd = "echo {0} >> {1} && cp in {0}"
    times = {"cmd": "python -m pipeline.speed.hardware && " + cmd.format("timing", ran), "outs": ["timing"], **key}
    stages = {"quality": {"cmd": cmd.format("quality", ran), "outs": ["quality"]}, "timing": times}

    def on(machine: str, where: Path, *commands: str) -> str:
        """Run commands on a pretended machine; returns what stages ran."""
        ran.write_text("")
        env = {"ATEN_CPU_CAPABILITY": machine, "PYTHONPATH": str(ROOT), "GIT_CONFIG_COUNT": "0", "DVC_NO_ANALYTICS": "1"}
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(where)
            for name, value in env.items():
                patch.setenv(name, value)
            for program, *words in map(str.split, commands):
                done = dvc(words) if program == "dvc" else subprocess.run([program, *words], capture_output=True).returncode
                assert done == 0, (program, words)
        return ran.read_text().strip()

    a.mkdir()
    (a / "in").write_text("x")
    artifacts.write_json(a / "dvc.yaml", {"stages": {name: {"deps": ["in"]} | stage for name, stage in stages.items()}})
    init = ("git init -q", "git config user.name a", "git config user.email a@b", "dvc init -q")
    init += (f"dvc cache dir {tmp_path / 'cache'}",)
    assert on("one", a, *init, "python -m pipeline.speed.hardware", "dvc repro -q") == "quality\ntiming"
    assert on("one", a, "git add -A", "git commit -qm x", f"git clone -q {a} {b}") == ""
    assert on("two", b, "python -m pipeline.speed.hardware", "dvc repro -q") == "timing"
    assert on("three", b, "dvc repro -q -f timing") == "timing"  # what times says where it does: the entry is that machine's
    with Repo(str(b)) as repo:
        assert repo.status() == {}


def written(folder: Path, files: dict[str, object]) -> Path:
    """A model's folder with more in it: keys for its JSON files, for safetensors the factor of its weights, None: taken out."""
    from safetensors.torch import load_file, save_file

    for name, more in files.items():
        file = folder / name
        if isinstance(more, float):
            save_file({k: more * t for k, t in load_file(folder / "model.safetensors").items()}, file, metadata={"format": "pt"})
        elif isinstance(more, dict):
            artifacts.write_json(file, (artifacts.read_json(file) if file.exists() else {}) | more)
        elif more is None:
            file.unlink()
        else:
            file.write_text(str(more))
    return folder


@pytest.mark.parametrize("files", [
    {"quantize_config.json": {"bits": 4}, "hf_quant_config.json": {}, "genai_config.json": {}, "params.json": {}},
    {"model.gguf": "x", "model.onnx": "x", "pytorch_model.bin": "x", "tokenization_x.py": "raise SystemExit"},
    {"model.fp16.safetensors": 2.0, "consolidated.safetensors": 2.0, "consolidated.safetensors.index.json": {}},
    {"a.safetensors": 2.0, "model.safetensors.index.json": {"weight_map": {"lm_head.weight": "a.safetensors"}}},
    {"model.safetensors.index.json": {"weight_map": {"lm_head.weight": "gone.safetensors"}}},
])  # fmt: skip
def test_what_a_loader_of_these_weights_does_not_need_is_left_out(tiny: Path, tmp_path: Path, files: dict[str, object]) -> None:
    model, out = Path(shutil.copytree(tiny, tmp_path / "model")), tmp_path / "out"
    out.mkdir()
    download.download(params.PathModel(source="path", path=str(written(model, files))), out)
    assert {f.name: f.read_bytes() for f in out.iterdir()} == {f.name: f.read_bytes() for f in tiny.iterdir()}


@pytest.mark.parametrize("files, said", [
    ({"adapter_config.json": {"peft_type": "LORA"}}, "adapter_config.json lies beside the weights"),
    ({"b.safetensors": 2.0, "config.json": {"transformers_weights": "b.safetensors"}}, "transformers_weights: 'b.safetensors'"),
    ({"config.json": {"return_dict": False}}, "return_dict: False"),
    ({"special_tokens_map.json": "{"}, "transformers refuses the tokenizer's files"),
    ({"tokenizer_config.json": {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["t.T", None]}}}, "trust_remote_code: true"),
    ({"generation_config.json": "[]"}, "generation_config.json holds a list"),
    ({"Model.safetensors": 1.0, "model.safetensors": None}, "the weights are in Model.safetensors"),
])  # fmt: skip
def test_what_would_be_loaded_otherwise_is_refused_by_name(tiny: Path, tmp_path: Path, files: dict[str, object], said: str) -> None:
    model, out = Path(shutil.copytree(tiny, tmp_path / "model")), tmp_path / "out"
    out.mkdir()
    with pytest.raises(DownloadError, match=re.escape(said)):
        download.download(params.PathModel(source="path", path=str(written(model, files))), out)


def test_output_that_takes_ascii_only_gets_question_marks() -> None:
    code = "from pipeline.core import cli; cli.run(lambda: cli.say('compare', 'accuracy Δ'))"
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert done.stdout == b"compare    accuracy ?\n"


def test_what_is_blamed_is_what_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    for number, said in (
        (signal.SIGBUS, "a file that it had open was truncated, or the disk is full"),
        (signal.SIGSEGV, "a fault of the library or of the model's files"),
        (signal.SIGTERM, "quantize x was stopped by SIGTERM"),
    ):
        assert said in str(isolate.how_it_ended("quantize x", -number, log, 0))
    (tmp_path / "model.safetensors").write_bytes(b"\xff\xff")
    with pytest.raises(ArtifactError, match="is not a safetensors file, or cut short"):
        read_headers(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    monkeypatch.setenv("GIT_DIR", str(ROOT / ".git"))
    assert git.line("rev-parse", "--show-toplevel") == str(tmp_path) and git.line("rev-parse", "HEAD") is None
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(ArtifactError, match="git refuses another user's folder"):
        git.line("rev-parse", "HEAD")


@pytest.mark.parametrize("free, error, said", [
    (0, ArtifactError, "could not be written: the disk is full"), (1 << 40, Unsupported, "could not quantize to Q8_0"),
])  # fmt: skip
def test_a_disk_that_fills_under_llama_cpp_is_no_property_of_the_model(
    free: int, error: type[Exception], said: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llama_cpp

    out = tmp_path / "out"
    out.mkdir()
    for name, stub in {"_convert": lambda *_: None, "_lost": lambda *_: "", "names_of": lambda *_: {}}.items():
        monkeypatch.setattr(gguf, name, stub)
    monkeypatch.setattr(llama_cpp, "llama_model_quantize", lambda *_: 1)  # all that C++ says of either
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(error, match=said):
        gguf.quantize(tiny, out, calibration=Calibration(), seed=0, type="Q8_0")


def test_a_copy_that_dvc_exp_works_in_finds_what_lies_beside_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, copy = tmp_path / "project", tmp_path / "project/.dvc/tmp/exps/standalone/tmp1"
    for folder in (project / "sub", copy / ".dvc", copy / "sub"):
        folder.mkdir(parents=True)
    model = params.PathModel(source="path", path="../my-model")
    monkeypatch.setenv("DVC_ROOT", str(project))  # as DVC sets it for every stage
    for here, root in ((copy, project), (copy / "sub", project / "sub"), (project, Path()), (project / "sub", Path())):
        monkeypatch.chdir(here)
        assert model.folder == root / "../my-model"
