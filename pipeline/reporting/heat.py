"""A heat picture: what each group of each layer costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.core import artifacts
from pipeline.core.records import Sensitivity


def draw(table: Sensitivity, path: Path) -> str:
    """Draw KLD of each group alone at the lowest level, by layer and kind; returns the picture in words."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    inside = [row for row in table["groups"] if row["layer"] is not None]
    kinds, layers = list(dict.fromkeys(row["kind"] for row in inside)), 1 + max(row["layer"] or 0 for row in inside)
    values = np.full((len(kinds), layers), np.nan)
    for row in inside:
        values[kinds.index(row["kind"]), row["layer"] or 0] = row["alone"]["value"] or 0.0
    figure, axes = plt.subplots(figsize=(max(6.0, 0.28 * layers), 0.5 * len(kinds) + 1.2), layout="constrained")
    image = axes.imshow(values, aspect="auto", cmap="viridis")
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xlabel("layer")
    axes.set_title(f"KLD with this group alone at {table['levels'][0]} (nats)")
    figure.colorbar(image)
    with artifacts.atomic_file(path) as tmp:
        figure.savefig(tmp, format="svg", metadata={"Date": None})
    plt.close(figure)
    outside = ", ".join(f"{row['name']} {row['alone']['value']:.4f}" for row in table["groups"] if row["layer"] is None)
    return f"KLD of {len(inside)} groups by layer and kind; outside the layers: {outside} nats"
