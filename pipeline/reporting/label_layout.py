"""Where labels go in a picture so that none lies on another, on a mark or on a bar. Pure and deterministic.

Greedy: a label tries places around its mark, ring by ring, and takes the first that is free; where none is, the one with the
least overlap. Boxes are (left, bottom, right, top) in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

Box = tuple[float, float, float, float]
Spot = tuple[float, float]
ANGLES = [math.radians(a) for a in (40, -40, 140, -140, 90, -90, 0, 180, 65, -65, 115, -115, 20, -20, 160, -160)]
RINGS = (12, 20, 30, 42, 56, 72, 90, 110, 140, 170)  # pixels from the mark to the label's nearest edge
PAD = 2.0


def place(marks: Sequence[Spot], sizes: Sequence[Spot], taken: Sequence[Box], inside: Box) -> list[Box]:
    """A box for each label, in the order given.

    marks: where the labelled points are; sizes: (width, height) of the labels; taken: boxes to keep clear of.
    """
    placed: list[Box] = []
    leaders: list[list[Box]] = []
    for mark, size in zip(marks, sizes):
        best, least = None, math.inf
        for box in _around(mark, size):
            path = _leader(mark, box)
            cost = _outside(box, inside) * 4 + sum(_overlap(_grown(box), other) for other in [*placed, *taken])
            cost += sum(_overlap(box, dot) for line in leaders for dot in line)
            cost += sum(_overlap(dot, other) for dot in path for other in placed)
            if cost < least:
                best, least = (box, path), cost
            if cost == 0:
                break
        assert best is not None  # there is always a first place
        placed.append(best[0])
        leaders.append(best[1])
    return placed


def spread(wanted: Sequence[float], gap: float, top: float = math.inf) -> list[float]:
    """Heights as near to those wanted as a least gap between any two allows, none above `top`: labels at lines' ends."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    found = list(wanted)
    for _ in range(200):
        short = [(a, b, gap - (found[b] - found[a])) for a, b in pairwise(order)]
        if all(by <= 1e-9 for _, _, by in short):
            break
        for a, b, _ in short:
            by = max(0.0, gap - (found[b] - found[a])) / 2
            found[a], found[b] = found[a] - by, found[b] + by
    for i in reversed(order):
        found[i] = min(found[i], top)
        top = found[i] - gap
    return found


def nearest(mark: Spot, box: Box) -> Spot:
    """The point of a box's edge that is nearest to a mark: where a leader line ends."""
    return min(max(mark[0], box[0]), box[2]), min(max(mark[1], box[1]), box[3])


def _around(mark: Spot, size: Spot) -> list[Box]:
    x, y = mark
    w, h = size
    boxes = []
    for ring in RINGS:
        for angle in ANGLES:
            cx = x + math.cos(angle) * (ring + w / 2)
            cy = y + math.sin(angle) * (ring + h / 2)
            boxes.append((cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2))
    return boxes


def _leader(mark: Spot, box: Box) -> list[Box]:
    """Small boxes along the line from a mark to its label, the ends left out."""
    end = nearest(mark, box)
    steps = [k / 8 for k in range(1, 8)]
    at = [(mark[0] + (end[0] - mark[0]) * t, mark[1] + (end[1] - mark[1]) * t) for t in steps]
    return [(px - 1, py - 1, px + 1, py + 1) for px, py in at]


def _grown(box: Box) -> Box:
    return box[0] - PAD, box[1] - PAD, box[2] + PAD, box[3] + PAD


def _overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _outside(box: Box, inside: Box) -> float:
    """Area of a box that lies outside another."""
    return (box[2] - box[0]) * (box[3] - box[1]) - _overlap(box, inside)
