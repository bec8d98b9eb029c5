"""Figures of results; importing a module of this package loads matplotlib."""

MAKER = "speccascade_jax"
"""Name of this package in the metadata of every figure that it writes."""
FIGURE = rf"\x89PNG.{{,60}}Matplotlib.{{,60}}pHYs\x00\x00\x17\x12|.*{MAKER}"
"""Pattern of the content of this package's figures. Figures of earlier versions do not contain `MAKER`; they are PNG
files by Matplotlib with the resolution of `drawing.save`."""
