"""Count how often each token follows another one in a file of texts; the table of counts can serve as a draft.

Examples:
    python -m experiments.count_bigrams --vocabulary=speccascade_jax/assets/pairs/tatoeba_en_de/vocabulary.model \\
        --input=tatoeba_en_de/train.en-de.tsv.gz --output=runs/tatoeba_en_de/bigrams.npz
    python -m experiments.count_bigrams --vocabulary=speccascade_jax/assets/pairs/tatoeba_en_de/vocabulary.model \\
        --input=runs/tatoeba_en_de/outputs.pieces.gz --output=runs/tatoeba_en_de/bigrams.npz

To use the table as a draft, write bigrams:FILE or max_gram:FILE in place of the path of a draft. The command counts the
input's second column, from the token with which decoding begins to the end-of-sequence token. A decoder-only model
continues its prompt, but the table does not count the step from a prompt's last token to the first token of an output.
"""

from __future__ import annotations

from absl import app, flags, logging

from speccascade_jax.data.sentence_pairs import read_tokens
from speccascade_jax.data.vocabularies import load
from speccascade_jax.models.ngrams import count_bigrams
from speccascade_jax.pairs.derived import save_bigrams
from speccascade_jax.runtime import gin_flags, interrupts

VOCABULARY = flags.DEFINE_string(
    "vocabulary", None, "The pair's vocabulary: any file that pairs read, or its folder.", required=True
)
INPUT = flags.DEFINE_string(
    "input", "tatoeba_en_de/train.en-de.tsv.gz", "source<TAB>target per line, text or pieces (x.pieces.gz)."
)
OUTPUT = flags.DEFINE_string("output", "runs/bigrams.npz", "File to write.")
BEGIN = flags.DEFINE_integer(
    "begin",
    None,
    "Id that decoding begins with; default: the vocabulary's beginning-of-sequence id, or 0 (T5) if it has none.",
    0,
)
MOST = flags.DEFINE_integer("most", 64, "Number of successors to keep per token, the most frequent ones.", 1)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}; flags look like --output=PATH")
    with gin_flags.one_line_errors():
        vocabulary = load.load_vocabulary(VOCABULARY.value)
        begin = BEGIN.value if BEGIN.value is not None else vocabulary.bos_id or 0
        pairs = read_tokens(INPUT.value, vocabulary)
        sequences = ([begin, *pair.target, vocabulary.eos_id] for pair in pairs)
        table = count_bigrams(sequences, vocabulary.vocab_size, MOST.value)
        save_bigrams(OUTPUT.value, table, vocabulary)
        logging.info("counted %d outputs into %s", len(pairs), OUTPUT.value)


if __name__ == "__main__":
    gin_flags.run_app(main, interrupts.ANEW)
