"""One number that was measured. A measurement module may offer `figures(measured) -> Iterable[Figure]`. Pure."""

from __future__ import annotations

from dataclasses import dataclass

NOISE = 0.05
"""est.: share by which a bandwidth differs between two measurements of a sound link."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number worth remembering: what reports show, what a lock holds as baseline, what two preflights are compared by.

    `subject`: "node01", "node01/gpu0" or "node01->node02" (sender, receiver). `name`: what was measured, as in "4 streams".
    `higher_is_better` False: a time. `noise`: share by which it differs when nothing has changed.
    """

    measurement: str
    subject: str
    name: str
    value: float
    unit: str
    higher_is_better: bool = True
    noise: float = NOISE
