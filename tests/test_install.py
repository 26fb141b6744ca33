"""Settings, instruction sets and environments of an installation. Other processors are pretended by their compiler flags."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pipeline.core import install, venvs
from pipeline.core.errors import ArtifactError, Unsupported
from pipeline.speed import hardware

AVX512 = "AVX512 SSE42 AVX F16C FMA AVX2 BMI2"
# llama.cpp's own table of processors, ggml/src/CMakeLists.txt; AMX_TILE and AMX_INT8 of the last one are left out here.
PROCESSORS = {
    "nehalem": "SSE42", "sandybridge": "SSE42 AVX", "haswell": "SSE42 AVX F16C FMA AVX2 BMI2", "skylake-avx512": AVX512,
    "cascadelake": f"{AVX512} AVX512_VNNI", "icelake-server": f"{AVX512} AVX512_VBMI AVX512_VNNI",
    "cooperlake": f"{AVX512} AVX512_VNNI AVX512_BF16", "alderlake": "SSE42 AVX F16C FMA AVX2 BMI2 AVX_VNNI",
    "sapphirerapids": f"{AVX512} AVX512_VBMI AVX512_VNNI AVX512_BF16 AVX_VNNI",  # the table leaves the last one out
}  # fmt: skip
PIP = """:env:.find-links='/a /b'
:env:.disable-pip-version-check='1'
global.cert='/etc/ca.crt'
global.extra-index-url='https://x/simple\\nhttps://y/simple?a=b'
global.find-links='/c'
global.index-url='https://g/simple'
install.index-url='https://i/simple'
freeze.index-url='https://f/simple'
"""


def compiler() -> str:
    path = shutil.which("g++")
    if path is None or "x86_64" not in install.native_macros(path):
        pytest.skip("no g++ for x86-64")
    return path


@pytest.mark.parametrize("processor", PROCESSORS)
def test_each_processor_gets_the_instruction_sets_that_llama_cpp_lists_for_it_and_no_amx(processor: str) -> None:
    ask = [compiler(), f"-march={processor}", "-E", "-dM", "-x", "c++", os.devnull]
    asked = subprocess.run(ask, capture_output=True, text=True)
    if asked.returncode:
        pytest.skip(f"this compiler does not know {processor}")
    sets = install.instruction_sets(asked.stdout)
    assert set(sets) == set(PROCESSORS[processor].split())
    switches = install.set_switches(sets)
    assert {s.removeprefix("-DGGML_").removesuffix("=ON") for s in switches if s.endswith("=ON")} == set(sets)
    assert "-DGGML_NATIVE=OFF" in switches and not any("AMX" in s for s in switches)


def test_elsewhere_than_on_x86_64_llama_cpp_chooses_by_itself() -> None:
    assert install.instruction_sets("#define __aarch64__ 1\n#define __AVX__ 1\n") == []
    assert install.set_switches([]) == []


def test_llama_cpp_here_was_compiled_for_this_processor_and_without_amx() -> None:
    pytest.importorskip("llama_cpp")
    built = install.built_for(sys.executable)
    assert built is not None and not [s for s in built if s.startswith("AMX")]
    here = install.instruction_sets(install.native_macros(compiler()))
    assert set(built) & install.SETS.keys() <= set(here)
    assert hardware.describe(1)["llamacpp"] == " ".join(built)  # so that figures say it


@pytest.mark.parametrize("built, right", [
    (["SSE3", "AVX", "AVX2", "LLAMAFILE", "OPENMP"], True),
    (["SSE3", "AVX", "LLAMAFILE"], False),  # slower than it could be
    (["SSE3", "AVX", "AVX2", "AMX_INT8"], False),
    (None, False),  # none, or it dies
])  # fmt: skip
def test_what_is_installed_is_kept_only_if_it_is_for_just_these_sets(built: list[str] | None, right: bool) -> None:
    assert install.as_asked(built, ["SSE42", "AVX", "AVX2"]) is right


def test_without_a_compiler_a_line_says_what_is_missing_and_installing_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    install.compile_llamacpp(["/bin/false"], {}, Path(sys.executable))
    assert "no C++ compiler" in capsys.readouterr().out


def test_a_failed_compilation_shows_the_compilers_words_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler()
    monkeypatch.setattr(install, "LOG", tmp_path / "log")
    monkeypatch.setattr(install, "built_for", lambda python: None)
    code = "print('DEBUG [3/9] g++ a.cpp\\nDEBUG a.cpp:1: error: no\\n  a.cpp:1: error: no'); raise SystemExit(1)"
    with pytest.raises(SystemExit, match="everything else is installed"):
        install.compile_llamacpp([sys.executable, "-c", code], install.clean(), Path("/bin/false"))
    printed = capsys.readouterr().out
    assert "a.cpp:1: error: no" in printed


# --- settings ----------------------------------------------------------------------------------------------------


def test_pip_s_settings_reach_uv_a_variable_before_a_file_and_a_person_s_own_settings_of_uv_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert install.for_uv(PIP) == {
        "UV_FIND_LINKS": "/a,/b", "UV_INDEX": "https://x/simple https://y/simple?a=b", "UV_DEFAULT_INDEX": "https://i/simple",
        "SSL_CERT_FILE": "/etc/ca.crt", "UV_INDEX_STRATEGY": "unsafe-best-match",
    }  # fmt: skip
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    for name, value in {"PIP_FIND_LINKS": "/a", "PIP_EXTRA_INDEX_URL": "https://x", "UV_INDEX": "https://mine"}.items():
        monkeypatch.setenv(name, value)
    variables = install.environment(sys.executable)
    assert (variables["UV_FIND_LINKS"], variables["UV_INDEX"]) == ("/a", "https://mine")


# --- environments of backends ------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with envs/one.txt, which wants a package that no index has but ./wheels may."""
    if not (Path(sys.prefix) / "bin/uv").exists():
        pytest.skip("uv is not installed")
    for name, value in {"PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_NO_INDEX": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("UV_FIND_LINKS", "UV_DEFAULT_INDEX", "UV_INDEX"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "envs").mkdir()
    (tmp_path / "wheels").mkdir()
    (tmp_path / "envs/one.txt").write_text("quantgate-one==1.0\n", "utf-8")
    return tmp_path


def wheel(folder: Path, tag: str = "py3-none-any") -> None:
    with zipfile.ZipFile(folder / f"quantgate_one-1.0-{tag}.whl", "w") as made:
        made.writestr("quantgate_one.py", "HERE = __file__\n")
        info = "quantgate_one-1.0.dist-info"
        made.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: quantgate-one\nVersion: 1.0\n")
        made.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: {tag}\n")
        made.writestr(f"{info}/RECORD", "")


def test_an_environment_that_cannot_be_fetched_is_an_error_that_a_later_run_mends_and_no_variable_leads_it_elsewhere(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArtifactError, match="'one' could not be built.*try again"):
        venvs.python("one")
    (home / "other").mkdir()
    (home / "other/quantgate_one.py").write_text("raise SystemExit('not this one')\n", "utf-8")
    for name, value in {"PIP_USER": "1", "PIP_TARGET": str(home / "target"), "PYTHONPATH": str(home / "other")}.items():
        monkeypatch.setenv(name, value)
    wheel(home / "wheels")
    venvs.run("one", "-c", "import quantgate_one; print(quantgate_one.HERE)", log=home / "log")
    assert (home / "log").read_text("utf-8").startswith(str(venvs.python("one").parent.parent))


def test_an_environment_s_file_names_what_is_taken_out_and_what_a_package_is_also_called(home: Path) -> None:
    wheel(home / "wheels")
    (home / "envs/one.txt").write_text("# without quantgate-one\n# also other 1.0+cpu\nquantgate-one==1.0\n", "utf-8")
    ask = "from importlib import metadata, util; print(util.find_spec('quantgate_one'), metadata.version('other'))"
    venvs.run("one", "-c", ask, log=home / "log")
    assert (home / "log").read_text("utf-8") == "None 1.0+cpu\n"


def test_a_package_that_is_not_made_for_this_system_is_unsupported(home: Path) -> None:
    wheel(home / "wheels", "py3-none-win_amd64")
    with pytest.raises(Unsupported, match="has no wheels with a matching"):
        venvs.python("one")
