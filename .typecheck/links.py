"""Keeps .typecheck/specstream, the package as type checkers need to see it.

The top-level folders passes, kernels, models and traces are imported as `specstream.passes` and so on.
Python learns that from pyproject.toml; type checkers do not. So this folder holds one relative link for
each file and folder of specstream/, and one for each of those four. Run without arguments to bring it up
to date; `--check` only reports, and exits with 1 if something is missing or left over.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKS = ROOT / ".typecheck" / "specstream"
FOLDERS = ("kernels", "models", "passes", "traces")


def wanted() -> dict[str, str]:
    """Name of each link -> what it points to, relative to the folder of links."""
    own = [p.name for p in (ROOT / "specstream").iterdir() if p.name[0] not in "._" or p.suffix == ".py"]
    return {name: f"../../specstream/{name}" for name in own} | {name: f"../../{name}" for name in FOLDERS}


def present() -> dict[str, str]:
    if not LINKS.is_dir():
        return {}
    return {p.name: os.readlink(p) if p.is_symlink() else "" for p in LINKS.iterdir()}


def main(arguments: list[str]) -> int:
    want, have = wanted(), present()
    missing = sorted(name for name in want if have.get(name) != want[name])
    extra = sorted(name for name in have if name not in want)
    if "--check" in arguments:
        for name in missing:
            print(f".typecheck/specstream/{name}: missing or wrong; `make typecheck-links` mends it")
        for name in extra:
            print(f".typecheck/specstream/{name}: points to nothing; `make typecheck-links` removes it")
        return 1 if missing or extra else 0
    LINKS.mkdir(parents=True, exist_ok=True)
    for name in extra + [name for name in missing if name in have]:
        (LINKS / name).unlink()
    for name in missing:
        (LINKS / name).symlink_to(want[name])
    print(f".typecheck/specstream: {len(want)} links, {len(missing)} made, {len(extra)} removed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
