"""The data sets of the T5 experiments of Narasimhan et al. (2024); importing this module registers them with seqio.

The texts come from TensorFlow Datasets. A prompt is that of T5 (Raffel et al. 2020, appendix D): the prefix of the row
in `table.TASKS`, then the text. Narasimhan et al. (§F.1) use the validation splits, of 3,000 (newstest2013), 11,305 and
13,368 examples. The catalogue of TensorFlow Datasets gives the last two numbers for its XSum 1.1.0 and its
CNN/DailyMail.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import seqio
import tensorflow as tf

from speccascade_jax.data.tasks.table import TASKS
from speccascade_jax.metrics import quality


class Source(NamedTuple):
    """A data set of TensorFlow Datasets with its version, and the names of its features for source and reference."""

    data_set: str
    source: str
    reference: str


SOURCES = {
    "wmt14_en_de": Source("wmt14_translate/de-en:1.0.0", "en", "de"),
    "xsum": Source("xsum:1.1.0", "document", "summary"),
    "cnn_dailymail": Source("cnn_dailymail:3.4.0", "article", "highlights"),
}


def make_task(name: str, vocabulary: str | Path | None = None) -> seqio.Task:
    """Returns one of `SOURCES` as a seqio Task, without registering it; the Task's name is `speccascade_…`.

    Args:
        name: a key of `SOURCES`.
        vocabulary: a sentencepiece file. If it is set, `inputs` and `targets` are token ids that end in EOS and are cut
            to seqio's `sequence_length`, as T5X needs them. Otherwise they are texts, as this package needs them.
    """
    row, source = TASKS[name], SOURCES[name]
    cut: list[Any] = [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim]
    return seqio.Task(
        f"speccascade_{name}",
        # With read_only, absent data raise an error. Otherwise an experiment would start a download of gigabytes.
        source=seqio.TfdsDataSource(source.data_set, splits=row.splits, read_only=True),
        preprocessors=[_prompts(source, row.prefix), *(cut if vocabulary else ())],
        output_features=dict.fromkeys(("inputs", "targets"), _feature(vocabulary)),
        metric_fns=[_scores(row.metrics)],
    )


def _feature(vocabulary: str | Path | None) -> seqio.Feature:
    if vocabulary:
        return seqio.Feature(seqio.SentencePieceVocabulary(str(vocabulary)))
    return seqio.Feature(seqio.PassThroughVocabulary(size=0), add_eos=False, dtype=tf.string, rank=0)


def _prompts(source: Source, prefix: str) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    def prompt(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return {"inputs": prefix + example[source.source], "targets": example[source.reference]}

    return lambda dataset: dataset.map(prompt, num_parallel_calls=tf.data.AUTOTUNE)


def _scores(metrics: Sequence[str]) -> Callable[..., dict[str, float]]:
    def scores(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
        return quality.score(metrics, predictions, targets)

    return scores


for _name in SOURCES:
    seqio.TaskRegistry.add_provider(f"speccascade_{_name}", make_task(_name))
