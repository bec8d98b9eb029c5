"""Parameters of checkpoints as flat arrays, to compare them."""

import numpy as np
from flax.traverse_util import flatten_dict


def flat(params):
    """Returns arrays by name."""
    return {name: np.asarray(value) for name, value in flatten_dict(params, sep="/").items()}


def same(params, arrays) -> bool:
    """Returns whether nested parameters have the names and the values of `arrays`."""
    params = flat(params)
    return params.keys() == arrays.keys() and all(np.array_equal(params[name], arrays[name]) for name in arrays)
