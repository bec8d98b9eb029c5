"""What models write alone for the queries of a domain, in shards: made once, and kept whoever else is compared.

A folder holds `settings.json`, what its outputs hang on, and shards `000000-256.npz`, … (first query, how many): `ids`,
`tokens` `[N, L]` (0 behind the end) and `lengths`, of the target also `features` `[N, D]`. Each is written whole or not
at all and carries a key: the settings and its queries, so that more queries only add shards.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.names import TARGET
from speccascade_jax.core.types import Array, BoundModel, Params, Prompt
from speccascade_jax.engine.engine import prompt_features
from speccascade_jax.engine.generate import raise_on_failure
from speccascade_jax.evaluation.points import Point, Settings
from speccascade_jax.evaluation.session import Session
from speccascade_jax.models import fingerprints
from speccascade_jax.storage import archives
from speccascade_jax.storage.files import claim, point_key
from speccascade_jax.training import runs

SHARD = 256
AGAIN = "remove it and make it again with python -m experiments.make_selection_data"


@dataclass(frozen=True)
class Outputs:
    """One model's outputs for a domain's queries, in order: see the module; `features` are the target's alone."""

    ids: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    features: np.ndarray | None = None


@dataclass(frozen=True)
class Writer:
    """A model that writes alone for the queries of a session.

    Attributes:
        session: whose examples and prompts; its pair's target is another model where a draft writes.
        name: for progress; bound: the model; temperature: 0 is greedy; embeds: whether features are wanted too.
    """

    session: Session
    name: str
    bound: BoundModel
    temperature: float = 0.0
    seed: int = 0
    embeds: bool = False

    def settings(self) -> dict[str, Any]:
        """What the outputs hang on, but the queries themselves."""
        asked = self.session.evaluation
        return {
            "weights": fingerprints.of_model(self.bound),
            "task": self.session.task.name,
            "split": asked.split,
            "max_new_tokens": asked.max_new_tokens,
            "batch": asked.quality_batch,
            "stop_ids": self.session.loaded["stop_ids"],
            "temperature": self.temperature,
            "seed": self.seed,
            "features": self.embeds,
        }

    def fill(self, folder: Path) -> Outputs:
        """Write the shards that are not there yet; the outputs of all queries.

        Raises:
            ValueError: a folder begun with other settings (says which), or a damaged shard.
            FloatingPointError: NaN or infinite logits.
        """
        settings = self.settings()
        claim(folder / "settings.json", settings, "name another output, or remove the folder")
        asked = self.session.evaluation
        rows = self.session.window(asked, asked.quality_examples)
        cut = [rows[at : at + SHARD] for at in range(0, len(rows), SHARD)]
        paths = [folder / name for name in shard_names(asked.first_example, len(rows))]
        keys = [point_key(settings=settings, queries=self._queries(some)) for some in cut]
        missing = [n for n, path in enumerate(paths) if not path.exists()]
        began = time.monotonic()
        for done, n in enumerate(missing, 1):
            archives.write(paths[n], keys[n], self._write(cut[n]))
            progress = f"shard {done} of {len(missing)}, {runs.time_left(began, done, len(missing))} left"
            print(f"{self.session.task.name}: {self.name}, {progress}", flush=True)
        foreign = f"holds outputs for other queries or settings than its folder's: {AGAIN}"
        parts = zip(paths, keys, strict=True)
        return joined([runs.read_shard(path, Outputs, "damaged", AGAIN, key, foreign) for path, key in parts])

    def _queries(self, rows: np.ndarray) -> list[Any]:
        return [(self.session.examples[row].id, self.session.examples[row].source) for row in rows]

    def _write(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        session = self._alone()
        point = Point(
            pair=session.source,
            evaluation=session.evaluation,
            settings=Settings(method=TARGET, temperature=self.temperature),
            seed=self.seed,
        )
        parts = []
        for some, kept in session.in_batches(rows, session.evaluation.quality_batch):
            prepared = session.prepare(point, some)
            found = prepared(point.seed)
            raise_on_failure(found)
            part = {"tokens": found.tokens, "lengths": found.lengths}
            if self.embeds:
                part["features"] = embedded(self.bound.model, self.bound.params, prepared.args[0])
            parts.append({name: np.asarray(value)[:kept] for name, value in part.items()})
        together = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        ids = np.asarray([session.examples[row].id for row in rows], np.int32)
        return {"ids": ids, **together}

    def _alone(self) -> Session:
        """The session with this model in the target's place; prompts and examples are shared."""
        session = copy.copy(self.session)
        session.pair = replace(session.pair, target=self.bound, draft=self.bound, others={}, head=None, policy=None)
        session._decoders, session._code = {}, {}  # those of the pair's own target
        return session


def shard_names(first: int, count: int) -> list[str]:
    """Files of the shards of `count` queries from a domain's example `first` on."""
    return [f"{first + at:06}-{min(SHARD, count - at)}.npz" for at in range(0, count, SHARD)]


def joined(parts: list[Outputs]) -> Outputs:
    """All outputs in order."""
    names = ["ids", "tokens", "lengths"]
    names += ["features"] * all(part.features is not None for part in parts)
    return Outputs(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


@partial(jax.jit, static_argnames="model")
def embedded(model: Any, params: Params, prompt: Prompt) -> Array:
    """float32 `[B, D]`: what a selection's policy reads when it decodes (METHODS section 8)."""
    cache = model.prefill(params, prompt, prompt.tokens.shape[1] + 1)
    return prompt_features(model, cache).astype(jnp.float32)
