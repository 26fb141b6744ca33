"""Tell data from litter: all code that lists a folder does it here."""

from __future__ import annotations

import fnmatch
from pathlib import Path

# Litter of desktops, editors and Python. .dvcignore has the same list.
DROPPINGS = (".*", "*~", "[#]*[#]", "Thumbs.db", "desktop.ini", "__pycache__", "*.pyc")


def meant(folder: Path, pattern: str) -> list[Path]:
    """Paths that match under a folder, by name, without litter."""

    def dropped(path: Path) -> bool:
        return any(fnmatch.fnmatchcase(part, d) for part in path.relative_to(folder).parts for d in DROPPINGS)

    return sorted(p for p in folder.glob(pattern) if not dropped(p))


def data_files(folder: Path, pattern: str) -> list[Path]:
    """Files that match under a folder, by name, without litter or dangling links."""
    return [p for p in meant(folder, pattern) if p.is_file()]
