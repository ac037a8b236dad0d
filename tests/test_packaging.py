"""The package as it is built, and the checkout it is built from."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

PACKAGES = {
    "specstream": "specstream",
    "specstream.passes": "passes",
    "specstream.kernels": "kernels",
    "specstream.models": "models",
    "specstream.models.tiny": "models/tiny",
    "specstream.traces": "traces",
    "specstream.traces.plugin": "traces/plugin",
}
TOP_LEVEL = {"benchmarks", "docs", "kernels", "models", "passes", "specstream", "tests", "tools", "traces"}
DATA = {".safetensors", ".json", ".txt", ".md", ".typed", ".jinja"}


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def project_files(root: Path) -> list[str]:
    """What is tracked or about to be, relative to the top."""
    with TemporaryDirectory() as nothing_tracked:
        git = ["git"]
        if not (root / ".git").exists():  # of a copy it is whatever .gitignore does not name
            run("git", "init", "-q", "--bare", nothing_tracked, cwd=root)
            git += ["--git-dir", nothing_tracked, "--work-tree", str(root)]
        listed = run(*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=root).split("\0")
    return sorted(name for name in listed if name and (root / name).is_file())


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources so that the checkout stays as it is."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE", "README.md", *(PACKAGES.values())):
        if (root / name).is_file():
            (source / name).write_bytes((root / name).read_bytes())
        elif (root / name).is_dir():
            for path in (root / name).rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts:
                    target = source / path.relative_to(root)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(path.read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index")
    run(*pip, "-w", str(out), str(source), cwd=source)
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_every_module_and_data_file(root: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    expected = set()
    for package, folder in PACKAGES.items():
        expected |= {f"{package.replace('.', '/')}/{path.name}" for path in (root / folder).glob("*.py")}
    tiny = root / "models" / "tiny"
    for path in tiny.rglob("*"):
        if path.suffix in DATA:
            expected.add(f"specstream/models/tiny/{path.relative_to(tiny).as_posix()}")
    page = root / "traces" / "plugin" / "static"
    names = [path.relative_to(page).as_posix() for path in page.rglob("*") if path.is_file()]
    expected |= {f"specstream/traces/plugin/static/{name}" for name in names}
    expected.add("specstream/py.typed")
    assert expected - inside == set()
    strays = {name for name in inside if not name.startswith("specstream")}
    assert strays == set(), "only specstream and its metadata belong in the wheel"


def test_every_folder_of_modules_is_a_listed_package(root: Path) -> None:
    for top in ("specstream", "passes", "kernels", "models", "traces"):
        for path in (root / top).rglob("*.py"):
            folder = path.parent.relative_to(root).as_posix()
            assert folder in PACKAGES.values(), f"{folder} is missing from packages in pyproject.toml"


def test_installed_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile")
    run(*pip, "--target", str(target), str(wheel), cwd=tmp_path)
    program = "import importlib, sys\nfor name in sys.argv[1:]:\n    print(importlib.import_module(name).__file__)\n"
    files = run(sys.executable, "-c", program, *PACKAGES, cwd=tmp_path, PYTHONPATH=str(target)).split()
    assert [Path(name).parent for name in files] == [target / p.replace(".", "/") for p in PACKAGES]


def test_typecheck_links_are_complete(root: Path) -> None:
    run(sys.executable, ".typecheck/links.py", "--check", cwd=root)


def test_typecheck_links_check_fails_on_a_new_file(root: Path, tmp_path: Path) -> None:
    (tmp_path / ".typecheck").mkdir()
    (tmp_path / "specstream").mkdir()
    script = tmp_path / ".typecheck" / "links.py"
    script.write_text((root / ".typecheck" / "links.py").read_text())
    run(sys.executable, str(script), cwd=tmp_path)
    (tmp_path / "specstream" / "new.py").touch()
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "new.py: missing" in done.stdout


# Put together from parts so that this file does not match itself.
MACHINE_PATH = re.compile(
    rb"(?<![\w.$}~-])/(?:" + b"|".join([b"work", b"root", b"farm", b"home", b"Users"]) + rb")/[a-z]"
)


def test_no_paths_of_a_machine(root: Path) -> None:
    found = []
    for name in project_files(root):
        if Path(name).suffix in {".safetensors", ".png"}:
            continue
        for number, line in enumerate((root / name).read_bytes().splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{name}:{number}: {line[:120].decode(errors='replace')}")
    assert found == []


def test_machine_paths_are_recognised() -> None:
    assert MACHINE_PATH.search(b"see " + b"/work" + b"/main")
    assert not MACHINE_PATH.search(b"the docs/work/in progress")


def test_top_level_folders_are_the_architecture(root: Path) -> None:
    folders = {name.split("/")[0] for name in project_files(root) if "/" in name}
    assert {name for name in folders if not name.startswith(".")} <= TOP_LEVEL


def test_constraints_name_no_local_builds_or_hosts(root: Path) -> None:
    pins = [line.split("#")[0].strip() for line in (root / "constraints.txt").read_text().splitlines()]
    pattern = re.compile(r'[a-z0-9-]+==[0-9][0-9.a-z]*(; python_version (>=|<) "3\.11")?')
    assert [pin for pin in pins if pin and not pattern.fullmatch(pin)] == []
