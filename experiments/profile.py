r"""Where a round's time goes: draft, score, sampling, verify, commit, and the models' parts in them, from a trace.

    python experiments/profile.py --gin_file=gin/profile.gin --gin_file=gin/models/tatoeba_en_de.gin \
        --gin_file=gin/tasks/tiny_translation.gin --gin_file=gin/methods/token_v3.gin --gin.Sampling.temperature=1.0

`python -m experiments.profile` does the same. One configuration, chosen as for run.py, with gin/profile.gin in place of
gin/run.gin; a record's `configuration` goes behind gin/profile.gin in place of the other three. What is printed: the
parts of a round, with the prefill below them; the parts of the models; the dearest single instructions.

Settings, with their defaults:

    --gin.profile.batch=1           rows decoded together
    --gin.profile.generations=4     batches, each of other examples
    --gin.profile.trials=3          the quickest of these counts
    --gin.profile.top=10            how many single instructions
    --gin.profile.output="'profile.json'"     (not written) all numbers
    --gin.profile.keep="'folder'"             (not kept) the traces, for XProf or Perfetto
"""

import sys

EXAMPLE = (
    "python experiments/profile.py --gin_file=gin/profile.gin --gin_file=gin/models/tatoeba_en_de.gin "
    "--gin_file=gin/tasks/tiny_translation.gin --gin_file=gin/methods/token_v3.gin"
)


def hand_over() -> None:
    """Put the standard library's `profile` in this file's place.

    A script of this folder puts the folder first on the path, and `cProfile` then finds this file under that name.
    """
    import importlib.util
    import sysconfig
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("profile", [sysconfig.get_path("stdlib")])
    assert spec is not None and spec.loader is not None
    sys.modules["profile"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "profile":
    hand_over()
elif __name__ == "__main__":
    from speccascade_jax import gin_flags, profiling

    gin_flags.main(profiling.profile, EXAMPLE)
