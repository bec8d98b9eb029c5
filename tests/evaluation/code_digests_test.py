"""Tests of code digests: they change with a rule, policy or drafter, but not with comments, paths or processes."""

import importlib
import linecache
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import pytest

import speccascade_jax as sc
from speccascade_jax.data.tasks.file_task import FileTask
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.evaluation import code_digests, experiment, session
from speccascade_jax.evaluation.points import Level, Settings
from speccascade_jax.methods import generations, table
from speccascade_jax.rules import deferral
from speccascade_jax.stopping import policies
from tests.support import text_pair
from tests.support.acceptance_heads import head_for
from tests.support.tiny_pair import write

SMALL, SOURCE = text_pair.evaluation(max_new_tokens=4, quality_examples=2), text_pair.SOURCE
OWN = '''
"""The user's own rules, policies and drafters."""
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.protocols import Decision
from speccascade_jax.rules.rule import Rule
from speccascade_jax.stopping.policies import Capped
from tests.support.drafters import Repeats

LIMIT = 0.3
STEPS = 2
TABLE = np.linspace(0.0, 0.5, 320, dtype=np.float32)


def closed(limit):
    """A rule."""
    return lambda pair, alpha: pair.q.max(-1, keepdims=True) < limit - alpha


def by_table(pair, alpha):
    return pair.q < jnp.asarray(TABLE).max() - alpha


def called(pair, alpha):
    def outside(law):
        return np.asarray(law)

    law = jax.pure_callback(outside, jax.ShapeDtypeStruct(pair.q.shape, jnp.float32), pair.q)
    return law.max(-1, keepdims=True) < alpha


CLOSED = Rule(name="closed", deferral=closed(0.7))
TABLED = Rule(name="tabled", deferral=by_table)
CALLED = Rule(name="called", deferral=called)


@dataclass(frozen=True)
class Own(Capped):
    """A policy."""

    def __call__(self, params, state, step, controls):
        """Decide."""
        yes = step.max_q > LIMIT
        return Decision(draw=yes, proceed=yes & self.below_cap(step)), state


@dataclass(frozen=True)
class Twice(Repeats):
    """A drafter."""

    def propose(self, params, state, request):
        draft, state, cache = super().propose(params, state, request)
        return replace(draft, steps=draft.steps + STEPS), state, cache


def drafter(pair, block_size):
    return Twice(block_size, pair.target.model.vocab_size), {"table": TABLE[:7]}
'''
_LEVEL = Level(model="draft", budget=2, rule="own_code.CLOSED", alpha=0.1, block_size=2)
_NAMES = ("closed", "tabled", "called", "policy", "drafter", "level", "drafted level")
_DRAFTED = Level(model="draft", budget=2, drafters=("own_code.drafter",), block_size=2)


def _methods() -> dict[str, Settings]:
    """Returns the methods whose code is the user's own; their names are resolved here."""
    rules = {name: Settings(method=f"own_code.{name.upper()}", alpha=0.1, block_size=2) for name in _NAMES[:3]}
    speculative = {"stop": "own_code.Own"}, {"drafters": ("own_code.drafter",)}
    policy, drafter = (Settings(method="speculative", block_size=2, **part) for part in speculative)
    level, drafted = (Settings(method="speculative", drafters=(part,)) for part in (_LEVEL, _DRAFTED))
    return rules | dict(zip(_NAMES[3:], (policy, drafter, level, drafted), strict=True))


@pytest.fixture
def codes(pair, tmp_path_factory, monkeypatch):
    """Returns a function from a module's text to the digests of methods in it; each call writes another folder."""

    def codes(text: str, names) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("own")
        (folder / "own_code.py").write_text(text)
        monkeypatch.syspath_prepend(folder)
        sys.modules.pop("own_code", None)
        importlib.invalidate_caches()
        loaded = session.Session(SOURCE, SMALL, pair)
        return {name: loaded.code(_methods()[name]) for name in names}

    yield codes
    sys.modules.pop("own_code", None)


@pytest.mark.parametrize(("old", "new", "changed", "same"), [
    ("closed(0.7)", "closed(0.70001)", ["closed", "level"], ["tabled", "policy"]),
    ("limit - alpha", "alpha - limit", ["closed", "level"], []),
    ("linspace(0.0, 0.5", "linspace(0.0, 0.6", ["tabled", "drafter"], ["closed"]),
    ("LIMIT = 0.3", "LIMIT = 0.4", ["policy"], ["closed"]),
    ("step.max_q > LIMIT", "step.max_q >= LIMIT", ["policy"], ["tabled"]),
    ("STEPS = 2", "STEPS = 3", ["drafter", "drafted level"], ["policy"]),
    ('"""A drafter."""', '"""One."""', [], ["drafter"]),
    ("return law.max", "return -law.max", ["called"], []),
    ('"""A policy."""', '"""Another sentence."""', [], ["policy"]),
    ("LIMIT =", "# why\n\n\nLIMIT  =", [], ["policy", "closed", "tabled", "called"]),
    ("class Twice", "\n# twice\nclass Twice", [], ["drafter"]),
])  # fmt: skip
def test_constants_and_tables_change_the_digest_but_comments_do_not(codes, old, new, changed, same):
    assert OWN.count(old) == 1
    old_codes, new_codes = codes(OWN, [*changed, *same]), codes(OWN.replace(old, new), [*changed, *same])
    assert [name for name in old_codes if new_codes[name] != old_codes[name]] == changed
    assert len(set(old_codes.values())) == len(old_codes)


def test_alphas_and_thresholds_share_a_code_and_the_sampling_has_none(pair):
    loaded = session.Session(SOURCE, SMALL, pair)
    bild = [Settings(method="bild", alpha=alpha, stop_threshold=h) for alpha, h in ((1.0, 0.5), (2.0, 0.25))]
    assert len({loaded.code(method) for method in bild}) == 1


@pytest.fixture
def code(pair):
    """Returns `code(method, …)`, the digest of settings in a new session."""
    return lambda method, **more: session.Session(SOURCE, SMALL, pair).code(Settings(method=method, **more))


def test_the_settings_of_a_method_change_the_digest_but_its_name_does_not(code, monkeypatch):
    bild = partial(code, "bild", alpha=1.0, stop_threshold=0.5)
    first, row = bild(), table.METHODS["bild"]
    monkeypatch.setitem(table.METHODS, "bild", replace(row, title="Big-Little", symbol="h", detail="x"))
    assert bild() == first
    monkeypatch.setitem(table.METHODS, "bild", replace(row, verify_final=True))
    assert bild() != first


def test_shipped_policies_and_scores_change_the_digest(code, monkeypatch):
    stop, score = partial(code, "stop_confidence", stop_threshold=0.5), partial(code, "seq_cascade", alpha=-1.0)
    first = stop(), score()
    monkeypatch.setattr(policies.Confidence, "below_cap", lambda self, step: step.slot + 2 < self.block)
    monkeypatch.setitem(generations.SCORES, "sum", lambda x, y: x[:, 0])
    assert stop() != first[0] and score() != first[1]


def test_verifiers_of_blocks_and_trees_change_the_digest(code, monkeypatch):
    ways = ({}, {"verify": "block"}, {"tree": (2, 1)}, {"tree": (2, 2)})

    def codes():
        return [code("opt", alpha=0.3, **way) for way in ways]

    before, source = codes(), code_digests._source
    changed = ("BlockWise", "BranchWise")
    monkeypatch.setattr(code_digests, "_source", lambda kind: "" if kind.__name__ in changed else source(kind))
    assert len(set(before)) == 4
    assert [a == b for a, b in zip(before, codes(), strict=True)] == [True, False, False, False]


def test_a_heads_policy_is_in_the_digest_and_its_numbers_in_the_fingerprint(tmp_path):
    pair = sc.load_pair(write(tmp_path))
    codes = set()
    for head in (head_for(pair), head_for(pair, seed=1), head_for(pair, depth=1)):
        loaded = session.Session(SOURCE, SMALL, replace(pair, head=head))
        codes.add(loaded.code(Settings(method="specdecpp", stop_threshold=0.5)))
        assert loaded.fingerprints(Settings(method="specdecpp", stop_threshold=0.5))["head"] == head.fingerprint
    assert len(codes) == 2


@pytest.mark.laws
def test_a_changed_rule_is_measured_again(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "load_pair", lambda name, **_: pair)
    arguments = {
        "pair": SOURCE, "evaluation": SMALL, "settings": Settings(rule="opt", alpha=0.4, block_size=2, temperature=1.0),
        "output": str(tmp_path / "runs.jsonl"),
    }  # fmt: skip
    first = experiment.run(**arguments)
    changed = replace(deferral.RULES["opt"], deferral=lambda pair, alpha: pair.greedy | (alpha > 0))
    monkeypatch.setitem(deferral.RULES, "opt", changed)
    second = experiment.run(**arguments)
    assert second["key"] == first["key"] and second["counts"] != first["counts"]
    assert second["configuration"] == first["configuration"]


_TASK = '''
"""A task of a user's own, with a metric."""
from speccascade_jax.extend import Example, Metric, Task

LIMIT = 3


def read(split):
    return (Example(n, f"Satz {n}.", f"Sentence {n}.") for n in range(8))


def nouns(text):
    # a comment
    return sum(word.istitle() for word in text.split()[:LIMIT])


def share(prediction, reference):
    """Counts nouns."""
    return [float(nouns(prediction) == nouns(reference))]


NOUN = Metric(share, lambda sums, examples: 100.0 * sums[:, 0] / examples, lambda: "nouns|1")


class Upper(Task):
    def postprocess(self, text):
        return text.strip()


UPPER = Upper(name="upper", splits=("test",), read=read, prefix="de: ", metrics=("my_task.NOUN",))
'''


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Returns a function that writes the task's file with a replaced text and imports it anew."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_task(old="", new=""):
        assert old in _TASK
        (tmp_path / "my_task.py").write_text(_TASK.replace(old, new, 1) if old else _TASK)
        sys.modules.pop("my_task", None)
        importlib.invalidate_caches()
        linecache.checkcache()
        return importlib.import_module("my_task")

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield write_task
    sys.modules.pop("my_task", None)


@pytest.mark.parametrize(("old", "new", "changes"), [
    ('prefix="de: "', 'prefix="en: "', True), ("text.strip()", "text.upper()", True), ("nouns|1", "nouns|2", True),
    ("LIMIT = 3", "LIMIT = 4", True), ("istitle", "isupper", True), ("100.0 *", "99.0 *", True),
    ("# a comment", "# another", False), ("Counts nouns", "Compares nouns", False), ("Satz", "Ein Satz", False),
])  # fmt: skip
def test_a_users_task_and_metric_change_the_digest(written, old, new, changes):
    digests = []
    for texts in (("", ""), (old, new)):
        written(*texts)
        digests.append(code_digests.task_digest("my_task.UPPER"))
    assert digests[0] and (digests[0] != digests[1]) == changes


def test_a_task_at_a_prompt_is_in_the_digest_and_the_packages_tasks_are_not(tmp_path):
    namespace = dict(globals())
    digests = set()
    for text in ("text.strip()", "text.upper()"):
        exec(_TASK.replace("text.strip()", text), namespace)
        digests.add(code_digests.task_digest(replace(namespace["UPPER"], metrics=("bleu",))))
    assert len(digests) == 2
    for task in ("xsum", "gsm8k:4", "a.csv", get_task("stories"), FileTask(path=str(tmp_path / "a.csv"))):
        assert code_digests.task_digest(task) == ""


def test_a_changed_task_is_measured_again_and_its_record_says_so(written, pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(session, "load_pair", lambda name, **_: pair)
    evaluation = text_pair.evaluation(task="my_task.UPPER", max_new_tokens=4, quality_examples=2)
    arguments = {
        "pair": SOURCE, "evaluation": evaluation, "settings": Settings(method="autoregressive"),
        "output": str(tmp_path / "runs.jsonl"),
    }  # fmt: skip
    records = []
    for texts in (("", ""), ("", ""), ("sums[:, 0] / examples", "(sums[:, 0] + 1.0) / examples")):
        written(*texts)
        records.append(experiment.run(**arguments))
    first, again, changed = records
    assert again == first
    assert changed["key"] == first["key"] and changed["quality"]["value"] == first["quality"]["value"] + 50
    said = capsys.readouterr().out
    assert said.count("measured by other code and are measured again") == 1
    assert said.count("stored in ") == 2
    assert said.count(f"already in {tmp_path / 'runs.jsonl'} (key {first['key'][:8]}…, measured 20") == 1
    assert "the same key, but other code" in experiment.compare_rerun(first, tmp_path, changed, tmp_path)


_CHILD = """
import sys
from pathlib import Path
from tests.evaluation import code_digests_test as test
from speccascade_jax.evaluation import session
loaded = session.Session(test.SOURCE, test.SMALL, test.text_pair.make(Path(sys.argv[1])))
print(*(loaded.code(test._methods()[name]) for name in test._NAMES))
"""


@pytest.mark.laws
def test_another_process_with_other_hashes_gives_the_same_digests(codes, tmp_path):
    here = " ".join(codes(OWN, _NAMES).values())
    jax.clear_caches()
    assert " ".join(codes(OWN, _NAMES).values()) == here
    (tmp_path / "own_code.py").write_text(OWN)
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
        command = [sys.executable, "-c", _CHILD, str(tmp_path)]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert said.strip() == here
