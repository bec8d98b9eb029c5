"""Text quality: BLEU (sacrebleu), ROUGE (rouge-score), short answers, tests of code; all from 0 to 100.

Each metric is kept as statistics per example (counts for BLEU and pass@1, the score itself for the others), so that a
corpus score, a score per example and a bootstrap come from one pass over the texts. A record keeps them (`measure`), so
that two records can be compared example by example without their texts (`results.bootstrap`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU

from speccascade_jax.core import names
from speccascade_jax.metrics import answers, code

References = Sequence[str | tuple[str, ...]]
"""One text per example, or a tuple of texts of which the best counts."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """How one metric is computed.

    Attributes:
        statistics: (prediction, reference) -> K numbers.
        from_sums: statistics added up over the N examples of each of R corpora, `[R, K]`, and N -> the scores `[R]`.
        sentence: statistics `[K]` -> the score of one example.
        signature: () -> what identifies the computation in a record.
        several: whether an example may have several references, of which the best counts.
        executes: whether it runs what a model wrote; only where `Evaluation.execute_code` allows it.
    """

    statistics: Callable[[str, str], list[float]]
    from_sums: Callable[[np.ndarray, int], np.ndarray]
    sentence: Callable[[np.ndarray], float]
    signature: Callable[[], str]
    several: bool = False
    executes: bool = False


def score(metric_names: Sequence[str], predictions: Sequence[str], references: References) -> dict[str, float]:
    """Each named metric over the whole corpus, 0 to 100.

    Args:
        metric_names: keys of `METRICS`.
        predictions: one text per example; may be empty strings.
        references: one text per example, in the same order, or a tuple of texts where a metric takes several.

    Raises:
        ValueError: an unknown metric, no examples, lists of different lengths, or several references for a metric
            that compares with one.
    """
    if isinstance(metric_names, str):
        raise ValueError(f"metric_names={metric_names!r} is one string; give a list or tuple of names")
    return {name: _corpus_score(name, _statistics(name, predictions, references)) for name in metric_names}


def sentence_scores(name: str, predictions: Sequence[str], references: References) -> list[float]:
    """The metric of every example alone, 0 to 100; errors as in `score`.

    For BLEU this is sacrebleu's sentence BLEU (effective order), whose mean is *not* the corpus BLEU.
    """
    metric = get_metric(name)
    return [metric.sentence(row) for row in _statistics(name, predictions, references)]


def bootstrap_interval(
    name: str,
    predictions: Sequence[str],
    references: References,
    *,
    seed: int,
    samples: int = 200,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """The percentile bootstrap interval of the corpus score over examples, (low, high); errors as in `score`.

    sacrebleu offers this for its own metrics only, with a seed from the environment.
    """
    return _interval(name, _statistics(name, predictions, references), seed, samples, confidence)


def measure(
    metric_names: Sequence[str],
    ids: Sequence[int],
    predictions: Sequence[str],
    references: References,
    *,
    samples: int = 200,
) -> dict[str, Any]:
    """A record's entry `quality`: the scores, the first metric's interval, and the statistics of every example.

    Args:
        metric_names: keys of `METRICS`, the main one first.
        ids: what each example is called, in the order of the texts.
        predictions, references: one text per example, as in `score`.
        samples: bootstrap resamples behind the interval.

    Returns:
        `metric`, `value`, `low`, `high`, `interval`, `examples`, `all` (every metric's score), `signature`, and
        `per_example`: `ids` and, for each metric, `statistics` in the same order (a list of K numbers, or the number
        itself where K is 1).

    Raises:
        ValueError: as `score`; another number of ids; an id that occurs twice.
    """
    if len(ids) != len(predictions) or len(set(ids)) != len(ids):
        raise ValueError(f"{len(set(ids))} different ids for {len(predictions)} predictions; one each is needed")
    statistics = {name: _statistics(name, predictions, references) for name in metric_names}
    scores, main = {name: _corpus_score(name, rows) for name, rows in statistics.items()}, metric_names[0]
    low, high = _interval(main, statistics[main], seed=0, samples=samples)
    return {
        "metric": main,
        "value": scores[main],
        "low": low,
        "high": high,
        "interval": f"95% bootstrap over examples, {samples} resamples",
        "examples": len(predictions),
        "all": scores,
        "signature": signature(main),
        "per_example": {
            "ids": [int(one) for one in ids],
            "statistics": {name: _compact(rows) for name, rows in statistics.items()},
        },
    }


def signature(name: str) -> str:
    """What identifies a metric's computation: tokeniser, smoothing, stemming, library version."""
    return get_metric(name).signature()


def get_metric(name: str) -> Metric:
    """The metric called `name`.

    Raises:
        ValueError: there is none; names the nearest and all of them.
    """
    if name in METRICS:
        return METRICS[name]
    raise ValueError(f"unknown metric {name!r}; {names.hint(name, METRICS)}All metrics: {', '.join(METRICS)}")


def _statistics(name: str, predictions: Sequence[str], references: References) -> np.ndarray:
    """float64 `[N, K]`."""
    for what, texts in (("predictions", predictions), ("references", references)):
        if isinstance(texts, str):
            raise ValueError(f"{what} is one string; give a list with one text per example")
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references; one each is needed")
    if not predictions:
        raise ValueError(f"no predictions to score with {name}; give at least one example")
    pairs = zip(predictions, references, strict=True)
    return np.asarray([_statistics_of(name, *pair) for pair in pairs], np.float64)


def _statistics_of(name: str, prediction: str, reference: str | Sequence[str]) -> list[float]:
    """Those of the best reference, where a metric allows several."""
    metric, texts = get_metric(name), (reference,) if isinstance(reference, str) else tuple(reference)
    if not texts or (len(texts) > 1 and not metric.several):
        allowed = ", ".join(known for known, one in METRICS.items() if one.several)
        raise ValueError(
            f"{name} compares with one reference per example, not with {len(texts)}; give one, or choose a metric that "
            f"takes the best of several: {allowed}"
        )
    return max(metric.statistics(prediction, text) for text in texts)


def _corpus_score(name: str, statistics: np.ndarray) -> float:
    return float(get_metric(name).from_sums(statistics.sum(axis=0, keepdims=True), len(statistics))[0])


def _interval(
    name: str, statistics: np.ndarray, seed: int, samples: int, confidence: float = 0.95
) -> tuple[float, float]:
    drawn = np.random.default_rng(seed).integers(len(statistics), size=(samples, len(statistics)))
    scores = get_metric(name).from_sums(np.stack([statistics[rows].sum(axis=0) for rows in drawn]), len(statistics))
    low, high = np.quantile(scores, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _compact(statistics: np.ndarray) -> list:
    """`[N, K]` as lists for a record: counts as whole numbers, single numbers without a list of their own."""
    whole = statistics.astype(np.int64)
    numbers = whole if np.array_equal(whole, statistics) else statistics
    return (numbers[:, 0] if numbers.shape[1] == 1 else numbers).tolist()


@functools.cache
def _bleu() -> BLEU:
    # Effective order matters for one sentence only; it does not touch the counts that a corpus score adds up.
    return BLEU(effective_order=True)


def _bleu_statistics(prediction: str, reference: str) -> list[float]:
    """n-gram matches and n-gram totals for n = 1 to 4, then the lengths of prediction and reference."""
    found = _bleu().sentence_score(prediction, [reference])
    return [*found.counts, *found.totals, found.sys_len, found.ref_len]


def _bleu_from(summed: np.ndarray, effective_order: bool) -> float:
    """BLEU (Papineni et al. 2002) with sacrebleu's default smoothing, from summed statistics `[10]`."""
    counts = [int(number) for number in summed]
    return float(
        BLEU.compute_bleu(
            counts[:4], counts[4:8], counts[8], counts[9], smooth_method="exp", effective_order=effective_order
        ).score
    )


def _bleu_signature() -> str:
    bleu = BLEU()
    bleu.corpus_score(["one"], [["one"]])  # the number of references is known only after a score
    return f"BLEU|{bleu.get_signature()}"


@functools.cache
def _rouge(kind: str) -> Any:
    from rouge_score import rouge_scorer  # loads NLTK and SciPy: slow, and BLEU needs neither

    return rouge_scorer.RougeScorer([kind], use_stemmer=True)


def _rouge_f1(prediction: str, reference: str, *, kind: str) -> list[float]:
    return [100.0 * _rouge(kind).score(reference, prediction)[kind].fmeasure]


def _rouge_signature(kind: str) -> str:
    return f"{kind}|f1|stemmer:porter|version:{metadata.version('rouge-score')}"


def _exact_match(prediction: str, reference: str) -> list[float]:
    return [100.0 * (prediction.strip() == reference.strip())]


def _mean_of(statistics: Callable[[str, str], list[float]], described: str) -> Metric:
    """A metric whose corpus score is the mean over examples, and an example's that of its best reference."""
    return Metric(
        statistics=statistics,
        from_sums=lambda sums, examples: sums[:, 0] / examples,
        sentence=lambda row: float(row[0]),
        signature=lambda: described,
        several=True,
    )


_SQUAD = "SQuAD: lower case, no punctuation, no articles|best reference"

METRICS = {
    "bleu": Metric(
        statistics=_bleu_statistics,
        from_sums=lambda sums, _: np.asarray([_bleu_from(row, effective_order=False) for row in sums]),
        sentence=lambda row: _bleu_from(row, effective_order=True),
        signature=_bleu_signature,
    ),
    **{
        kind: _mean_of(functools.partial(_rouge_f1, kind=kind), _rouge_signature(kind))
        for kind in ("rouge1", "rouge2", "rougeL")
    },
    "exact_match": _mean_of(_exact_match, "exact_match|surrounding spaces ignored"),
    "final_number": _mean_of(answers.final_number, "final_number|last number, compared as decimals"),
    "answer_exact_match": _mean_of(answers.answer_exact_match, f"answer_exact_match|{_SQUAD}"),
    "answer_f1": _mean_of(answers.answer_f1, f"answer_f1|{_SQUAD}|no answer: all or nothing"),
    "choice": _mean_of(answers.choice, "choice|first letter from A to E that stands alone"),
    "pass_at_1": Metric(
        statistics=code.pass_at_1,
        from_sums=lambda sums, examples: 100.0 * sums[:, 0] / examples,
        sentence=lambda row: 100.0 * float(row[0]),
        signature=lambda: f"pass@1|one program per example, {code.SECONDS:g} s|counts:{','.join(code.KINDS)}",
        executes=True,
    ),
}
