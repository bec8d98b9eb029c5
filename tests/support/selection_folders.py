"""A folder of selection data with known answers, without models, in the form that `selection.make_data` writes."""

import json
from pathlib import Path

import numpy as np

from speccascade_jax.selection.data import SHARD, shard_names
from speccascade_jax.storage import archives

ARMS, WIDTH = ("first", "second", "third"), 12


def clusters(queries, seed=0, noise=0.2):
    """Returns features `[N, D]` around three centres, the number of the centre `[N]` (domain), and alignments `[N, 3]`.

    The alignments are highest for the drafter (arm) of the domain's number.
    """
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(3, WIDTH))
    domain = np.sort(rng.integers(0, 3, queries))
    features = centers[domain] + 0.4 * rng.normal(size=(queries, WIDTH))
    alignment = 0.3 + 0.5 * np.eye(3)[domain] + rng.uniform(-noise, noise, size=(queries, 3))
    return features.astype(np.float32), domain.astype(np.int32), alignment.astype(np.float32)


def write(folder: Path, features, domain, alignment, **changed) -> Path:
    """Writes the folder; `changed` are entries of its manifest."""
    domains = []
    for n in range(3):
        rows = np.flatnonzero(domain == n)
        outputs_folder, task = folder / f"task{n}" / "target", f"task{n}"
        for first_row, name in zip(range(0, len(rows), SHARD), shard_names(0, len(rows)), strict=True):
            some = rows[first_row : first_row + SHARD]
            blank = np.zeros((len(some), 4), np.int32)
            arrays = {"ids": some.astype(np.int32), "tokens": blank, "lengths": blank[:, 0], "features": features[some]}
            archives.write(outputs_folder / name, "key", arrays)
        files = {}
        for k, arm in enumerate(ARMS):
            archives.write(folder / task / f"{arm}.npz", f"{task}{arm}", {"alignment": alignment[rows, k]})
            files[arm] = {"file": f"{task}/{arm}.npz", "key": f"{task}{arm}"}
        domains.append({"task": task, "queries": len(rows), "first_example": 0, "outputs": f"{task}/target",
                        "alignment": files})  # fmt: skip
    manifest = {"format": 1, "pair": "made", "target": "t", "features": WIDTH, "arms": ARMS, "prints": ("1", "2", "3"),
            "parameters": (10**8, 2 * 10**8, 5 * 10**9), "seed": None, "domains": domains} | changed  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
