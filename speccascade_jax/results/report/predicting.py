"""Flags of commands that predict latencies for other hardware, and the predicted records that they add."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from speccascade_jax.results.analysis import prediction
from speccascade_jax.results.store import program_costs
from speccascade_jax.results.store.program_costs import Hardware
from speccascade_jax.results.store.record import Record, Row

DTYPES = ("bfloat16", "float32")

FLAGS = {
    "predict": "also predict latencies for this hardware, from the records' counts and from compiled programs, without "
    "running them: v5e:2x4,h100. The costs are kept in <store>.costs.json",
    "predict_mesh": "DATA,MODEL: devices over which rows and models are split (default: the mesh of the records)",
    "predict_dtype": "dtype of the predicted programs (default: bfloat16)",
    "predict_prompt_length": "length of the prompts, for records that do not contain it (default: 128)",
    "predict_models": "TARGET,DRAFT: presets or checkpoints whose shapes replace those of the measured models",
}
"""Names of the flags, with their help texts."""

Complete = Callable[[Path, Sequence[Record], Sequence[Hardware]], dict[str, Row]]
"""Function that compiles the programs that a file of costs lacks, such as `preflight.costs.complete`."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags to a command's parser."""
    for name, text in FLAGS.items():
        parser.add_argument(f"--{name}", help=text)


def hardware(
    predict: str | None,
    predict_mesh: str | None = None,
    predict_dtype: str | None = None,
    predict_prompt_length: str | None = None,
    predict_models: str | None = None,
) -> list[Hardware]:
    """Returns the hardware that the flags name; an empty sequence without --predict.

    Raises:
        ValueError: a value is invalid, or a flag is used without --predict.
    """
    others = {"mesh": predict_mesh, "dtype": predict_dtype, "prompt_length": predict_prompt_length}
    others |= {"models": predict_models}
    if not predict:
        if unused := [name for name, value in others.items() if value]:
            raise ValueError(f"--predict_{unused[0]} needs --predict: name the hardware, such as --predict=v5e:2x4")
        return []
    dtype = predict_dtype or "bfloat16"
    if dtype not in DTYPES:
        raise ValueError(f"--predict_dtype={dtype} is not one of {', '.join(DTYPES)}")
    mesh = None
    if predict_mesh is not None:
        data, model = _numbers("predict_mesh", predict_mesh, 2)
        mesh = data, model
    models = tuple(predict_models.split(",")) if predict_models else ()
    if models and len(models) != 2:
        raise ValueError(f"--predict_models={predict_models}: give two models, TARGET,DRAFT")
    length = 128 if predict_prompt_length is None else _numbers("predict_prompt_length", predict_prompt_length, 1)[0]
    names = [name.strip() for name in predict.split(",") if name.strip()]
    return [Hardware(topology=n, mesh=mesh, dtype=dtype, prompt_length=length, models=models) for n in names]


def _numbers(name: str, text: str, count: int) -> tuple[int, ...]:
    """Returns the numbers (1 or more) in a text such as "2,4".

    Raises:
        ValueError: the text contains other values, or not exactly `count` numbers.
    """
    parts = text.split(",")
    if len(parts) != count or not all(part.isdecimal() and int(part) for part in parts):
        example = {1: "a number, such as 128", 2: "DATA,MODEL, such as 1,8"}[count]
        raise ValueError(f"--{name}={text}: give {example}")
    return tuple(map(int, parts))


def of_arguments(arguments: argparse.Namespace) -> list[Hardware]:
    """Returns the hardware that the parsed arguments name."""
    return hardware(**{name: getattr(arguments, name) for name in FLAGS})


def predicted(
    records: Sequence[Record], store: str | Path, chosen: Sequence[Hardware], complete: Complete
) -> list[Record]:
    """Returns copies of a store's records with predicted latencies, for each hardware one after the other.

    Args:
        records: records of points.
        store: the store, beside which the file of costs is.
        chosen: the hardware.
        complete: called only if the file of costs lacks programs, so that tables need no JAX otherwise.
    """
    if not chosen:
        return []
    path = program_costs.path_of(store)
    costs = program_costs.read(path)
    if program_costs.missing(records, chosen, costs):
        costs = complete(path, records, chosen)
    return [record for place in chosen for record in prediction.predict(records, place, costs)]
