"""Colours and markers of curves, the same in every picture. Needs no plotting library."""

import colorsys
from collections.abc import Iterable

# Okabe and Ito's palette: distinct under the common kinds of colour blindness; markers tell the rest apart.
STYLES = {
    "spec_decode": ("#000000", "D"),
    "lossy": ("#999999", "s"),
    "lossy_tuned": ("#999999", "P"),
    "bild_star": ("#CC79A7", "X"),
    "chow": ("#E69F00", "v"),
    "diff": ("#56B4E9", "^"),
    "opt": ("#0072B2", "o"),
    "token_v3": ("#D55E00", "*"),
    "token_v1": ("#009E73", "<"),
    "token_v2": ("#009E73", ">"),
}
# Tol's muted colours and some between them, none of them one of the palette above
_SPARE = (
    "#117733", "#332288", "#882255", "#44AA99", "#999933", "#AA4499", "#661100", "#6699CC", "#DDCC77", "#CC6677",
    "#2F4B26", "#7A4FBF",
)  # fmt: skip
_MARKERS = "hdpH"


def styles(curves: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Curve -> colour and marker: its own, or a spare one; no two spare ones share a colour."""
    found, spare = {}, 0
    for curve in curves:
        if curve not in STYLES:
            found[curve] = _spare(spare), _MARKERS[spare % len(_MARKERS)]
            spare += 1
        else:
            found[curve] = STYLES[curve]
    return found


def _spare(number: int) -> str:
    """The number-th spare colour; beyond the list, hues that never come twice."""
    if number < len(_SPARE):
        return _SPARE[number]
    hue = (number - len(_SPARE)) * 0.61803398875 % 1.0  # the golden ratio spreads any number of them
    return "#" + "".join(f"{round(255 * each):02X}" for each in colorsys.hls_to_rgb(hue, 0.42, 0.55))
