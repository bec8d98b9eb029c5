"""How well trained acceptance heads predict: `experiments/train_acceptance_head.py --mode=report`.

METHODS section 6: calibration overall, by position in the block, by range of the label. Judged are the tokens of fixed
blocks that the engine really drafts for prompts nobody trained on (`blocks`). A head's probability is taken with its
weight of rejections undone (`train.probability`), its calibration error also as it is. Beside the heads stand what the
draft says of itself: the largest probability and the entropy of its law, and the probability of the token it drew, raw
and mapped by an isotonic regression fitted on the heads' training data.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from speccascade_jax.core.names import natural
from speccascade_jax.core.types import Prompt
from speccascade_jax.evaluation.points import Evaluation, Point, Settings
from speccascade_jax.evaluation.session import Session
from speccascade_jax.evaluation.validation import validate
from speccascade_jax.pairs import head_files
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.stopping import acceptance_head as heads
from speccascade_jax.storage.files import expanded, plain, write_atomically
from speccascade_jax.training.heads import calibration
from speccascade_jax.training.heads.blocks import Blocks, collect
from speccascade_jax.training.heads.shards import SAMPLING, Data, Examples, prompt_keys, read
from speccascade_jax.training.heads.train import HeadTrainer, probability

RANGES = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Edges of the label's ranges; the last one is closed."""
LABEL = "the label itself"
_COLUMNS = {"auc": "AUC", "ece": "ECE", "ece_equal_mass": "ECE, equal mass", "brier": "Brier", "log_loss": "log loss"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadReport:
    """What is reported, and on which prompts.

    Attributes:
        trainer: whose heads (`<run_dir>/heads`), pair and data; sampling, rule and α are the data's.
        evaluation: held-out prompts, its examples for quality.
        block_size: of the fixed blocks; seed: of their run.
        shown: heads in the figure and in the table by position; the one with the best log loss if empty.
    """

    trainer: HeadTrainer
    evaluation: Evaluation
    block_size: int = 10
    seed: int = 0
    shown: tuple[str, ...] = ()

    def run(self) -> dict[str, Any]:
        """Measure, print the tables, write `report.json` and `reliability.png` into `<run_dir>/report`.

        Raises:
            FileNotFoundError: no heads.
            ValueError: heads of another draft, `shown` names none, or prompts that are among the data.
        """
        data = read(self.trainer.data)
        trained = load_heads(expanded(self.trainer.run_dir) / "heads", self.shown)
        point = self._point(data)
        validate(point)
        session = Session(self.trainer.pair, point.evaluation)
        for head in trained.values():
            head.check(session.pair.draft, session.pair.name)
        rows = session.window(point.evaluation, point.evaluation.quality_examples)
        check_unseen(data.examples, jax.tree.map(lambda x: x[rows], session.prompts))
        blocks = collect(session, point)
        found = judge(blocks, data.examples, trained)
        best = min(trained, key=lambda name: found["overall"][name]["log_loss"])
        shown = list(self.shown or (best,))
        found |= {"shown": shown, "block_size": self.block_size, "task": point.coordinates()["task"]}
        self._present(found, blocks, predictions(blocks, data.examples, trained))
        return found

    def _point(self, data: Data) -> Point:
        meant = data.manifest
        sampling = {name: meant[name] for name in SAMPLING}
        settings = Settings(rule=meant["rule"], alpha=meant["alpha"], block_size=self.block_size, **sampling)
        return Point(pair=self.trainer.pair, evaluation=self.evaluation.resolved(), settings=settings, seed=self.seed)

    def _present(self, found: dict[str, Any], blocks: Blocks, predicted: Mapping[str, np.ndarray]) -> None:
        folder = expanded(self.trainer.run_dir) / "report"
        write_atomically(folder / "report.json", json.dumps(plain(found), indent=1))
        console = Console(width=140)
        for table in (overall(found), *(by_group(found, kind) for kind in ("slot", "label"))):
            console.print(table.rich())
        names = [*found["shown"], "max q", "q̃ of the token"]
        draw({name: predicted[name] for name in names}, blocks.kept[blocks.counted], folder / "reliability.png")
        print(f"report: {folder}")


def check_unseen(trained_on: Examples, prompts: Prompt) -> None:
    """Refuse to judge on prompts that are among the data, held out there or not: the baselines are fitted on them all.

    Raises:
        ValueError: says how many there are.
    """
    known, asked = set(prompt_keys(trained_on.prompt())), prompt_keys(prompts)
    if seen := sum(key in known for key in asked):
        raise ValueError(
            f"{seen} of the report's {len(asked)} prompts are among the data that the heads were trained on: choose "
            f"others, by Evaluation.split or Evaluation.first_example"
        )


def load_heads(folder: Path, needed: tuple[str, ...] = ()) -> dict[str, head_files.Head]:
    """Name -> head of every file in a run's folder of heads.

    Raises:
        FileNotFoundError: there are none. ValueError: one of `needed` is not among them.
    """
    found = {
        path.stem: head_files.load(path)
        for path in sorted(folder.glob("*.msgpack"), key=lambda path: natural(path.stem))
    }
    if not found:
        raise FileNotFoundError(f"no heads in {folder}: train some (--mode=train)")
    if missing := [name for name in needed if name not in found]:
        raise ValueError(f"shown: {missing[0]!r} is not one of {', '.join(found)}")
    return found


def predictions(blocks: Blocks, trained_on: Examples, trained: Mapping[str, head_files.Head]) -> dict[str, np.ndarray]:
    """Name -> probability of acceptance `[K]` that each predictor gives to the blocks' `K` tokens."""
    at, fitted = blocks.counted, trained_on.counted
    kept = trained_on.kept[fitted]
    found = {
        name: probability(np.asarray(heads.logits(head.params, blocks.inputs[at])), head.card.w_rej)
        for name, head in trained.items()
    }
    found["the mean"] = np.full(int(at.sum()), kept.mean(dtype=np.float64))
    raw = {"max q": "max_q", "q̃ of the token": "q_of_proposal"}
    found |= {name: getattr(blocks, field)[at] for name, field in raw.items()}
    for name, field, sign in (*((name, field, 1) for name, field in raw.items()), ("entropy of q", "entropy_q", -1)):
        fit = calibration.isotonic(sign * getattr(trained_on, field)[fitted], kept)
        found[f"{name}, mapped"] = fit(sign * getattr(blocks, field)[at])
    return found | {LABEL: blocks.kept[at]}


def judge(blocks: Blocks, trained_on: Examples, trained: Mapping[str, head_files.Head]) -> dict[str, Any]:
    """Measures of every predictor: `overall`, `slot` (from 1: position in the block) and `label` (range of the label).

    By range of the label only means say something: a range's labels are nearly alike, so nothing is to be told apart.
    """
    at = blocks.counted
    kept = blocks.kept[at]
    slots = np.broadcast_to(np.arange(1, at.shape[1] + 1), at.shape)[at]
    ranges = np.minimum(np.digitize(kept, RANGES), len(RANGES) - 1)
    predicted = predictions(blocks, trained_on, trained)
    whole = {name: calibration.measures(p, kept) for name, p in predicted.items()}
    for name, head in trained.items():
        logits = np.asarray(heads.logits(head.params, blocks.inputs[at]))
        whole[name]["ece_as_it_is"] = calibration.reliability(probability(logits, 1.0), kept).ece
    names = {n: f"{low:g} to {high:g}" for n, (low, high) in enumerate(zip(RANGES, RANGES[1:], strict=False), 1)}
    return {
        "tokens": int(at.sum()),
        "blocks": len(at),
        "kept_in_training": float(trained_on.kept[trained_on.counted].mean()),
        "overall": whole,
        "slot": {str(s): _grouped(predicted, kept, slots == s) for s in np.unique(slots)},
        "label": {names[int(r)]: _grouped(predicted, kept, ranges == r) for r in np.unique(ranges)},
    }


def _grouped(predicted: Mapping[str, np.ndarray], kept: np.ndarray, some: np.ndarray) -> dict[str, dict[str, float]]:
    return {name: calibration.measures(p[some], kept[some]) for name, p in predicted.items()}


def overall(found: Mapping[str, Any]) -> Grid:
    """The table of all predictors over all tokens."""
    rows = []
    for name, of_one in found["overall"].items():
        cells = [_number(of_one[column]) for column in _COLUMNS]
        rows.append([name, *cells, _number(of_one["predicted"]), _number(of_one.get("ece_as_it_is"))])
    mean = next(iter(found["overall"].values()))["kept"]
    return Grid(
        title=f"Predicting acceptance: {found['tokens']:,} tokens of {found['blocks']:,} blocks",
        header=["predictor", *_COLUMNS.values(), "mean prediction", "ECE as it is"],
        rows=rows,
        notes=[
            f"kept on average: {mean:.3f} here, {found['kept_in_training']:.3f} in the training data",
            "as it is: a head's probabilities before the weight of rejections is undone",
        ],
    )


def by_group(found: Mapping[str, Any], kind: str) -> Grid:
    """The table by position in the block (`slot`) or range of the label (`label`), of a few predictors."""
    names = [*found["shown"], "max q, mapped", "q̃ of the token, mapped"]
    told = {"slot": ("position in the block", ("auc", "ece")), "label": ("range of the label", ("predicted",))}
    what, measures = told[kind]
    header = [f"{name}: {_COLUMNS.get(measure, 'mean')}" for name in names for measure in measures]
    rows = []
    for group, of_group in found[kind].items():
        first = of_group[LABEL]
        cells = [_number(of_group[name][measure]) for name in names for measure in measures]
        rows.append([group, f"{first['positions']:,}", _number(first["kept"]), *cells])
    return Grid(title=f"By {what}", header=[what, "tokens", "kept", *header], rows=rows, notes=[])


def _number(value: float | None) -> str:
    return NONE if value is None or not np.isfinite(value) else f"{value:.3f}"


def draw(predicted: Mapping[str, np.ndarray], kept: np.ndarray, path: Path) -> None:
    """The reliability diagram: mean label against mean prediction, bin by bin, and how many tokens are in each bin."""
    from speccascade_jax.results.report.figures import tradeoff
    from speccascade_jax.results.report.figures.styles import styles

    figure, (top, bottom) = tradeoff.plt.subplots(2, 1, figsize=(5.5, 6.5), height_ratios=(3, 1), sharex=True)
    top.plot([0, 1], [0, 1], color="0.6", lw=1, ls=":")
    looks = styles(predicted)
    for name, values in predicted.items():
        colour, marker = looks[name]
        bins = calibration.reliability(values, kept)
        top.plot(bins.predicted, bins.kept, color=colour, marker=marker, lw=1.4, label=f"{name} (ECE {bins.ece:.3f})")
        bottom.step((np.arange(len(bins.share)) + 0.5) / len(bins.share), bins.share, where="mid", color=colour, lw=1.2)
    top.set(ylabel="really kept", xlim=(0, 1), ylim=(0, 1))
    top.legend(frameon=False, fontsize=9)
    bottom.set(xlabel="predicted probability of acceptance", ylabel="share of tokens")
    figure.tight_layout()
    tradeoff.save(figure, path)
