r"""Answer Spec-Bench's questions with one pair and method, and with the target alone; time both and store all answers.

    python -m experiments.spec_bench --gin_file=gin/spec_bench.gin --gin_file=gin/models/two_checkpoints.gin \
        --gin_file=gin/methods/spec_decode.gin --gin.PAIR="'pair'" --gin.TARGET="'path'" --gin.DRAFT="'path'" \
        --gin.spec_bench.run.conversation="'vicuna'"

The command prints tokens per second, accepted tokens per round and the speed-up, for each of the six categories. It
writes two files of answers in Spec-Bench's schema, which Spec-Bench's own scripts read: evaluation/speed.py
(--file-path, --base-path) and evaluation/equal.py.

A killed run resumes where it stopped. A question whose conversation exceeds max_prompt_length, or the limit of the
models, is left out of both files and named at the end.

Settings, with their defaults:

    --gin.spec_bench.run.conversation="'plain'"     or 'vicuna', 'llama2', 'gemma', 'chatml' (Qwen)
    --gin.spec_bench.run.instruction="''"           the system message; Vicuna was trained with one
    --gin.spec_bench.run.questions="'spec_bench/dev_half.jsonl'"    in the data directory, or an absolute path
    --gin.spec_bench.run.categories="('mt_bench', 'translation', 'summarization', 'qa', 'math_reasoning', 'rag')"
    --gin.spec_bench.run.per_category=None          number of questions per category; None: all
    --gin.spec_bench.run.max_new_tokens=1024        longest answer
    --gin.spec_bench.run.max_prompt_length=4096     tokens of a conversation
    --gin.spec_bench.run.output="'results/spec_bench'"
"""

from speccascade_jax.evaluation.studies.spec_bench import answering
from speccascade_jax.runtime import gin_flags

EXAMPLE = (
    "python -m experiments.spec_bench --gin_file=gin/spec_bench.gin --gin_file=gin/models/tatoeba_en_de.gin "
    "--gin_file=gin/methods/spec_decode.gin --gin.spec_bench.run.max_new_tokens=32"
)

if __name__ == "__main__":
    gin_flags.main(answering.run, EXAMPLE)
