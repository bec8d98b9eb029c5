"""Tests of --help and of the commands' errors, as a user sees them, and of counting bigrams from a file."""

import os
import subprocess
import sys

import gin
import numpy as np
import pytest

import speccascade_jax
from speccascade_jax.data.vocabularies import load
from speccascade_jax.runtime import gin_flags, own_files
from speccascade_jax.runtime.paths import repository_root
from speccascade_jax.storage import archives
from speccascade_jax.storage.buckets import BucketPath

ROOT = repository_root()


def _call(*command: str, folder=ROOT) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


FLAGS = dict.fromkeys((
    "run", "sweep", "profiling", "survey", "calibrate", "spec_bench", "make_acceptance_data",
    "train_exit_heads", "optimize_hierarchy", "make_selection_data", "compare_drafters", "serve_online", "recipe",
    "rules",
), "gin_file") | {
    "tables": "format", "plots": "format", "show": "alpha", "convert": "dry-run", "describe": "block-size",
    "train_acceptance_head": "mode", "finetune": "mode", "train_vocab": "output", "count_bigrams": "output",
    "train_policy": "mode", "launch": "dry_run", "report": "most", "compare": "most", "score": "metrics",
    "preflight": "topology", "fetch_data": "github",
}  # fmt: skip
"""Script -> a flag that its help explains."""


# one process imports the modules of all scripts, and each script runs in a fork of it
EACH = """
import os, runpy, sys
import speccascade_jax.evaluation.experiment
separator = sys.argv.index("--")
for name in sys.argv[1:separator]:
    print(f"@@{name}", flush=True)
    if not os.fork():
        sys.argv = [name, *sys.argv[separator + 1 :]]
        try:
            runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            print(end.code)
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.wait()
"""


def _pages(names, *flags):
    """Returns what each script prints with the same flags, and its exit code or error, by name."""
    pages = _call("-c", EACH, *names, "--", *flags).stdout.split("@@")[1:]
    return {page.partition("\n")[0]: page for page in pages}


@pytest.fixture(scope="module")
def said():
    """Returns the text that each script prints under --help, by name."""
    return _pages(FLAGS, "--help")


@pytest.mark.tools
@pytest.mark.parametrize("name", FLAGS)
def test_help_explains_the_script_with_an_example(name, said):
    assert f"python -m experiments.{name}" in said[name]
    assert f"--{FLAGS[name]}" in said[name]
    if FLAGS[name] == "gin_file" and name != "train_exit_heads":  # this script has its own main
        assert "Settings, each as --gin.NAME=VALUE" in said[name]
        assert said[name].index("Short flags:") < said[name].index(f"python -m experiments.{name}")
        # help also shows fields of nested settings
        assert {"recipe": "Step.command"}.get(name, "ModelPair.draft_dtype") in said[name]


@pytest.mark.tools
def test_every_command_prints_the_version_and_ends():
    pages = _pages(FLAGS, "--version")
    assert list(pages) == list(FLAGS)
    for name, page in pages.items():
        assert page.splitlines()[1] == f"speccascade_jax {speccascade_jax.__version__}", name


TOGETHER = {"run", "sweep", "finetune"}
"""Commands that several processes may run together (docs/pods.md)."""
ALONE = [name for name, flag in FLAGS.items() if flag in ("gin_file", "mode") and name not in {*TOGETHER, "rules"}]
"""Commands for one process only; `rules`, which has its rules before all flags, is tested in rules_test.py."""
OTHERS = "--coordinator_address=localhost:1", "--process_count=2", "--process_index=1"


@pytest.mark.tools
def test_commands_of_one_process_refuse_others_without_waiting_for_them():
    pages = _pages(ALONE, "--gin_file=gin/run.gin", *OTHERS)
    assert list(pages) == ALONE
    for page in pages.values():
        said = [line for line in page.splitlines() if line.startswith("error:")]
        assert len(said) == 1, page
        assert "runs in one process: leave --coordinator_address=localhost:1, --process_count=2" in said[0]


def test_every_script_is_tested():
    names = {path.stem for path in (ROOT / "experiments").glob("*.py")} - {"__init__"}
    names |= {path.parent.name for path in (ROOT / "experiments").glob("*/__main__.py")}
    assert names == set(FLAGS)


def test_a_sweep_without_a_gin_file_shows_an_example_command(tmp_path):
    done = _call("-m", "experiments.sweep", folder=tmp_path)
    assert done.returncode != 0
    assert "name at least one --gin_file; for example: python -m experiments.sweep --gin_file=configs" in done.stderr


def test_gin_files_may_begin_with_a_byte_order_mark_but_not_be_empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = {"": "is empty: it sets nothing", "# nothing\n": "is empty: it sets nothing", "\ufeff": "is empty"}
    for text, said in refused.items():
        (tmp_path / "a.gin").write_text(text)
        with pytest.raises(ValueError, match=rf"a\.gin {said}"):
            gin_flags.parse_gin(["a.gin"])
    (tmp_path / "a.gin").write_bytes("N = 1".encode("utf-16"))
    with pytest.raises(ValueError, match=r"a\.gin is not UTF-8 .*: save it as UTF-8"):
        gin_flags.parse_gin(["a.gin"])
    (tmp_path / "a.gin").write_text("\ufeffinclude 'b.gin'\n")
    (tmp_path / "b.gin").write_text("\ufeffN = 1\n")
    gin_flags.parse_gin(["a.gin"])
    gin.clear_config()


def test_gin_files_and_folders_of_them_may_be_in_a_bucket(tmp_path, monkeypatch, bucket):
    """Includes are found there, too, beside local files, and errors name the object."""
    monkeypatch.chdir(tmp_path)
    files = {
        "a/a.gin": "include 'b.gin'\nM = %N\n",
        "b/b.gin": "\ufeffN = 1\n",
        "c.gin": "N = (1,\n",
        "d.gin": "# no\n",
    }
    for name, text in files.items():
        BucketPath(f"gs://bucket/{name}").write_text(text)
    (tmp_path / "local.gin").write_text("L = %M\n")
    for names in (["gs://bucket/a/a.gin", "local.gin"], ["a.gin", "local.gin"]):
        gin_flags.parse_gin(names, search_paths=["gs://bucket/a", "gs://bucket/b"])
        assert gin.query_parameter("N/macro.value") == 1 and "L = %M" in gin.config_str()
        gin.clear_config()
    for name, said in (("c", r"gs://bucket/c.gin, line 1"), ("d", "gs://bucket/d.gin is empty: it sets"),
                       ("e", "no gin file 'gs://bucket/e.gin'")):  # fmt: skip
        with pytest.raises((ValueError, OSError), match=said) as raised:
            gin_flags.parse_gin([f"gs://bucket/{name}.gin"])
        assert "\n" not in str(raised.value)
        gin.clear_config()
    with pytest.raises(
        ValueError, match="s3://bucket/a: addresses of s3: can.t be read or written; copy or mount it here"
    ):
        gin_flags.parse_gin(["a.gin"], search_paths=["s3://bucket/a"])
    with pytest.raises(ValueError, match="this step works on local files only; copy it here, and give a local path"):
        BucketPath("gs://bucket/mine.py").write_text("x = 1")
        own_files.load("gs://bucket/mine.py")


def test_gin_files_are_found_from_any_folder_and_settings_apply(tmp_path):
    """Replaces methods alone: the file's α's for other methods are ignored."""
    arguments = ["--gin_file=configs/quickstart.gin", "--gin.sweep.dry_run=True", "--gin.sweep.methods=('token_v3',)"]
    done = _call("-m", "experiments.sweep", *arguments, "--gin.sweep.block_sizes=(3,)", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "token_v3 alpha=0.95 block=3 T=0" in done.stdout and len(done.stdout.splitlines()) == 1 + 2 + 4
    assert all(line.startswith("… ") for line in done.stderr.splitlines())


@pytest.mark.tools
def test_training_imports_user_files_too():
    files = ["--gin_file=gin/train_exit_heads.gin", "--import=no/such/my_arms.py"]
    done = _call("-m", "experiments.train_exit_heads", *files)
    assert done.returncode != 0 and "--import=no/such/my_arms.py: there is no such file" in done.stderr


def test_a_bad_setting_gives_one_line_without_a_traceback():
    names = ("run", "models/directory", "methods/spec_decode", "tasks/tiny_translation")
    files = [f"--gin_file=gin/{name}.gin" for name in names]
    bindings = ["--gin.PAIR='no/such/pair'", "--gin.Settings.method='lossy'", "--gin.Settings.alpha=1.5"]
    done = _call("-m", "experiments.run", *files, *bindings)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "error: alpha=1.5 is outside the domain [0, 1) of rule 'lossy'" in done.stderr


def test_plausible_mistakes_are_named():
    arguments = ["--gin_file=configs/quickstart.gin", "--gin.sweep.dry_run=True", "--gin.sweep.temperatures=1.0"]
    done = _call("-m", "experiments.sweep", *arguments)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "temperatures=1.0 is one value where a tuple is meant; write (1.0,)" in done.stderr


@pytest.mark.parametrize(("arguments", "said"), [
    (("-m", "experiments.show", "--pair=tatoba_en_de"), "no pair 'tatoba_en_de': did you mean tatoeba_en_de,"),
    (("-m", "experiments.show", "Hello"), "unexpected argument 'Hello'; flags look like --method=chow"),
])  # fmt: skip
def test_an_error_of_show_is_one_line(arguments, said):
    done = _call(*arguments)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert f"error: {said}" in done.stderr and sum(line[0] != "…" for line in done.stderr.splitlines()) == 1


VOCABULARY = ROOT / "speccascade_jax" / "assets" / "pairs" / "tatoeba_two_ways" / "vocabulary.model"


@pytest.mark.parametrize("begin", [None, 7])
def test_bigrams_are_counted_after_the_id_that_decoding_begins_with(tmp_path, begin):
    pairs, table = tmp_path / "pairs.tsv", tmp_path / "bigrams.npz"
    pairs.write_text("Tom is here.\tTom ist hier.\nTom sleeps.\tTom schläft.\n", encoding="utf-8")
    flags = [f"--vocabulary={VOCABULARY}", f"--input={pairs}", f"--output={table}", "--most=3"]
    flags += [] if begin is None else [f"--begin={begin}"]
    done = _call("-m", "experiments.count_bigrams", *flags)
    assert done.returncode == 0, done.stderr
    vocabulary = load.load_vocabulary(VOCABULARY)
    key, arrays = archives.read(table)
    assert key == vocabulary.fingerprint and arrays["next"].shape == (vocabulary.vocab_size, 3)
    first = vocabulary.encode("Tom")[0]
    row = begin if begin is not None else vocabulary.bos_id or 0
    np.testing.assert_allclose(arrays["logits"][row], [np.log(2), -np.inf, -np.inf])
    assert arrays["next"][row, 0] == first
