"""Training data of selection policies: features of queries, and how well each candidate drafter agrees with the target.

A data folder, written by `selection.make_data`, holds a file `manifest.json` with these entries:

- `format` (1), `pair`, `target`, `features` and `seed`;
- `arms`, `prints` and `parameters`: the name, the fingerprint and the number of parameters of each candidate;
- `domains`: for each domain its `task`, `queries`, `outputs` (the folder of the target's shards), and `alignment` (the
  file and the key of each candidate).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from speccascade_jax.core import names
from speccascade_jax.storage.files import expanded, point_key
from speccascade_jax.storage.readers import json_object
from speccascade_jax.training import runs
from speccascade_jax.training.heads import shards

FORMAT = 1
MANIFEST = "manifest.json"
SHARD = 256
"""The number of queries in a shard of outputs."""
_MAKE = "python -m experiments.make_selection_data"
AGAIN = f"remove it and make it again with {_MAKE}"
_LOST = "damaged or missing"


@dataclass(frozen=True)
class Outputs:
    """Outputs of one model for a domain's queries, in the same order; only the target's outputs have `features`."""

    ids: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    features: np.ndarray | None = None


def shard_names(first: int, count: int) -> list[str]:
    """Returns the file names of the shards of `count` queries; `first` is the number of the first one in its domain."""
    return [f"{first + start:06}-{min(SHARD, count - start)}.npz" for start in range(0, count, SHARD)]


OF_ARMS = ("arms", "prints", "parameters")
"""Entries of a manifest, and fields of `Data`, that hold one value for each candidate."""


@dataclass(frozen=True)
class Data:
    """Training data of `N` queries from several domains, with features and with alignments of `K` candidate drafters.

    Attributes:
        features: float32 `[N, D]`, from the target's prefill of a query.
        domain: int32 `[N]`, the index of each query's domain.
        alignment: float32 `[N, K]`, ROUGE-L of each candidate's output against the target's greedy output, 0 to 1.
        domains, arms: names of the domains and of the candidates.
        prints, parameters: the fingerprint and the number of drafting parameters of each candidate.
        target: fingerprint of the target.
        pair: name of the pair.
        key: hash of everything on which the data depend.
    """

    features: np.ndarray
    domain: np.ndarray
    alignment: np.ndarray
    domains: tuple[str, ...]
    arms: tuple[str, ...]
    prints: tuple[str, ...]
    parameters: tuple[int, ...]
    target: str
    pair: str
    key: str

    def among(self, arms: Sequence[str]) -> Self:
        """Returns the data of the named candidates, in the order of the names.

        Raises:
            ValueError: the data lack a candidate, or no candidate is named.
        """
        if unknown := [name for name in arms if name not in self.arms]:
            raise ValueError(f"the data lack the candidate {unknown[0]!r}: {names.unknown(unknown[0], self.arms)}")
        if not arms:
            raise ValueError(f"arms is empty: name some of {', '.join(self.arms)}")
        columns = [self.arms.index(name) for name in arms]
        picked: Any = {name: tuple(getattr(self, name)[n] for n in columns) for name in OF_ARMS}
        key = self.key if tuple(arms) == self.arms else point_key(data=self.key, arms=list(arms))
        return replace(self, alignment=self.alignment[:, columns], key=key, **picked)

    def rows(self, chosen: np.ndarray) -> Self:
        """Returns the data of the queries with the indices `chosen`."""
        arrays: Any = {name: getattr(self, name)[chosen] for name in ("features", "domain", "alignment")}
        return replace(self, **arrays)

    def alignment_by_domain(self) -> dict[str, list[float]]:
        """Returns each candidate's mean alignment on each domain."""
        means_by_domain = {name: self.alignment[self.domain == n].mean(0) for n, name in enumerate(self.domains)}
        return {name: [round(float(mean), 4) for mean in means] for name, means in means_by_domain.items()}

    def costs(self) -> np.ndarray:
        """Returns each candidate's cost term `c = 1 − e^{P} / e^{P_max}`, float64 `[K]`, `P` in billions of parameters.

        Source: Huang et al. (2024, assistant selection), appendix A.5. The value is 0 for the largest candidate, and
        near 1 for a candidate that is billions of parameters smaller.
        """
        billions = np.asarray(self.parameters, np.float64) / 1e9
        return 1.0 - np.exp(billions - billions.max())

    def rewards(self, alignment_weight: float, costs: Mapping[str, float] | None = None) -> np.ndarray:
        """Returns `w · alignment + (1 − w) · c`, float32 `[N, K]` (Huang et al., 2024, assistant selection, eq. 2).

        Args:
            alignment_weight: `w`, 0 to 1.
            costs: `c` of each candidate by name; `None`: computed from its number of parameters.

        Raises:
            ValueError: `w` is outside [0, 1], `costs` names other candidates, or a reward is not finite; the message
                names it.
        """
        if not 0 <= alignment_weight <= 1:
            raise ValueError(f"alignment_weight={alignment_weight:g} is outside 0 (cost only) … 1 (alignment only)")
        if costs is not None and set(costs) != set(self.arms):
            raise ValueError(f"costs={dict(costs)} must have a number for each of {', '.join(self.arms)}")
        cheap = self.costs() if costs is None else np.asarray([costs[name] for name in self.arms], np.float64)
        rewards = (alignment_weight * self.alignment + (1 - alignment_weight) * cheap[None]).astype(np.float32)
        if (bad := np.argwhere(~np.isfinite(rewards))).size:
            query, arm = bad[0]
            said = f"the reward of {self.arms[arm]!r} for query {query} is {rewards[query, arm]}"
            raise ValueError(f"{said}: rewards must be finite; make the data again, or give other costs")
        return rewards


def read(folder: str | Path) -> Data:
    """Reads the data that the last call of `make` wrote to a folder.

    Raises:
        FileNotFoundError: the folder has no manifest.
        ValueError: the format is unknown, or a file is missing or damaged; the message names the file.
    """
    path = expanded(folder)
    if not (path / MANIFEST).is_file():
        raise FileNotFoundError(f"{path} holds no selection data (no {MANIFEST}): make some with {_MAKE}")
    manifest = json_object(path / MANIFEST, "make the folder again")
    if manifest.get("format") != FORMAT:
        said = f"{path / MANIFEST} has format {manifest.get('format')!r}, but this version reads {FORMAT}"
        raise ValueError(f"{said}: make the folder again with {_MAKE}")
    try:
        domains = manifest["domains"]
        features = [_features(path / entry["outputs"], entry["first_example"], entry["queries"]) for entry in domains]
        alignment = [_alignments(path, manifest["arms"], entry) for entry in domains]
        facts: Any = {name: tuple(manifest[name]) for name in OF_ARMS}
        facts |= {name: manifest[name] for name in ("target", "pair")}
        return Data(
            features=np.concatenate(features),
            domain=np.repeat(np.arange(len(domains), dtype=np.int32), [len(rows) for rows in features]),
            alignment=np.concatenate(alignment),
            domains=tuple(entry["task"] for entry in domains),
            key=point_key(manifest=manifest),
            **facts,
        )
    except KeyError as error:
        raise ValueError(f"{path / MANIFEST} lacks an entry ({error}): make the folder again with {_MAKE}") from error


def _features(folder: Path, first: int, count: int) -> np.ndarray:
    parts = [runs.read_shard(folder / name, Outputs, _LOST, AGAIN) for name in shard_names(first, count)]
    target = shards.join(parts)
    if len(target.ids) != count or target.features is None or not math.isfinite(float(np.abs(target.features).sum())):
        raise ValueError(f"{folder} holds {len(target.ids)} queries; {count} with finite features are needed: {AGAIN}")
    return target.features


def _alignments(folder: Path, arms: Sequence[str], domain: Mapping[str, Any]) -> np.ndarray:
    files, foreign = [domain["alignment"][name] for name in arms], f"belongs to other outputs: {AGAIN}"
    columns = [runs.read_shard(folder / file["file"], _column, _LOST, AGAIN, file["key"], foreign) for file in files]
    return np.stack(columns, axis=1)


def _column(alignment: np.ndarray) -> np.ndarray:
    return alignment
