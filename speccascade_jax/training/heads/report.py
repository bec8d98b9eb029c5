"""Evaluation of trained acceptance heads: `experiments/train_acceptance_head.py --mode=report`.

The report shows calibration overall, by position in the block, and by range of the label (METHODS section 6). It
evaluates the tokens of blocks of fixed size, which the engine drafts for prompts outside the training data. In the
training data, every proposal follows the target's own tokens. In a block, a token follows other drafted tokens, and
more of them in longer blocks.

Training weights rejections more than acceptances, which shifts a head's probabilities. The report undoes this shift
(`train.probability`), and also gives the calibration error without the correction. The baselines are measures of the
draft's certainty: the largest probability and the entropy of its distribution, and the probability of the drawn token.
They are used directly, and also mapped by an isotonic regression that is fitted on the heads' training data.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.names import natural
from speccascade_jax.core.types import Array, Prompt, Round
from speccascade_jax.engine.generate import Generation, raise_on_failure
from speccascade_jax.evaluation.points import Evaluation, Point, Settings, validate
from speccascade_jax.evaluation.session import Session
from speccascade_jax.models.teacher_forcing import states
from speccascade_jax.pairs import head_files
from speccascade_jax.results.report import printing
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.rules import deferral
from speccascade_jax.runtime.progress import counted
from speccascade_jax.stopping import acceptance_head as heads
from speccascade_jax.storage.files import expanded, plain, rewrite
from speccascade_jax.training.heads import calibration, shards
from speccascade_jax.training.heads.make_data import judged
from speccascade_jax.training.heads.shards import Examples
from speccascade_jax.training.heads.train import HeadTrainer, probability

RANGES = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Edges of the ranges of the label (acceptance probability); the last range includes its upper edge."""
LABEL = "the label itself"
_COLUMNS = {"auc": "AUC", "ece": "ECE", "ece_equal_mass": "ECE, equal mass", "brier": "Brier", "log_loss": "log loss"}


_ROWS = 64
"""Number of blocks in one forward pass of the draft."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """`M` blocks of at most `G` drafted tokens; entries at or beyond the length of a block are undefined.

    Attributes:
        lengths: int32 `[M]`; rows: int32 `[M]`, the row of the example that each block belongs to.
        tokens: int32 `[M, G]`; kept, max_q, entropy_q, q_of_proposal: float32 `[M, G]`, as in `shards`, but after the
            token's own prefix: the committed tokens and the earlier tokens of the block.
        hidden: float32 `[M, G, D]`, the draft's hidden state after each token.
    """

    lengths: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    kept: np.ndarray
    max_q: np.ndarray
    entropy_q: np.ndarray
    q_of_proposal: np.ndarray
    hidden: np.ndarray

    @property
    def inputs(self) -> np.ndarray:
        """Inputs of the heads for each token, float32 `[M, G, D + 2]`."""
        return np.asarray(heads.with_law(*map(jnp.asarray, (self.hidden, self.max_q, self.q_of_proposal))))

    @property
    def counted(self) -> np.ndarray:
        """Mask of the entries below the length of their block, bool `[M, G]`."""
        return np.arange(self.tokens.shape[1])[None] < self.lengths[:, None]


@dataclasses.dataclass(frozen=True)
class Recorder:
    """Callable for `generate(record=…)` that records the drafted block of each round, and measures of its tokens."""

    rule: str
    alpha: float

    def __call__(self, turn: Round) -> dict[str, Array]:
        """Returns the record of a round: `start`, `length` and `tokens` of the block, and the values of `judged`.

        `start` and `length` (0 in inactive rows) are int32 `[B]`; all other values are `[B, G]`.
        """
        pair = jax.tree.map(lambda x: x[:, :-1], turn.pair)  # without the bonus position, which comes last
        alpha = jnp.full(turn.start.shape, self.alpha, jnp.float32)
        length = jnp.where(turn.active, turn.draft.length, 0)
        known = judged(pair, turn.draft.tokens, alpha, deferral.get(self.rule))
        return {"start": turn.start, "length": length, "tokens": turn.draft.tokens} | known


def collect(session: Session, point: Point) -> Blocks:
    """Decodes the session's examples with speculative decoding, and returns the blocks that the engine drafted.

    Args:
        session: provides the pair, the examples on which quality is measured, and their prompts.
        point: the settings and seed of the decoding: method "speculative", the rule, α and the block size.
    """
    parts = []
    recorder = Recorder(point.method.rule(point.settings).name, point.settings.alpha or 0.0)
    for rows, real in counted(session.batches(point.evaluation), "drafting the blocks", "batches"):
        generation = session.prepare(point, rows)(point.seed, record=recorder)
        raise_on_failure(generation)
        prompt = jax.tree.map(lambda x, rows=rows: x[rows], session.prompts)
        parts.append(_blocks(session, prompt, generation, rows, real))
    return shards.join(parts)


def _blocks(session: Session, prompt: Prompt, generation: Generation, rows: np.ndarray, real: int) -> Blocks:
    record = {name: np.asarray(value) for name, value in generation.record.items()}
    turn, row = np.nonzero(record["length"] > 0)
    turn, row = turn[row < real], row[row < real]
    drafted = {name: value[turn, row] for name, value in record.items()}
    before = drafted["start"] - np.asarray(prompt.length)[row]
    sequences = behind(np.asarray(generation.tokens)[row], before, drafted["tokens"])
    prompts = jax.tree.map(lambda x: np.asarray(x)[row], prompt)
    hidden = _states(session, prompts, sequences, before, drafted["tokens"].shape[1])
    known = {name: drafted[name] for name in ("tokens", "kept", "max_q", "entropy_q", "q_of_proposal")}
    return Blocks(lengths=drafted["length"], rows=rows[row].astype(np.int32), hidden=hidden, **known)


def behind(committed: np.ndarray, before: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Appends each row's block to the row's first `before` committed tokens.

    `committed` is `[M, L]`, `before` is `[M]`, and `blocks` is `[M, G]`. The result is int32 `[M, L + G]`.
    """
    size = blocks.shape[1]
    out = np.pad(committed, [(0, 0), (0, size)])
    np.put_along_axis(out, before[:, None] + np.arange(size)[None], blocks, axis=1)
    return out


def _states(session: Session, prompts: Prompt, sequences: np.ndarray, before: np.ndarray, size: int) -> np.ndarray:
    """Returns the hidden states of the blocks' tokens, float32 `[M, G, D]`, computed in passes of one shape."""
    draft, parts = session.pair.draft, []
    for start in range(0, len(sequences), _ROWS):
        chosen = np.resize(np.arange(start, min(start + _ROWS, len(sequences))), _ROWS)
        some: Any = jax.tree.map(lambda x, chosen=chosen: x[chosen], (prompts, sequences, before))
        parts.append(np.asarray(_pass(draft.model, draft.params, *some, size))[: len(sequences) - start])
    return np.concatenate(parts)


@partial(jax.jit, static_argnames=("model", "size"))
def _pass(model: Any, params: Any, prompt: Prompt, tokens: Array, before: Array, size: int) -> Array:
    hidden = states(model, params, prompt, tokens).astype(jnp.float32)
    return jnp.take_along_axis(hidden, (before[:, None] + jnp.arange(size)[None])[..., None], axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadReport:
    """Settings of a report: the heads, the prompts and the blocks.

    Attributes:
        trainer: provides the heads (`<run_dir>/heads`), the pair and the data; the data's manifest provides sampling
            settings, rule and α.
        evaluation: provides the prompts, which must not be in the training data: those on which it measures quality.
        block_size: length of the fixed blocks; seed: random seed of the decoding that drafts the blocks.
        shown: names of the heads in the figure and in the table by position; if empty, the head with the best log loss.
    """

    trainer: HeadTrainer
    evaluation: Evaluation
    block_size: int = 10
    seed: int = 0
    shown: tuple[str, ...] = ()

    def run(self) -> dict[str, Any]:
        """Measures the heads, prints tables, and writes `report.json` and `reliability.png` into `<run_dir>/report`.

        Raises:
            FileNotFoundError: there are no heads.
            ValueError: the heads belong to another draft, `shown` names an unknown head, or prompts are in the training
                data.
        """
        data = shards.read(self.trainer.data)
        trained = load_heads(expanded(self.trainer.run_dir) / "heads", self.shown)
        meant = data.manifest
        sampling = {name: meant[name] for name in shards.SAMPLING}
        settings = Settings(rule=meant["rule"], alpha=meant["alpha"], block_size=self.block_size, **sampling)
        asked = self.evaluation.resolved()
        point = Point(pair=self.trainer.pair, evaluation=asked, settings=settings, seed=self.seed)
        validate(point)
        session = Session(self.trainer.pair, asked)
        for head in trained.values():
            head.check(session.pair.draft, session.pair.name)
        rows = session.window(asked, asked.quality_examples)
        check_unseen(data.examples, jax.tree.map(lambda x: x[rows], session.prompts))
        blocks = collect(session, point)
        report = judge(blocks, data.examples, trained)
        best = min(trained, key=lambda name: report["overall"][name]["log_loss"])
        shown = list(self.shown or (best,))
        report |= {"shown": shown, "block_size": self.block_size, "task": point.coordinates()["task"]}
        self._present(report, blocks, predictions(blocks, data.examples, trained))
        return report

    def _present(self, report: dict[str, Any], blocks: Blocks, predicted: Mapping[str, np.ndarray]) -> None:
        folder = expanded(self.trainer.run_dir) / "report"
        rewrite(folder / "report.json", json.dumps(plain(report), indent=1), '"shown":', '"block_size":')
        printing.print_grids([overall(report), *(by_group(report, kind) for kind in ("slot", "label"))])
        names = [*report["shown"], "max q", "q̃ of the token"]
        draw({name: predicted[name] for name in names}, blocks.kept[blocks.counted], folder / "reliability.png")
        print(f"report: {folder}")


def check_unseen(trained_on: Examples, prompts: Prompt) -> None:
    """Refuses prompts that are in the data of the heads, even if held out, because baselines are fitted on all data.

    Raises:
        ValueError: some prompts are in the data; the message says how many.
    """
    known, asked = set(shards.prompt_keys(trained_on.prompt())), shards.prompt_keys(prompts)
    if seen := sum(key in known for key in asked):
        remedy = "choose others with Evaluation.split or Evaluation.first_example"
        among = f"{seen} of the report's {len(asked)} prompts are in the data that the heads were trained on"
        raise ValueError(f"{among}: {remedy}")


def load_heads(folder: Path, needed: tuple[str, ...] = ()) -> dict[str, head_files.Head]:
    """Loads every head in a folder of a training run, as a dictionary from name to head.

    Raises:
        FileNotFoundError: the folder holds no heads. ValueError: one of `needed` is missing.
    """
    paths = {path.stem: path for path in folder.glob("*.msgpack")}
    if not paths:
        raise FileNotFoundError(f"no heads in {folder}: train some (--mode=train)")
    trained = {name: head_files.load(paths[name]) for name in sorted(paths, key=natural)}
    if missing := [name for name in needed if name not in trained]:
        raise ValueError(f"shown names {missing[0]!r}, which is no trained head: name some of {', '.join(trained)}")
    return trained


def predictions(blocks: Blocks, trained_on: Examples, trained: Mapping[str, head_files.Head]) -> dict[str, np.ndarray]:
    """Returns the acceptance probabilities `[K]` that each predictor gives to the `K` tokens of the blocks, by name."""
    mask, fitted = blocks.counted, trained_on.counted
    kept, inputs = trained_on.kept[fitted], blocks.inputs[mask]
    logits = {name: np.asarray(heads.logits(head.params, inputs)) for name, head in trained.items()}
    predicted = {name: probability(logits[name], head.card.w_rej) for name, head in trained.items()}
    predicted["the mean"] = np.full(int(mask.sum()), kept.mean(dtype=np.float64))
    predicted |= {"max q": blocks.max_q[mask], "q̃ of the token": blocks.q_of_proposal[mask]}
    scores = (("max q", "max_q", 1), ("q̃ of the token", "q_of_proposal", 1), ("entropy of q", "entropy_q", -1))
    for name, field, sign in scores:
        fit = calibration.isotonic(sign * getattr(trained_on, field)[fitted], kept)
        predicted[f"{name}, mapped"] = fit(sign * getattr(blocks, field)[mask])
    return predicted | {LABEL: blocks.kept[mask]}


def judge(blocks: Blocks, trained_on: Examples, trained: Mapping[str, head_files.Head]) -> dict[str, Any]:
    """Returns measures of every predictor: `overall`, by `slot` (position in the block, from 1), by range of `label`.

    Within a range of the label, only the means are informative: the labels are nearly equal there, so the AUC says
    little.
    """
    mask = blocks.counted
    kept = blocks.kept[mask]
    slots = np.broadcast_to(np.arange(1, mask.shape[1] + 1), mask.shape)[mask]
    ranges = np.minimum(np.digitize(kept, RANGES), len(RANGES) - 1)
    predicted = predictions(blocks, trained_on, trained)
    everywhere = np.ones(len(kept), bool)
    overall = _grouped(predicted, kept, everywhere)
    for name, head in trained.items():
        logits = np.asarray(heads.logits(head.params, blocks.inputs[mask]))
        overall[name]["ece_as_it_is"] = calibration.reliability(probability(logits, 1.0), kept).ece
    names = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(RANGES)]
    return {
        "tokens": int(mask.sum()),
        "blocks": len(mask),
        "kept_in_training": float(trained_on.kept[trained_on.counted].mean()),
        "overall": overall,
        "slot": {str(s): _grouped(predicted, kept, slots == s) for s in np.unique(slots)},
        "label": {names[int(r) - 1]: _grouped(predicted, kept, ranges == r) for r in np.unique(ranges)},
    }


def _grouped(predicted: Mapping[str, np.ndarray], kept: np.ndarray, some: np.ndarray) -> dict[str, dict[str, float]]:
    return {name: calibration.measures(p[some], kept[some]) for name, p in predicted.items()}


def overall(report: Mapping[str, Any]) -> Grid:
    """Returns the table of all predictors over all tokens."""
    shown = (*_COLUMNS, "predicted", "ece_as_it_is")
    rows = [[name, *(_number(values.get(column)) for column in shown)] for name, values in report["overall"].items()]
    mean = report["overall"][LABEL]["kept"]
    title = f"Acceptance prediction: {report['tokens']:,} tokens in {report['blocks']:,} blocks"
    header = ["predictor", *_COLUMNS.values(), "mean prediction", "ECE uncorrected"]
    notes = [f"mean acceptance: {mean:.3f} here, {report['kept_in_training']:.3f} in the training data"]
    notes += ["uncorrected: a head's probabilities before its rejection weight is undone"]
    return Grid(title=title, header=header, rows=rows, notes=notes)


def by_group(report: Mapping[str, Any], kind: str) -> Grid:
    """Returns the table of selected predictors by position in the block (`slot`) or by range of the label (`label`)."""
    names = [*report["shown"], "max q, mapped", "q̃ of the token, mapped"]
    kinds = {"slot": ("position in the block", ("auc", "ece")), "label": ("range of the label", ("predicted",))}
    group_name, measures = kinds[kind]
    header = [f"{name}: {_COLUMNS.get(measure, 'mean')}" for name in names for measure in measures]
    rows = []
    for group, of_group in report[kind].items():
        first = of_group[LABEL]
        cells = [_number(of_group[name][measure]) for name in names for measure in measures]
        rows.append([group, f"{first['positions']:,}", _number(first["kept"]), *cells])
    return Grid(title=f"By {group_name}", header=[group_name, "tokens", "accepted", *header], rows=rows, notes=[])


def _number(value: float | None) -> str:
    return NONE if value is None or not np.isfinite(value) else f"{value:.3f}"


def draw(predicted: Mapping[str, np.ndarray], kept: np.ndarray, path: Path) -> None:
    """Draws the reliability diagram (mean label against mean prediction in each bin) and the share of tokens by bin."""
    from speccascade_jax.results.report.figures import drawing
    from speccascade_jax.results.report.figures.styles import styles

    figure, (top, bottom) = drawing.plt.subplots(2, 1, figsize=(5.5, 6.5), height_ratios=(3, 1), sharex=True)
    top.plot([0, 1], [0, 1], color="0.6", lw=1, ls=":")
    looks = styles(predicted)
    for name, values in predicted.items():
        colour, marker = looks[name]
        bins = calibration.reliability(values, kept)
        top.plot(bins.predicted, bins.kept, color=colour, marker=marker, lw=1.4, label=f"{name} (ECE {bins.ece:.3f})")
        bottom.step((np.arange(len(bins.share)) + 0.5) / len(bins.share), bins.share, where="mid", color=colour, lw=1.2)
    top.set(ylabel="actual probability of acceptance", xlim=(0, 1), ylim=(0, 1))
    top.legend(frameon=False, fontsize=9)
    bottom.set(xlabel="predicted probability of acceptance", ylabel="share of tokens")
    figure.tight_layout()
    drawing.save(figure, path)
