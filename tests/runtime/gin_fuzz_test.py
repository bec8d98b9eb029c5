"""Mutated gin files: whatever is written into one, what comes out is a run, or one line that says what is wrong."""

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
from speccascade_jax.training.heads import make_data, train
from speccascade_jax.training.t5 import loop

pytestmark = pytest.mark.laws

ROOT = repository_root()
CASES, SEED = 400, 17
PAIR, TASK = "gin/models/tatoeba_en_de.gin", "gin/tasks/tiny_translation.gin"
RECIPES = sorted(f"configs/{path.name}" for path in (ROOT / "configs").glob("*.gin") if "sweep:" in path.read_text())
METHODS = sorted(f"gin/methods/{path.name}" for path in (ROOT / "gin/methods").glob("*.gin"))
WHOLE = [
    *((experiment.sweep, [name, *["configs/sizes/tiny.gin"] * ("quickstart" not in name)]) for name in RECIPES),
    *((experiment.run, ["gin/run.gin", PAIR, TASK, name]) for name in METHODS),
    (surveying.survey, ["gin/survey.gin", PAIR, TASK]),
    (calibrating.calibrate, ["gin/calibrate.gin", PAIR, TASK]),
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
    (loop.Trainer, ["gin/train_draft.gin"]),
    (loop.Trainer, ["gin/train_target.gin"]),
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
    """Another value in place of one; returns what an error should name."""
    number = rng.choice([n for n, line in enumerate(lines) if BINDING.match(line)])
    space, name, equals, _ = BINDING.match(lines[number]).groups()
    value = rng.choice(VALUES)
    lines[number] = f"{space}{name}{equals}{value}"
    return name.rpartition(".")[2], value, *_read(value)


def _read(value):
    """The value as Python writes it: 1e9 is 1000000000.0."""
    try:
        return (repr(ast.literal_eval(value.strip())),)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ()


def _name(lines, rng):
    """A slip in a word: a letter less, twice, or in another's place."""
    number = rng.choice([n for n, line in enumerate(lines) if re.search(r"\w\w", line.partition("#")[0])])
    word = rng.choice(list(re.finditer(r"\w\w+", lines[number].partition("#")[0])))
    at = rng.randrange(word.start(), word.end())
    letter = rng.choice(["", lines[number][at] * 2, rng.choice("xyz_019")])
    lines[number] = lines[number][:at] + letter + lines[number][at + 1 :]
    return ()


def _sign(lines, rng):
    """A bracket, a quotation mark, a comma or a colon too few or too many."""
    number = rng.choice([n for n, line in enumerate(lines) if SIGN.search(line.partition("#")[0])])
    at = rng.choice(list(SIGN.finditer(lines[number].partition("#")[0]))).start()
    put = rng.choice(["", lines[number][at] * 2, rng.choice("[](){}'\",:=@%")])
    lines[number] = lines[number][:at] + put + lines[number][at + 1 :]
    return ()


def _line(lines, rng):
    """A line too few, twice, elsewhere, or indented otherwise; an include or an import that is none."""
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
    """Raised where weights would be loaded."""


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


def _mutated(rng, folder):
    """What is called, its files with one of them mutated, and what an error should name: a value, a binding."""
    function, files = rng.choice(WHOLE)
    files = [str(ROOT / name) for name in files]
    number = rng.randrange(len(files)) if rng.random() < 0.4 else 0
    lines = Path(files[number]).read_text().splitlines()
    named = rng.choice([_value, _value, _value, _name, _sign, _line])(lines, rng)
    files[number] = str(folder / "mutated.gin")
    Path(files[number]).write_text("\n".join(lines) + "\n")
    return function, files, named


def _outcome(function, files):
    """What the command would end with: its error, or `None`."""
    gin.clear_config()
    dry = ["sweep.dry_run = True"] if function is experiment.sweep else []
    try:
        with gin_flags.one_line_errors():
            gin_flags.parse_gin(files, dry)
            gin.get_configurable(function)()
    except _Resolved:
        return None
    except SystemExit as ended:
        return ended.code
    return None


def test_mutated_files_end_in_one_line_or_run(tmp_path, capsys):
    rng, said, ended = random.Random(SEED), [], 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in range(CASES):
        function, files, named = _mutated(rng, tmp_path)
        begin = time.monotonic()
        message = _outcome(function, files)
        seconds = time.monotonic() - begin
        if seconds > 10:
            said.append((case, f"{seconds:.0f} s"))
        if message is not None:
            ended += 1
            said += [(case, wrong, message, named) for wrong in _wrongs(message, named)]
    assert not said, "\n".join(map(str, said))
    assert CASES * 0.4 < ended < CASES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2e6  # kB


def _wrongs(message, named):
    """What is wrong with an error."""
    if not isinstance(message, str) or not message.startswith("error: "):
        yield "no message"
        return
    if re.search(r"0x[0-9a-f]{5,}", message):
        yield "an address"
    if re.match(r"error: [A-Z]\w+(Error|Exception|Interrupt): ", message):
        yield "an error of ours"
    if len(message.splitlines()) > 2 or len(message) > 700:
        yield "too long"
    words = [word for each in named for word in (each, repr(each), *re.findall(r"'\w+'", each))]
    places = [*words, "mutated.gin", gin_errors.DEEP]  # of a value that names itself nobody knows the place
    if named and not any(word in message for word in places):
        yield "neither value nor binding"
