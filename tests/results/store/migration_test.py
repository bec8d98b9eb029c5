"""Tests of stores of format 2: read, resumed and appended to under today's keys, and never rewritten."""

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccascade_jax.results.store import migration, outputs
from speccascade_jax.results.store.lines import to_line
from speccascade_jax.results.store.record import FORMAT
from speccascade_jax.results.store.record_key import canonical, is_stale
from speccascade_jax.results.store.result_store import ResultStore, check_format, fill, read_records
from tests.support import golden_points

OLD = golden_points.old_records()
KEYS = json.loads((golden_points.FOLDER / "keys.json").read_text())


@pytest.fixture
def path(tmp_path) -> Path:
    return Path(shutil.copy(golden_points.FOLDER / "format_2.jsonl", tmp_path / "old.jsonl"))


def test_an_old_store_is_read_under_todays_keys_and_stays_unchanged(path):
    before = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = read_records(path)
        with ResultStore(path) as store:
            assert store.records == records and store.damaged == []
    assert path.read_bytes() == before
    check_format(records, path)
    assert {record["former_key"]: record["key"] for record in records} == {old: KEYS[old]["key"] for old in KEYS}
    for record, old in zip(records, OLD, strict=True):
        same = set(old) - {"key", "format", "fingerprints"}
        assert {name: record[name] for name in same} == {name: old[name] for name in same}
        assert record["format"] == FORMAT and record["judged_key"] == KEYS[old["key"]]["judged_key"]
        assert record["fingerprints"] | {"code": record["provenance"]["code"]} == old["fingerprints"]
        assert not is_stale(record, "other", old["versions"])


def test_a_sweep_over_the_points_of_an_old_store_measures_nothing(path):
    keys = [keys["key"] for keys in golden_points.keys().values()]
    with ResultStore(path) as store:
        assert store.done_keys() == set(keys)
        assert fill(store, [keys], str, lambda missing: pytest.fail(f"{missing} was measured again")) == 0
        for key, record in zip(keys, store.records, strict=True):
            with pytest.raises(ValueError, match="already holds"):
                store.append({"key": key})
            assert store.judged(record["judged_key"]) is record
        store.append({"key": "f" * 32, "format": FORMAT, "point": {}})
    lines = path.read_bytes().splitlines()
    assert len(lines) == len(OLD) + 1 and [record["key"] for record in read_records(path)] == [*keys, "f" * 32]


def test_points_that_are_not_timed_have_their_judged_key():
    untimed = migration.migrated(OLD[1] | {"point": OLD[1]["point"] | {"timed": False}})
    timed = migration.migrated(OLD[1])
    assert untimed["key"] == untimed["judged_key"] == timed["judged_key"] != timed["key"]


def test_migration_is_idempotent_and_changes_no_argument():
    for old in OLD:
        before = json.dumps(old)
        record = migration.migrated(old)
        assert json.dumps(old) == before
        assert migration.migrated(record) == record == migration.migrated(json.loads(before))


def test_only_the_hardware_in_the_old_key_is_in_the_new_one():
    old = OLD[0]
    key = migration.migrated(old)["key"]
    for name, value in {"count": 9, "system": "other"}.items():
        assert migration.migrated(old | {"device": old["device"] | {name: value}})["key"] == key
    for name, value in {"cpus": 64, "processor": "other", "products": "xla", "kind": "TPU"}.items():
        record = migration.migrated(old | {"device": old["device"] | {name: value}})
        assert record["key"] != key and record["judged_key"] == KEYS[old["key"]]["judged_key"]
    on_a_mesh = old | {"configuration": old["configuration"].replace("mesh = (1, 1, )", "mesh = (1, 2, )")}
    # a program on a mesh used XLA's products on every device
    devices = [old["device"] | {"products": has} for has in ("own", "xla")]
    keys = {migration.migrated(on_a_mesh | {"device": device})["key"] for device in devices}
    assert len(keys) == 1 and key not in keys


@pytest.mark.parametrize("number", [None, 1, 4, "2"])
def test_records_of_other_formats_are_refused(tmp_path, number):
    path = tmp_path / "other.jsonl"
    path.write_text(to_line(OLD[0] | {"format": number}))
    with pytest.raises(ValueError, match=f"holds records of format {number}; this version reads and writes {FORMAT}: "):
        check_format(read_records(path), path)
    no_point = {"key": "k", "format": 2, "question": "of no point"}
    assert migration.migrated(no_point) is no_point


TEXTS = st.text(max_size=8) | st.text(alphabet="'\"\\@()/#,\n{}ä = ", max_size=8)


@given(name=TEXTS, others=st.dictionaries(TEXTS, TEXTS, max_size=2), alpha=st.floats(-1e9, 1e9))
def test_any_text_and_number_of_a_configuration_is_read_as_it_was_written(name, others, alpha):
    configuration = OLD[1]["configuration"].replace("name = 'tatoeba_en_de'", f"name = {name!r}")
    configuration = configuration.replace("others = {}", f"others = {others}")
    configuration = configuration.replace("alpha = 0.3", f"alpha = {alpha}")
    parts = migration.parts_of(configuration)
    assert parts["pair"] == canonical(golden_points.ModelPair(name=name, others=others))
    assert parts["settings"]["alpha"] == alpha


def _broken(text: str, by: str) -> dict:
    return OLD[0] | {"configuration": re.sub(text, by, OLD[0]["configuration"], flags=re.DOTALL)}


@pytest.mark.parametrize("record", [
    _broken(".*", ""),
    _broken("experiment.run:.*", ""),
    _broken("seed = 0", "seed = None.real"),
    _broken("temperature = 0.0", "temperature = nan"),
    _broken("temperature = 0.0", "temperature = 1e999"),
    _broken(r"@points.Method\(\)", "@points.Methods()"),
    _broken(r"\('draft', \)", "(@drafters0_/points.Level(), )"),
    _broken("tiny_translation'", "tiny_translation"),
    _broken("seed = 0", "seed = " + "(" * 9000),
    {name: value for name, value in OLD[0].items() if name != "configuration"},
    {name: value for name, value in OLD[0].items() if name != "device"},
    OLD[0] | {"configuration": 3},
    OLD[0] | {"point": []},
    OLD[0] | {"fingerprints": "none"},
])  # fmt: skip
def test_a_record_without_a_readable_point_keeps_its_key_and_is_read(tmp_path, record):
    path = tmp_path / "broken.jsonl"
    path.write_text(to_line(record))
    (read,) = read_records(path)
    assert read["format"] == FORMAT and read["former_key"] == OLD[0]["key"]
    assert read["key"] == OLD[0]["key"] or record["fingerprints"] == "none"


def test_the_later_of_two_old_records_of_a_point_is_read_and_none_is_damaged(tmp_path):
    """Checks two records whose keys differed in format 2 because the code of a rule was part of the key."""
    path, first = tmp_path / "twice.jsonl", OLD[0]
    later = first | {"key": "e" * 32, "fingerprints": first["fingerprints"] | {"code": "changed"}, "started": "later"}
    path.write_text("".join(map(to_line, (first, OLD[1], later))))
    content = path.read_bytes()
    with ResultStore(path) as store:
        assert store.damaged == [] and [record["started"] for record in store.records] == ["later", OLD[1]["started"]]
        assert store.records[0]["provenance"]["code"] == "changed"
    assert path.read_bytes() == content
    path.write_text("".join(map(to_line, (first, first))))
    with pytest.warns(UserWarning, match=r"line 2 \(the same key as line 1\)"):
        assert len(read_records(path)) == 1


def _output(text: str) -> outputs.Output:
    return outputs.Output(id=1, prompt="p", reference="r", output=text, tokens=(3,), pieces=(text,))


def test_outputs_under_a_former_key_are_read_kept_and_adopted(path, tmp_path):
    former = _output("of before")
    outputs.write(path, OLD[0], [former])
    record = read_records(path)[0]
    assert outputs.kept(path, record) and outputs.read(path, record) == [former]
    assert not outputs.kept(path, read_records(path)[1])
    with ResultStore(tmp_path / "new.jsonl") as store:
        assert store.take_over([record["key"]], [path]) == 1
    copy = read_records(tmp_path / "new.jsonl")[0]
    assert copy == record and outputs.read(tmp_path / "new.jsonl", copy) == [former]
    outputs.write(path, record, [_output("of today")])
    assert outputs.read(path, record) == [_output("of today")]


def test_outputs_of_a_superseded_record_are_not_those_of_its_successor(tmp_path):
    record = {"key": "k", "fingerprints": {"examples": "e"}, "provenance": {"code": "a"}}
    with ResultStore(tmp_path / "a.jsonl") as store:
        store.append(record | {outputs.ENTRY: [_output("a")]})
        store.append(record | {"provenance": {"code": "b"}, "supersedes": "a", outputs.ENTRY: [_output("b")]})
        assert outputs.read(store.path, store.records[0]) == [_output("b")]
    with ResultStore(tmp_path / "b.jsonl") as second:
        second.append(record | {outputs.ENTRY: [_output("a")]})
        former = second.records[0]
        assert second.take_over(["k"], [store.path]) == 1
        assert outputs.read(second.path, second.records[0]) == [_output("b")]
        assert outputs.read(second.path, former) == [_output("a")], "as a kill before the new record would leave it"
        second.append(record | {"provenance": {"code": "c"}, "supersedes": "b"})
        assert not outputs.kept(second.path, second.records[0])
