"""Tests of mutated gin files: each gives a run, or one line that says what is wrong."""

import ast
import random
import re
import resource
import time
from pathlib import Path

import gin
import pytest

from speccascade_jax.evaluation import experiment
from speccascade_jax.evaluation.studies.calibration import calibrating
from speccascade_jax.evaluation.studies.profiling import profiling
from speccascade_jax.evaluation.studies.survey import surveying
from speccascade_jax.hierarchy import optimizing
from speccascade_jax.metrics import sandbox
from speccascade_jax.runtime import gin_errors, gin_flags
from speccascade_jax.runtime.paths import repository_root
from speccascade_jax.selection import make_data as selection_data
from speccascade_jax.selection import report, serving
from speccascade_jax.selection import train as policies
from speccascade_jax.training import exits
from speccascade_jax.training.finetune import trainer
from speccascade_jax.training.heads import make_data, train

pytestmark = pytest.mark.laws

ROOT = repository_root()
CASES, SEED = 8, 17  # of each of the commands below
PAIR, TASK = "gin/models/tatoeba_en_de.gin", "gin/tasks/tiny_translation.gin"
RECIPES = sorted(f"configs/{path.name}" for path in (ROOT / "configs").glob("*.gin") if "sweep:" in path.read_text())
METHODS = sorted(f"gin/methods/{path.name}" for path in (ROOT / "gin/methods").glob("*.gin"))
DRY, TOLERANCE = "sweep.dry_run = True", "calibrate.max_loss = 0.01"
WHOLE = [
    *((experiment.sweep, [name, *["configs/sizes/tiny.gin"] * ("quickstart" not in name)], DRY) for name in RECIPES),
    *((experiment.run, ["gin/run.gin", PAIR, TASK, name]) for name in METHODS),
    (surveying.survey, ["gin/survey.gin", PAIR, TASK]),
    (calibrating.calibrate, ["gin/calibrate.gin", PAIR, TASK], TOLERANCE),
    (calibrating.calibrate, ["gin/calibrate_appendix_d.gin", PAIR, TASK]),
    (profiling.profile, ["gin/profiling.gin", PAIR, TASK, METHODS[0]]),
    (make_data.make, ["gin/acceptance_data.gin", PAIR, TASK]),
    (train.HeadTrainer, ["gin/train_acceptance_head.gin", PAIR]),
    (exits.ExitTrainer, ["gin/train_exit_heads.gin", PAIR]),
    (optimizing.optimize, ["gin/optimize_hierarchy.gin", PAIR, TASK]),
    (selection_data.make, ["gin/selection_data.gin", "gin/selection/tiny_two_ways.gin"]),
    (report.compare, ["configs/paper5_table1.gin", "configs/sizes/tiny.gin"]),
    (serving.serve, ["configs/paper5_online.gin", "configs/sizes/tiny.gin"]),
    (policies.PolicyTrainer, ["gin/train_policy.gin"]),
    (trainer.Trainer, ["gin/train_draft.gin"]),
    (trainer.Trainer, ["gin/train_target.gin"]),
]
VALUES = """
None|True|False|'False'|'True'|nan|inf|-inf|1e999|1e308|-1e308|1e9|-1|0|0.5|3.0|10**9|1_000|99999999999999999999999|
''|'bild'|('bild')|'chow'|"optt"|b'x'|(None,)|(1,)|(1.5,)|((1,),)|(((0.1,),),)|('a', 'b')|[]|()|{}|{'opt': 0.1}|
{'opt': (0.1, None)}|{1: (2,)}|{(1,): 2}|{[1]: 2}|(4096,)|(True,)|(0,)|(-3,)|(1e9,)|@points.Settings|@points.Settings()|
@points.Evaluation()|@nowhere.Thing()|%gin.REQUIRED|(%gin.REQUIRED,)|%NOWHERE|%gin.NOWHERE|unquoted|os.path|'os.path'|
'os.nothing'|'no.such'|(|)|{|[[|'|\"\"\"|1 2|$|..|\\|((((((((((1,),),),),),),),),),)|'\\x00'|lambda: 1
""".replace("\n", "").split("|")  # fmt: skip
SIGN = re.compile(r"[\[\](){}'\",:=@%.]")
BINDING = re.compile(r"^(\s*)([\w./]+)(\s*=\s*)(.*)$")


def _value(lines, rng):
    """Replaces a value by another one; returns names that an error should contain."""
    number = rng.choice([n for n, line in enumerate(lines) if BINDING.match(line)])
    space, name, equals, _ = BINDING.match(lines[number]).groups()
    value = rng.choice(VALUES)
    lines[number] = f"{space}{name}{equals}{value}"
    return name.rpartition(".")[2], value, *_read(value)


def _read(value):
    """Returns the value as errors write it: 1e9 is 1000000000.0, and a message about (0,) may say block_size=0."""
    try:
        literal = ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ()
    entries = literal if isinstance(literal, (tuple, list, bytes)) else ()
    return (repr(literal), *(f"={entry!r}" for entry in entries))


def _name(lines, rng):
    """Mistypes a word: a letter missing, doubled, or replaced."""
    number = rng.choice([n for n, line in enumerate(lines) if re.search(r"\w\w", line.partition("#")[0])])
    word = rng.choice(list(re.finditer(r"\w\w+", lines[number].partition("#")[0])))
    position = rng.randrange(word.start(), word.end())
    letter = rng.choice(["", lines[number][position] * 2, rng.choice("xyz_019")])
    lines[number] = lines[number][:position] + letter + lines[number][position + 1 :]
    return ()


def _sign(lines, rng):
    """Mistypes a bracket, a quotation mark, a comma or a colon: one too few or too many."""
    number = rng.choice([n for n, line in enumerate(lines) if SIGN.search(line.partition("#")[0])])
    position = rng.choice(list(SIGN.finditer(lines[number].partition("#")[0]))).start()
    put = rng.choice(["", lines[number][position] * 2, rng.choice("[](){}'\",:=@%")])
    lines[number] = lines[number][:position] + put + lines[number][position + 1 :]
    return ()


def _line(lines, rng):
    """Drops, doubles, moves or indents a line, or adds an invalid include or import."""
    number = rng.randrange(len(lines))
    line = lines.pop(number)
    more = ["", " " + line, line.strip(), f"{line}\n{line}", "include 'nothing.gin'", "include 3", "import nothing"]
    more += [
        "from speccascade_jax.evaluation import point",
        "from os import path as p",
        "include",
        "import",
        "\t" + line,
    ]
    lines.insert(rng.choice([number, rng.randrange(len(lines) + 1)]), rng.choice(more))
    return ()


class _Resolved(BaseException):
    """An exception in place of the loading of weights."""


@pytest.fixture(autouse=True)
def _stop_before_loading(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def stop(*_):
        raise _Resolved

    monkeypatch.setattr(experiment, "open_session", stop)
    for module in (surveying, profiling, calibrating, make_data, optimizing):
        monkeypatch.setattr(module, "Session", stop)
    monkeypatch.setattr(report, "open_session", stop)
    for module in (selection_data, serving):
        monkeypatch.setattr(module, "load_source", stop)
    monkeypatch.setattr(sandbox, "available", lambda: None)
    yield
    gin.clear_config()


def _mutated(files, rng, folder):
    """Returns the files, one of them mutated, and names that an error should contain: a value, a binding."""
    files = [str(ROOT / name) for name in files]
    number = rng.randrange(len(files)) if rng.random() < 0.4 else 0
    lines = Path(files[number]).read_text().splitlines()
    named = rng.choice([_value, _value, _value, _name, _sign, _line])(lines, rng)
    files[number] = str(folder / "mutated.gin")
    Path(files[number]).write_text("\n".join(lines) + "\n")
    return files, named


def _outcome(function, files, bindings):
    """Returns the error that the command would end with, or `None`."""
    gin.clear_config()
    try:
        with gin_flags.one_line_errors():
            gin_flags.parse_gin(files, bindings)
            gin.get_configurable(function)()
    except _Resolved:
        return None
    except SystemExit as ended:
        return ended.code
    return None


def test_unchanged_files_run():
    for function, files, *bindings in WHOLE:
        assert _outcome(function, [str(ROOT / name) for name in files], bindings) is None, files


def test_mutated_files_end_in_one_line_or_run(tmp_path, capsys):
    said, ended = [], 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for function, files, *bindings in WHOLE:
        rng = random.Random(f"{SEED} {files}")  # a new recipe leaves the cases of the others as they are
        for _ in range(CASES):
            mutated, named = _mutated(files, rng, tmp_path)
            begin = time.monotonic()
            message = _outcome(function, mutated, bindings)
            seconds = time.monotonic() - begin
            if seconds > 10:
                said.append((files, f"{seconds:.0f} s"))
            if message is not None:
                ended += 1
                said += [(files, wrong, message, named) for wrong in _wrongs(message, named)]
    assert not said, "\n".join(map(str, said))
    assert 0.4 < ended / (CASES * len(WHOLE)) < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2e6  # 2 GB, in kB


def _wrongs(message, named):
    """Yields the faults of an error message."""
    if not isinstance(message, str) or not message.startswith("error: "):
        yield "no message"
        return
    if re.search(r"0x[0-9a-f]{5,}", message):
        yield "an address"
    if re.match(r"error: [A-Z]\w+(Error|Exception|Interrupt): ", message):
        yield "an error of ours"
    if len(message.splitlines()) > 2 or len(message) > 700:
        yield "too long"
    words = [word for name in named for word in (name, repr(name), *re.findall(r"'\w+'", name))]
    places = [*words, "mutated.gin", gin_errors.DEEP]  # for a value that names itself the place is unknown
    if named and not any(word in message for word in places):
        yield "neither value nor binding"
