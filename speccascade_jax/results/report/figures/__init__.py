"""Figures. Importing them loads matplotlib."""

MAKER = "speccascade_jax"
"""Name in the metadata of every figure."""
FIGURE = rf"\x89PNG.{{,60}}Matplotlib.{{,60}}pHYs\x00\x00\x17\x12|.*{MAKER}"
"""Pattern of figures; those of earlier versions are PNG of Matplotlib, in `tradeoff.save`'s resolution, without it."""
