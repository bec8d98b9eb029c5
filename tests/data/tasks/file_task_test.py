"""Tests of tasks from a user's own files: every format, few-shot pools, lengths, errors that name line and remedy."""

import gzip
import json
import sys
import types

import pytest

from speccascade_jax.data.tasks.file_task import FileTask, is_file
from speccascade_jax.data.tasks.table import get_task

ROWS = [("Hello, you.", "Hallo, du."), ('He said "no".', 'Er sagte "nein".'), ("Two\nlines.", "Zwei\nZeilen.")]


def quoted(text):
    return '"' + text.replace('"', '""') + '"'


def write(folder, form):
    """Writes the rows as a file of a format; formats without quotes get no row with a line break."""
    path = folder / f"mine{form}"
    if "jsonl" in form:
        text = "".join(json.dumps({"source": s, "reference": r, "number": n}) + "\n" for n, (s, r) in enumerate(ROWS))
    elif "csv" in form:
        lines = (f"{quoted(s)},{quoted(r)},{n}\r\n" for n, (s, r) in enumerate(ROWS))
        text = "".join(["source,reference,number\r\n", *lines])
    else:
        text = "source\treference\tnumber\n" + "".join(f"{s}\t{r}\t{n}\n" for n, (s, r) in enumerate(ROWS[:2]))
    path.write_bytes(gzip.compress(text.encode()) if form.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("form", [".csv", ".tsv", ".jsonl", ".csv.gz", ".tsv.gz", ".jsonl.gz"])
def test_every_file_format_is_read_and_the_task_is_named_by_its_path(tmp_path, form):
    path = write(tmp_path, form)
    assert is_file(str(path))
    task = get_task(str(path))
    assert isinstance(task, FileTask) and task.name == "mine" and task.splits == ("all",)
    pairs = [(example.source, example.reference) for example in task.load()]
    assert pairs == ROWS[: len(pairs)] and len(pairs) == (2 if "tsv" in form else 3)


def test_columns_templates_and_byte_order_marks_are_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("\ufeffquestion,topic,answer\nHow many?,sums,4\n".encode())
    task = FileTask(path=path, source="question", reference="answer", template="{topic}: {source} {{now}}")
    (example,) = task.load()
    assert task.build_prompt(example) == "sums: How many? {now}" and example.reference == "4"


def test_json_lines_may_have_a_mark_and_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        '\ufeff{"source": "a\u2028b", "reference": "c"}\r\n\n \n{"source": "d", "reference": "e"}\n\n'.encode()
    )
    examples = FileTask(path=path).load()
    assert [(e.id, e.source, e.reference) for e in examples] == [(0, "a\u2028b", "c"), (1, "d", "e")]


@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.csv", "source,reference\na,b\n".encode("utf-16"), "a.csv:1 is UTF-16: convert the file to UTF-8"),
    ("a.csv", "source,reference\nMünchen,b\n".encode("latin-1"), "a.csv:2 is not UTF-8 .*: convert the file to UTF-8"),
    ("a.json", b"[]", r"a.json is neither .*: write one object per line \(jq"),
    ("a.parquet", b"PAR1", r"a.parquet is neither .*: write it as lines \(pandas"),
])  # fmt: skip
def test_other_formats_and_encodings_are_named(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        FileTask(path=tmp_path / name).load()


def test_columns_of_files_without_a_header_are_numbered(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("eins\tone\nzwei\ttwo\n")
    task = FileTask(path=path, source=1, reference=0)
    assert [(example.source, example.reference) for example in task.load()] == [("one", "eins"), ("two", "zwei")]
    (first, _) = FileTask(path=path, source=1, reference=0, template="{c0}: {source}").load()
    assert first.source == "eins: one"


def test_a_field_may_hold_several_references_but_not_none(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"source": "a", "reference": ["b", "c"]}) + "\n")
    (example,) = get_task(str(path)).load()
    assert example.reference == ("b", "c")
    nan = {"source": "a", "reference": float("nan")}
    for row in ({"source": None, "reference": "b"}, {"source": "a", "reference": []}, nan):
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(ValueError, match=r"a.jsonl, row 0 has no source or no reference"):
            get_task(str(path)).load()


def test_exemplars_precede_the_question_and_are_not_evaluated(tmp_path):
    pool, path = tmp_path / "pool.csv", tmp_path / "a.csv"
    pool.write_text("source,reference\n1+1,2\n2+2,4\n3+3,6\n")
    path.write_text("source,reference\n2+2,4\n5+5,10\n")
    task = FileTask(path=path, pool=str(pool), shots=2, template="Q: {source}\nA:", stop_strings=("\n",))
    (example,) = task.load()
    assert task.build_prompt(example) == "Q: 1+1\nA: 2\n\nQ: 2+2\nA: 4\n\nQ: 5+5\nA:"
    assert task.postprocess(" 10 \nQ: more") == "10"
    assert task.cut([1, 2, 3], 2) == [2, 3] and get_task(str(path)).cut([1, 2, 3], 2) == [1, 2]


def test_shuffled_files_keep_their_ids(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("source,reference\n" + "".join(f"s{n},r{n}\n" for n in range(50)))
    plain, mixed = FileTask(path=path).load(), FileTask(path=path, shuffle=True).load()
    assert [example.id for example in plain] != [example.id for example in mixed]
    assert sorted(mixed, key=lambda example: example.id) == plain
    assert mixed == FileTask(path=path, shuffle=True).load()


def test_held_out_rows_are_few_disjoint_and_independent_of_the_order(tmp_path):
    path, rows = tmp_path / "a.csv", [f"s{n % 40},r{n}\n" for n in range(60)]
    splits = []
    for lines in (rows, rows[::-1]):
        path.write_text("source,reference\n" + "".join(lines))
        task = FileTask(path=path, held_out=0.2)
        assert task.splits == ("validation", "train") and len(task.load("train")) + len(task.load()) == 60
        splits.append([{example.source for example in task.load(split)} for split in task.splits])
    assert splits[0] == splits[1] and not splits[0][0] & splits[0][1]
    assert 60 * 0.2 <= len(task.load()) <= 60 * 0.2 + 1
    path.write_text("source,reference\na,b\nc,d\n")
    tiny = FileTask(path=path, held_out=0.01, answer=" = {answer}")
    assert len(tiny.load("validation")) == len(tiny.load("train")) == 1
    assert [tiny.build_answer(example) for example in FileTask(path=path).load()] == [" = b", " = d"]


@pytest.mark.parametrize(("text", "more", "said"), [
    ("text,label\na,b\n", {}, r"row 0 has no column 'source'.*text, label.*source and reference"),
    ("source;reference\na;b\n", {}, r"one column, 'source;reference', because it has semicolons.*or with tabs"),
    ("source,reference\na\n", {}, r"a.csv:2 has 1 columns, but the first line has 2"),
    ('source,reference\n"a,b\n', {}, r"a.csv:2 is not valid .csv"),
    ("source,reference\na,b\n", {"template": "{other}"}, r"'\{other\}' cannot be filled .*the columns are source"),
    ("source,reference\n ,b\n", {}, r"row 0 gives an empty prompt"),
    ("source,reference\na,\n", {}, r"row 0 has no source or no reference: remove the row"),
    ("source,reference,source\na,b,c\n", {}, r"a.csv:1: 'source' is the name of 2 columns, and only one"),
    ("source,reference\na,b\n", {"template": "Say:"}, r"template='Say:' names no column.*write \{source\} where"),
    ("source,reference\na,b\n", {"shots": 1, "pool": "a.csv", "answer": " yes"}, r"answer=' yes' .*write \{answer\}"),
    ("source,reference\na,b\n", {"source": 0}, r"source=0 and reference='reference' do not match: give two names"),
    ("source,reference\na,b\n", {"shots": 2}, r"shots=2 .*set pool"),
    ("source,reference\na,b\n", {"too_long": "drop"}, r"too_long='drop' is unknown"),
    ("source,reference\na,b\n", {"max_input_length": 0}, r"max_input_length=0"),
    ("source,reference\na,b\n", {"metrics": "bleu"}, r"metrics"),
    ("source,reference\na,b\n", {"held_out": 1.0}, r"held_out=1.0 is not a share: give a number from 0 up to 1"),
])  # fmt: skip
def test_wrong_files_and_settings_raise_errors_that_name_them(tmp_path, text, more, said):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        FileTask(path=path, **more).load()


@pytest.mark.parametrize(("row", "said"), [
    ('{"source": "a", "reference": "b", "source": "c"}', r"a.jsonl:1 is damaged .*'source' is the name of 2 columns"),
    (r'{"source": "a\ud83d", "reference": "b"}', r"row 0: the source holds '\\ud83d' at character 1, half of a surro"),
    (r'{"source": "a", "reference": ["b", "\udc00"]}', r"row 0: the reference holds '\\udc00' at character 0"),
    ('{"source": "a", "reference": ["", " "]}', r"row 0 has no source or no reference"),
    ('{"source": "a", "reference": NaN}', r"row 0 has no source or no reference"),
    ('{"source": ["a", "b"], "reference": "c"}', r"row 0: the source is a list, not a text"),
])  # fmt: skip
def test_rows_that_would_be_misread_are_refused(tmp_path, row, said):
    (tmp_path / "a.jsonl").write_text(row + "\n")
    with pytest.raises(ValueError, match=said):
        get_task(str(tmp_path / "a.jsonl")).load()


def test_columns_without_a_name_may_repeat(tmp_path):
    (tmp_path / "a.csv").write_text("source,reference,,\na,b,,\n")
    assert len(get_task(str(tmp_path / "a.csv")).load()) == 1


def test_objects_may_follow_a_byte_order_mark_and_precede_empty_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('\ufeff{"source": "a", "reference": "b"}\n\n', encoding="utf-8")
    assert [example.source for example in get_task(str(tmp_path / "a.jsonl")).load()] == ["a"]


def test_missing_and_unsupported_files_are_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.csv does not exist, neither here nor in"):
        get_task(str(tmp_path / "nowhere.csv")).load()
    (tmp_path / "a.xlsx").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"a.xlsx is neither a file that ends in .tsv, .csv, .jsonl"):
        FileTask(path=tmp_path / "a.xlsx").load()
    with pytest.raises(ValueError, match=r"for your own file give a path that ends in"):
        get_task("no_such_task")


@pytest.mark.parametrize(("name", "message"), [
    ("mine.cvs", "task 'mine.cvs': file mine.cvs does not exist, .*: did you mean mine.csv?"),
    ("./mine.CSV", "did you mean mine.csv?"), ("~/no/mine.tvs", "files end in .tsv, .csv, .jsonl .or these with .gz"),
    ("mien.csv", "file mien.csv does not exist, .*: did you mean mine.csv?"),
    ("data/mine.txt", "file data/mine.txt does not exist, .* are hf:owner/name"),
    ("other.json", "other.json is neither a file that ends in .*: write one object per line"),
    ("my_task.SMALL", "task 'my_task.SMALL': there is no module 'my_task'"),
    ("statistics.cvs", "task 'statistics.cvs': module 'statistics' has no 'cvs'"),
])  # fmt: skip
def test_a_misspelt_file_is_named_with_the_nearest_one(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text("source,reference\na,b\n")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises((FileNotFoundError, ValueError), match=message) as raised:
        get_task(name).load()
    assert "\n" not in str(raised.value)


def test_folders_saved_by_datasets_are_read(tmp_path, monkeypatch):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    rows = {"train": [{"source": "a", "reference": "b"}], "test": [{"source": "c", "reference": "d"}]}
    fake = types.SimpleNamespace(load_from_disk=lambda path: rows)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    shown = FileTask(path=tmp_path, pool=str(tmp_path), shots=1).load("test")
    assert [example.source for example in shown] == ["a b\n\nc"]  # the exemplar is the first row of the first split
    task = FileTask(path=tmp_path)
    assert task.splits == ("train", "test")
    with pytest.raises(ValueError, match="has the splits train, test: set held_out to 0"):
        FileTask(path=str(tmp_path), held_out=0.1)
    assert [example.source for example in task.load("test")] == ["c"]
    assert get_task(str(tmp_path)) == FileTask(path=str(tmp_path))
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="unknown task .*for a data set saved by datasets its folder './folder'"):
        get_task(str(tmp_path / "other"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        task.load("test")
