"""Metrics of text quality: BLEU and chrF (sacrebleu), ROUGE (rouge-score), short answers, tests of code; from 0 to 100.

Each metric has statistics per example: counts for BLEU, chrF and pass@1, and the score itself for the others. So a
corpus score and a bootstrap need only one pass over the texts. A record stores the statistics (`measure`), so that two
records can be compared example by example without their texts (`results.analysis.bootstrap`).
"""

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from speccascade_jax.core import names
from speccascade_jax.metrics import answers, code

References = Sequence[str | tuple[str, ...]]
"""One reference text per example, or a tuple of reference texts; the one with the best score counts."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """The computation of one metric: statistics of each example, and a corpus score from their sums.

    Attributes:
        statistics: function `(prediction, reference) -> K numbers` of one example.
        from_sums: function `(sums, N) -> scores`: `sums` `[R, K]` holds the summed statistics of R corpora of N
            examples each, and the scores `[R]` are from 0 to 100.
        signature: function `() -> text` that identifies the computation in a record: tokeniser, smoothing, stemming and
            library version.
        several: whether an example may have several references; the best one counts.
        executes: whether the metric runs a model's output as a program; `Evaluation.execute_code` must allow this.
        right_or_wrong: whether every example is either right or wrong, and the score is the share of right examples.

    Examples:
        >>> import numpy as np
        >>> from speccascade_jax.extend import Metric
        >>> exact = Metric(
        ...     statistics=lambda prediction, reference: [float(prediction == reference)],
        ...     from_sums=lambda sums, examples: 100.0 * sums[:, 0] / examples,
        ...     signature=lambda: "share of equal texts, version 1",
        ... )
        >>> rows = [exact.statistics("Paris", "Paris"), exact.statistics("Lyon", "Paris")]
        >>> exact.from_sums(np.sum([rows], axis=1), len(rows)).tolist()  # one corpus of two examples
        [50.0]
    """

    statistics: Callable[[str, str], list[float]]
    from_sums: Callable[[np.ndarray, int], np.ndarray]
    signature: Callable[[], str]
    several: bool = False
    executes: bool = False
    right_or_wrong: bool = False


def score(metric_names: Sequence[str], predictions: Sequence[str], references: References) -> dict[str, float]:
    """Computes each named metric over the whole corpus, 0 to 100.

    Args:
        metric_names: keys of `METRICS`, or `module.NAME`.
        predictions: one text per example; may be empty strings.
        references: one text per example, in the same order, or a tuple of texts if a metric takes several.

    Raises:
        ValueError: an unknown metric, no examples, lists of different lengths, or several references for a metric that
            compares with one.
    """
    if isinstance(metric_names, str):
        raise ValueError(f"metric_names={metric_names!r} is one string; give a list or tuple of names")
    return {name: _corpus_score(name, _statistics(name, predictions, references)) for name in metric_names}


def measure(
    metric_names: Sequence[str],
    ids: Sequence[int],
    predictions: Sequence[str],
    references: References,
    *,
    samples: int = 200,
) -> dict[str, Any]:
    """Returns the entry `quality` of a record: the scores, an interval of the first score, and statistics per example.

    Args:
        metric_names: keys of `METRICS` or `module.NAME`, the main one first.
        ids: the examples' ids, in the order of the texts.
        predictions: one text per example, as in `score`.
        references: one text per example, or a tuple of texts, as in `score`.
        samples: number of bootstrap resamples for the interval.

    Returns:
        `metric`, `value`, `low`, `high`, `interval`, `examples`, `all` (every metric's score), `signature`, and
        `per_example`: `ids` and, for each metric, `statistics` in the same order (a list of K numbers, or the number
        itself if K is 1).

    Raises:
        ValueError: as in `score`; the number of ids differs from that of predictions; an id occurs twice.
    """
    if len(ids) != len(predictions) or len(set(ids)) != len(ids):
        raise ValueError(
            f"there are {len(set(ids))} different ids for {len(predictions)} predictions; give one id per prediction"
        )
    statistics = {name: _statistics(name, predictions, references) for name in metric_names}
    scores, main = {name: _corpus_score(name, rows) for name, rows in statistics.items()}, metric_names[0]
    low, high = _interval(main, statistics[main], samples)
    return {
        "metric": main,
        "value": scores[main],
        "low": low,
        "high": high,
        "interval": f"95% bootstrap over examples, {samples} resamples",
        "examples": len(predictions),
        "all": scores,
        "signature": get_metric(main).signature(),
        "per_example": {
            "ids": [int(example_id) for example_id in ids],
            "statistics": {name: _compact(rows) for name, rows in statistics.items()},
        },
    }


def get_metric(name: str) -> Metric:
    """Returns the metric with a name in `METRICS`, or a user's metric, whose name has the form `module.NAME`.

    Raises:
        ValueError: the metric is unknown; the message names the nearest ones, and says how to name a user's metric.
    """
    metric: Metric = names.look_up("metric", name, METRICS, Metric)
    return metric


def _statistics(name: str, predictions: Sequence[str], references: References) -> np.ndarray:
    """Returns the K statistics of each example, float64 `[N, K]`; if there are several references, the best counts."""
    for argument, texts in (("predictions", predictions), ("references", references)):
        if isinstance(texts, str):
            raise ValueError(f"{argument} is one string; give a list with one text per example")
    if len(predictions) != len(references):
        raise ValueError(
            f"there are {len(predictions)} predictions for {len(references)} references; "
            "give one reference per prediction"
        )
    if not predictions:
        raise ValueError(f"no predictions to score with {name}; give at least one example")
    metric, rows = get_metric(name), []
    for prediction, reference in zip(predictions, references, strict=True):
        choices = (reference,) if isinstance(reference, str) else tuple(reference)
        if not choices or (len(choices) > 1 and not metric.several):
            allowed = ", ".join(known for known, known_metric in METRICS.items() if known_metric.several)
            remedy = f"give one reference, or choose a metric that takes the best of several: {allowed}"
            raise ValueError(f"{name} compares with one reference per example, not with {len(choices)}; {remedy}")
        rows.append(max(metric.statistics(prediction, choice) for choice in choices))
    return np.asarray(rows, np.float64)


def _corpus_score(name: str, statistics: np.ndarray) -> float:
    return float(get_metric(name).from_sums(statistics.sum(axis=0, keepdims=True), len(statistics))[0])


def _interval(name: str, statistics: np.ndarray, samples: int) -> tuple[float, float]:
    """Computes the 95% bootstrap percentile interval of a corpus score, over examples.

    sacrebleu's bootstrap is not used, because it covers only sacrebleu's metrics and takes its seed from the
    environment.
    """
    rng, examples = np.random.default_rng(0), len(statistics)
    if get_metric(name).right_or_wrong:
        total = examples + COINS
        sums = sums_with_coins(name, statistics, rng.multinomial(total, np.full(total, 1 / total), size=samples), rng)
    else:
        drawn = rng.integers(examples, size=(samples, examples))
        sums = np.stack([statistics[rows].sum(axis=0) for rows in drawn])
    low, high = np.quantile(get_metric(name).from_sums(sums, examples), [(1 - 0.95) / 2, (1 + 0.95) / 2])
    return float(low), float(high)


COINS = 2
"""The number of artificial examples, right or wrong at random, that are added before right-or-wrong answers are drawn.

The draws are those of the bootstrap. Without the artificial examples, intervals are too narrow if nearly all answers
are right, or nearly all are wrong. For example, let only the first of two methods be right on 10% of the examples, and
only the second on 5%. Then 95% intervals of the difference contain the true difference in 57% of all cases with 8
examples, in 76% with 16, and in 93% with 64. With the artificial examples, intervals contain it in 94.5 to 100% of all
cases. This holds for 8 to 200 examples, if the methods differ on 3 to 40% of them. Agresti and Coull (1998) and Bonett
and Price (2012) add artificial examples to shares and their differences in the same way.
"""


def sums_with_coins(name: str, statistics: np.ndarray, drawn: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the summed statistics of each bootstrap resample, `[R, K]`, scaled to the number of answers.

    A resample consists of right-or-wrong answers and coins; a coin is an artificial example (`COINS`).

    Args:
        name: a metric that is `right_or_wrong`.
        statistics: `[N, K]`, the statistics of the answers.
        drawn: `[R, N + COINS]`, how often each resample contains each answer and each coin.
        rng: random generator that tosses the coins again for each resample.
    """
    examples, width = statistics.shape
    right = 100.0 / get_metric(name).from_sums(np.eye(1, width), 1)[0]  # the first statistic of a right answer
    sums = drawn[:, :examples] @ statistics
    sums[:, 0] += right * (drawn[:, examples:] * rng.integers(2, size=(len(drawn), COINS))).sum(-1)
    return np.asarray(sums * examples / (examples + COINS))


def _compact(statistics: np.ndarray) -> list:
    """Converts statistics `[N, K]` to lists for a record: whole numbers become integers, one column a flat list."""
    whole = statistics.astype(np.int64)
    numbers = whole if np.array_equal(whole, statistics) else statistics
    return (numbers[:, 0] if numbers.shape[1] == 1 else numbers).tolist()


# Scripts without spaces between words, for which BLEU needs another tokeniser: the Unicode blocks of Thai, Lao,
# Burmese, Khmer, kana and Chinese characters
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
_CHRF = CHRF()


@functools.cache
def _bleu(metric: str, effective_order: bool = True) -> BLEU:
    """Returns sacrebleu's BLEU with the tokeniser that a metric's name has after its colon, or the default one."""
    # With effective_order=False, sacrebleu warns about single sentences. The n-gram counts, from which a corpus score
    # is computed, are the same for both values.
    return BLEU(effective_order=effective_order, tokenize=metric.partition(":")[2] or None)


def sentence_bleu(prediction: str, reference: str, metric: str = "bleu") -> float:
    """Returns BLEU of one sentence, 0 to 100; skips n-gram orders longer than the sentence (effective order)."""
    return float(_bleu(metric).sentence_score(prediction, [reference]).score)


def sentence_rouge_l(prediction: str, reference: str) -> float:
    """Returns ROUGE-L (F1) of one text against another, 0 to 1; 0 if one of them has no word."""
    return _rouge_f1("rougeL", prediction, reference)[0] / 100.0


def _bleu_statistics(metric: str, prediction: str, reference: str) -> list[float]:
    """Returns n-gram matches and totals for n = 1 to 4, then the lengths of prediction and reference."""
    if metric == "bleu" and _UNSPACED.search(reference):
        warnings.warn(
            "bleu compares words between spaces, and a reference is in a script without them: choose one of "
            f"{', '.join(_TOKENISED)}",
            stacklevel=2,
        )
    counted = _bleu(metric).sentence_score(prediction, [reference])
    return [*counted.counts, *counted.totals, counted.sys_len, counted.ref_len]


def _bleu_from(sums: np.ndarray, examples: int) -> np.ndarray:
    """Computes BLEU (Papineni et al. 2002) with sacrebleu's default smoothing."""
    corpora = sums.astype(np.int64).tolist()
    return np.asarray([BLEU.compute_bleu(c[:4], c[4:8], c[8], c[9], smooth_method="exp").score for c in corpora])


def _bleu_signature(metric: str) -> str:
    bleu = _bleu(metric, effective_order=False)
    # The signature contains the number of references, which sacrebleu knows only after it has scored a corpus.
    bleu.corpus_score(["one"], [["one"]])
    return f"BLEU|{bleu.get_signature()}"


def _chrf_statistics(prediction: str, reference: str) -> list[float]:
    """Returns for each character order the number of n-grams in the prediction, in the reference, and in both."""
    return [*map(float, _CHRF._extract_corpus_statistics([prediction], [[reference]])[0])]


def _chrf_from(sums: np.ndarray, examples: int) -> np.ndarray:
    """Computes chrF2 (Popović 2015) as sacrebleu does."""
    return np.asarray([_CHRF._compute_f_score(row) for row in sums.tolist()])


@functools.cache
def _rouge(kind: str) -> Any:
    from rouge_score import rouge_scorer  # imported late, because it loads NLTK and SciPy, which is slow

    return rouge_scorer.RougeScorer([kind], use_stemmer=True)


def _rouge_f1(kind: str, prediction: str, reference: str) -> list[float]:
    if any(any(map(str.isalnum, text)) and not _ASCII_WORD.search(text) for text in (prediction, reference)):
        warnings.warn(
            "rouge counts words of ASCII letters and digits, and a text has none, so its score is 0: choose chrf or a "
            f"bleu ({', '.join(_TOKENISED)})",
            stacklevel=2,
        )
    return [100.0 * _rouge(kind).score(reference, prediction)[kind].fmeasure]


def _exact_match(prediction: str, reference: str) -> list[float]:
    return [100.0 * (prediction.strip() == reference.strip())]


def _bleu_metric(name: str) -> Metric:
    return Metric(functools.partial(_bleu_statistics, name), _bleu_from, functools.partial(_bleu_signature, name))


def _mean_of(statistics: Callable[[str, str], list[float]], described: str, right_or_wrong: bool = False) -> Metric:
    """Returns a metric whose corpus score is the mean over examples, each scored by its best reference."""
    return Metric(
        statistics,
        from_sums=lambda sums, examples: sums[:, 0] / examples,
        signature=lambda: described,
        several=True,
        right_or_wrong=right_or_wrong,
    )


_right_or_wrong = functools.partial(_mean_of, right_or_wrong=True)


# sacrebleu's tokenisers besides its default; some need a package or a download, which sacrebleu's error names
_TOKENISED = tuple(f"bleu:{name}" for name in ("zh", "ja-mecab", "ko-mecab", "char", "intl", "flores200"))
_ASCII_WORD = re.compile("[a-zA-Z0-9]")
_ROUGE_VERSION = metadata.version("rouge-score")
_SQUAD = "SQuAD: lower case, no punctuation, no articles|best reference"

METRICS = {
    "bleu": _bleu_metric("bleu"),
    "chrf": Metric(_chrf_statistics, _chrf_from, lambda: f"chrF2|version:{metadata.version('sacrebleu')}"),
    **{
        kind: _mean_of(functools.partial(_rouge_f1, kind), f"{kind}|f1|stemmer:porter|version:{_ROUGE_VERSION}")
        for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum")
    },
    "exact_match": _right_or_wrong(_exact_match, "exact_match|surrounding spaces ignored"),
    "final_number": _right_or_wrong(answers.final_number, "final_number|last number, compared as decimals"),
    "answer_exact_match": _right_or_wrong(answers.answer_exact_match, f"answer_exact_match|{_SQUAD}"),
    "answer_f1": _mean_of(answers.answer_f1, f"answer_f1|{_SQUAD}|no answer: all or nothing"),
    "choice": _right_or_wrong(answers.choice, "choice|first letter from A to E that stands alone"),
    "pass_at_1": Metric(
        statistics=code.pass_at_1,
        from_sums=lambda sums, examples: 100.0 * sums[:, 0] / examples,
        signature=lambda: f"pass@1|one program per example, {code.SECONDS:g} s|counts:{','.join(code.KINDS)}",
        executes=True,
        right_or_wrong=True,
    ),
    **{name: _bleu_metric(name) for name in _TOKENISED},
}
