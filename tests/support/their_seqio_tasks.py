"""A module as a user of seqio would write it: importing it registers Tasks, and Mixtures of these Tasks."""

import seqio
import tensorflow as tf

from speccascade_jax.pairs.pair import PAIRS_DIRECTORY

VOCABULARY = PAIRS_DIRECTORY / "tatoeba_en_de" / "vocabulary.model"
PAIRS = {
    "validation": [(f"ask: Number {n} is cold.", f"Nummer {n} ist kalt.") for n in range(12)],
    "test": [("ask: Only one.", "Nur eines.")],
}
_FEATURE = seqio.Feature(seqio.SentencePieceVocabulary(str(VOCABULARY)))


def _read(split: str, shuffle_files: bool) -> tf.data.Dataset:
    assert not shuffle_files
    inputs, targets = zip(*PAIRS[split], strict=True)
    return tf.data.Dataset.from_tensor_slices({"inputs": list(inputs), "targets": list(targets)})


def _forget_texts(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset.map(lambda example: {feature: example[feature] for feature in ("inputs", "targets")})


for _name, _more in {"their_texts": (), "their_others": (), "their_ids": (_forget_texts,)}.items():
    seqio.TaskRegistry.add(
        _name,
        source=seqio.FunctionDataSource(_read, splits=tuple(PAIRS)),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos, *_more],
        output_features={"inputs": _FEATURE, "targets": _FEATURE},
    )
seqio.MixtureRegistry.add("their_mixture", ["their_texts", "their_others"], default_rate=1.0)
seqio.MixtureRegistry.add("their_uneven_mixture", ["their_texts", "their_ids"], default_rate=1.0)
