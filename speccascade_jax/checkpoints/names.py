"""Names of parameters in other formats, as tables of ours to theirs; `{i}` stands for a layer's number."""

import re
from collections.abc import Mapping

_LAYER = re.compile(r"(?<=/layers_)\d+")


def translate(name: str, table: Mapping[str, str]) -> str:
    """Returns the name that a format has for the parameter `name`, with the parameter's own layer number.

    Raises:
        KeyError: the format has no such parameter.
    """
    layer = _LAYER.search(name)
    theirs = table[_LAYER.sub("{i}", name)]
    return theirs.replace("{i}", layer[0]) if layer else theirs
