"""Tests of record keys: equal in every Python; new fields, changed defaults and moved classes change none."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccascade_jax.results.store.record_key import canonical, is_stale, judged_key, timed_key
from tests.support import golden_points
from tests.support.golden_points import CPU, PYTHON_TASK, Arm, Evaluation, Level, ModelPair, Settings

ROOT = Path(__file__).parents[3]
GOLDEN = json.loads((golden_points.FOLDER / "keys.json").read_text())
PARTS = {"pair": ModelPair(name="p"), "evaluation": Evaluation(task="t"), "settings": Settings(), "seed": 0}
PRINTS = {"weights": "w", "examples": "e"}


def test_golden_keys_equal_those_of_points_and_of_their_old_records():
    assert golden_points.keys() == golden_points.migrated_keys() == GOLDEN
    assert len({keys["key"] for keys in GOLDEN.values()}) == len(GOLDEN)


def _version(python: str) -> tuple[int, ...]:
    """Returns an interpreter's version; empty if it does not run."""
    try:
        command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(map(int, run.stdout.split()))


def _other_pythons() -> dict[tuple[int, ...], str]:
    """Returns version -> path of every other installed Python that the package supports."""
    by_name = [shutil.which(f"python3.{minor}") for minor in range(11, 20)]
    installed = map(str, Path("~/.pyenv/versions").expanduser().glob("*/bin/python3"))
    versions = {_version(path): path for path in (*filter(None, by_name), *installed)}
    return {version: path for version, path in versions.items() if (3, 11) <= version != sys.version_info[:2]}


def test_every_python_computes_the_golden_keys_without_any_package_installed():
    pythons = _other_pythons()
    if not pythons:
        pytest.skip("there is no other Python from 3.11 up, neither on PATH nor of pyenv")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support import golden_points as g; g.main()"
    for version, path in pythons.items():
        run = subprocess.run([path, "-I", "-S", "-c", code], capture_output=True, text=True, check=True, timeout=120)
        assert json.loads(run.stdout) == [GOLDEN, GOLDEN], version


def _key(**parts: Any) -> str:
    return judged_key(PARTS | parts, PRINTS)


def _class(name: str, *fields: tuple[str, Any], module: str = "elsewhere") -> Any:
    """Returns a dataclass with fields `(name, default)`, or `(name, dataclasses.field())`."""
    specs = [(field, Any, default) for field, default in fields]
    return dataclasses.make_dataclass(name, specs, frozen=True, kw_only=True, namespace={"__module__": module})


def test_new_fields_moved_classes_and_changed_defaults_change_no_key():
    before = _class("Settings", ("method", "speculative"), ("alpha", None), ("drafters", ()))
    level = _class("Level", ("model", "m"), ("budget", 4))
    key = _key(settings=before(alpha=0.5, drafters=(level(budget=7),)))
    moved = _class("Level", ("budget", 4), ("new", "x"), ("model", "m"), module="speccascade_jax.other.place")
    keep = dataclasses.field(default=0.25, metadata={"omitted": None})
    aside = dataclasses.field(default=4, metadata={"beside": True})
    after = _class("Other", ("new", 1), ("drafters", ()), ("alpha", 0.9), ("tail", keep), ("keep", aside))
    settings = after(alpha=0.5, drafters=[moved(budget=7)], tail=None, keep=9)
    assert _key(settings=settings) == key
    assert _key(settings=after(alpha=0.5, drafters=(moved(budget=7),))) != key, "tail is 0.25 today, and was None"
    assert _key(settings=after(alpha=0.9, tail=None)) == _key(settings=before())


@pytest.mark.parametrize(("one", "other"), [
    (Settings(), Settings(method="speculative", drafters=("draft",), temperature=0.0, top_p=1)),
    (Settings(alpha=0.0), Settings(alpha=-0.0)),
    (Settings(alpha=2.0), Settings(alpha=2)),
    (Settings(drafters=["draft", "small"]), Settings(drafters=("draft", "small"))),
    (ModelPair(name="p", target=Path("a/b")), ModelPair(name="p", target="a/b")),
    (ModelPair(name="p", others={"a": "x", "b": "y"}), ModelPair(name="p", others={"b": "y", "a": "x"})),
    (Evaluation(task="t", keep_traces=0), Evaluation(task="t")),
    (Evaluation(task=PYTHON_TASK), Evaluation(task=dataclasses.replace(PYTHON_TASK, records=list, clean=str))),
    (Evaluation(task=PYTHON_TASK).task, {"name": "mine", "splits": ["test"], "shots": 2, "max_input_length": 300}),
])  # fmt: skip
def test_equal_settings_have_equal_keys(one, other):
    form = canonical({"part": one})["part"]
    assert form == canonical({"part": other})["part"]


DIFFERENT = [
    {}, {"alpha": 0.0}, {"alpha": 0.5}, {"temperature": 1.0}, {"block_size": "5"}, {"block_size": 5},
    {"block_size": True}, {"tree": (2, 1)}, {"tree": (1, 2)}, {"drafters": ()}, {"rule": "draft"}, {"stop": "draft"},
    {"drafters": (Level(model="draft", budget=4),)}, {"drafters": (Level(model="draft", budget=5),)},
    {"drafters": (Arm(drafter="draft"),)}, {"drafters": (Arm(drafter=Level(model="draft", budget=4)),)},
]  # fmt: skip


def test_different_settings_have_different_keys():
    keys = [_key(settings=Settings(**settings)) for settings in DIFFERENT]
    keys += [_key(seed=1), _key(evaluation=Evaluation(task="u")), _key(pair=ModelPair(name="q"))]
    tasks = PYTHON_TASK, dataclasses.replace(PYTHON_TASK, shots=3)
    keys += [_key(evaluation=Evaluation(task=task)) for task in tasks]
    keys += [judged_key(PARTS, PRINTS | {"weights": "x"}), judged_key(PARTS, PRINTS | {"head": "h"})]
    assert len(set(keys)) == len(keys)


def test_hardware_and_mesh_are_part_of_the_keys_of_timed_points_only():
    judged, timed = judged_key(PARTS, PRINTS), dict[str, str]()
    variants = {
        "as it is": {},
        "more trials": {"evaluation": Evaluation(task="t", latency_trials=5)},
        "more examples": {"evaluation": Evaluation(task="t", latency_examples=100)},
        "on a mesh": {"pair": ModelPair(name="p", mesh=(1, 2))},
        "with whole drafts": {"pair": ModelPair(name="p", mesh=(1, 2), draft_whole=True)},
    }
    for name, parts in variants.items():
        assert _key(**parts) == judged
        timed[name] = timed_key(judged, PARTS | parts, CPU)
    timed["on another processor"] = timed_key(judged, PARTS, CPU | {"processor": "other"})
    timed["of another point"] = timed_key(_key(seed=1), PARTS | {"seed": 1}, CPU)
    assert len({judged, *timed.values()}) == 1 + len(timed)
    assert timed_key(judged, canonical(PARTS), CPU) == timed["as it is"]


@pytest.mark.parametrize(("value", "message"), [
    (Settings(alpha=float("nan")), "nan cannot be part of a record's key: give a finite number"),
    (Settings(drafters=(Level(model="m", budget=1, alpha=-float("inf")),)), "-inf cannot be part of"),
    (Settings(stop=len), "cannot be part of a record's key: give text, numbers"),
    ({1: "x"}, "cannot be part of"),
    ({"a": {1, 2}}, "cannot be part of"),
    (Settings, "cannot be part of"),
    (b"bytes", "cannot be part of"),
])  # fmt: skip
def test_values_without_a_canonical_form_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        canonical(value)


@pytest.mark.parametrize(("provenance", "stale"), [
    ({"code": "a", "toolchain": {"python": "3.11", "jax": "1"}}, False),
    ({"code": "b", "toolchain": {"jax": "1", "python": "3.11"}}, True),
    ({"code": None, "toolchain": {"python": "3.11", "jax": "1"}}, True),
    ({"code": "b", "toolchain": {"python": "3.12", "jax": "1"}}, False),
    ({"code": "b", "toolchain": {"format": 2, "python": "3.11", "jax": "1"}}, False),
    (None, False),
])  # fmt: skip
def test_code_is_compared_under_one_toolchain_only(provenance, stale):
    record = {"key": "k"} | ({"provenance": provenance} if provenance else {})
    assert is_stale(record, "a", {"python": "3.11", "jax": "1"}) is stale


FORMS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
SETTINGS = st.builds(
    Settings,
    alpha=st.none() | st.floats(-2, 2) | st.integers(-2, 2),
    block_size=st.none() | st.integers(1, 3) | st.just("auto"),
    tree=st.none() | st.lists(st.integers(1, 2), max_size=2).map(tuple),
    drafters=st.lists(
        st.sampled_from(["draft", "small"])
        | st.builds(Level, model=st.just("draft"), budget=st.integers(4, 5))
        | st.builds(Arm, drafter=st.just("draft"), block_size=st.none() | st.integers(4, 5)),
        max_size=2,
    ).map(tuple),
)


@given(value=FORMS | SETTINGS)
def test_canonical_forms_are_plain_json_and_their_own_canonical_form(value):
    form = canonical(value)
    assert canonical(form) == form == json.loads(json.dumps(form))


@given(value=st.dictionaries(st.text(max_size=3), FORMS, max_size=4))
def test_the_order_of_names_does_not_matter(value):
    backwards = dict(reversed(value.items()))
    assert list(canonical(value)) == list(canonical(backwards)) and canonical(value) == canonical(backwards)


@given(one=FORMS | SETTINGS, other=FORMS | SETTINGS)
def test_keys_are_equal_if_and_only_if_canonical_forms_are(one, other):
    forms = [json.dumps(canonical(value), sort_keys=True) for value in (one, other)]
    assert (_key(settings=one) == _key(settings=other)) == (forms[0] == forms[1])


@given(one=SETTINGS, other=SETTINGS)
def test_settings_have_one_key_if_and_only_if_they_are_equal(one, other):
    assert (_key(settings=one) == _key(settings=other)) == (one == other)


def test_numpy_numbers_have_the_form_of_equal_python_numbers():
    part = Settings(alpha=np.float64(0.3), block_size=np.int32(5), temperature=np.float32(0.5))
    assert canonical(part) == canonical(Settings(alpha=0.3, block_size=5, temperature=0.5))
