"""Colours and markers of curves, the same in all figures. Needs no plotting library."""

import colorsys
from collections.abc import Iterable

# the palette of Okabe and Ito, whose colours are distinct for people with the common kinds of colour blindness; two
# curves of one colour have different markers
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
# muted colours by Paul Tol, and some colours between them; none of them is in the palette above
_SPARE = (
    "#117733", "#332288", "#882255", "#44AA99", "#999933", "#AA4499", "#661100", "#6699CC", "#DDCC77", "#CC6677",
    "#2F4B26", "#7A4FBF",
)  # fmt: skip
_MARKERS = "hdpH"


def styles(curves: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns the colour and marker of each curve: its fixed style, or a spare style with a colour of its own."""
    looks, spare = {}, 0
    for curve in curves:
        if curve not in STYLES:
            looks[curve] = _spare(spare), _MARKERS[spare % len(_MARKERS)]
            spare += 1
        else:
            looks[curve] = STYLES[curve]
    return looks


def _spare(number: int) -> str:
    """Returns the spare colour of index `number`; after the end of the list, hues that never repeat."""
    if number < len(_SPARE):
        return _SPARE[number]
    hue = (number - len(_SPARE)) * 0.61803398875 % 1.0  # the golden ratio spreads any number of hues evenly
    return "#" + "".join(f"{round(255 * channel):02X}" for channel in colorsys.hls_to_rgb(hue, 0.42, 0.55))
