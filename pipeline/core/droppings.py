"""Which files are data and which are litter: everything that lists a folder asks here."""

from __future__ import annotations

import fnmatch
from pathlib import Path

# What desktops, editors and Python leave beside people's files: no data and no change. .dvcignore has the same list.
DROPPINGS = (".*", "*~", "[#]*[#]", "Thumbs.db", "desktop.ini", "__pycache__", "*.pyc")


def meant(folder: Path, pattern: str) -> list[Path]:
    """What matches under a folder, in name order, without droppings."""

    def dropped(path: Path) -> bool:
        return any(fnmatch.fnmatchcase(part, d) for part in path.relative_to(folder).parts for d in DROPPINGS)

    return sorted(p for p in folder.glob(pattern) if not dropped(p))


def data_files(folder: Path, pattern: str) -> list[Path]:
    """Regular files that match under a folder, in name order, without litter or dangling links."""
    return [p for p in meant(folder, pattern) if p.is_file()]
