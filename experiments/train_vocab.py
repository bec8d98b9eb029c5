"""Train one sentencepiece vocabulary for both languages of a tab-separated corpus.

Example:
    python -m experiments.train_vocab --input=tatoeba_en_de/train.en-de.tsv.gz \\
        --output=runs/tatoeba_en_de/vocabulary.model --vocab_size=8000

The same input and flags give the same file, byte for byte. Special ids are T5's (pad 0, EOS 1, unknown 2, no begin
token). Every character of the corpus is covered, and other characters fall back to bytes, so that nothing maps to
"unknown".
"""

from __future__ import annotations

from absl import app, flags, logging

from speccascade_jax.data import sentence_pairs
from speccascade_jax.data.vocabularies import load
from speccascade_jax.runtime import gin_flags, interrupts
from speccascade_jax.storage import checksums
from speccascade_jax.storage.files import expanded, write_atomically

INPUT = flags.DEFINE_string(
    "input",
    "tatoeba_en_de/train.en-de.tsv.gz",
    "Corpus: source<TAB>target per line, .gz or plain; relative to the data directory, or an existing path.",
)
OUTPUT = flags.DEFINE_string("output", "runs/tatoeba_en_de/vocabulary.model", "File to write.")
VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 8000, "Number of pieces, special and byte pieces included.", 300)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}; flags look like --output=PATH")
    with gin_flags.one_line_errors():
        output = expanded(OUTPUT.value)
        pairs = sentence_pairs.read_pairs(INPUT.value)
        logging.info("training %d pieces on %d pairs", VOCAB_SIZE.value, len(pairs))
        content = load.train((side for pair in pairs for side in pair), VOCAB_SIZE.value)
        if output.exists() and output.read_bytes() != content:
            raise ValueError(f"{output} exists and is another file: name another --output, or remove it")
        write_atomically(output, content)
        checksums.update(output)  # writes the digest beside the output, so that both can be moved into a pair's folder
        logging.info("wrote %r", load.Vocabulary(output))


if __name__ == "__main__":
    gin_flags.run_app(main, interrupts.ANEW)
