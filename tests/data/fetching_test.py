"""Tests of fetching public data sets: derived files, recorded checksums, and refusals; from servers on this machine."""

import gzip
import io
import json
import zipfile

import pytest

from experiments import fetch_data
from speccascade_jax.data import directory, public_sources
from speccascade_jax.data.public_sources import DATA_SETS
from speccascade_jax.data.tasks import hub_data, table
from speccascade_jax.storage import hub
from tests.support.hub_server import serving

BENCH, GSM8K = public_sources._BENCH, f"{public_sources._GSM8K}/test.jsonl"


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def zipped(name, text):
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        archive.writestr(name, text)
    return buffer.getvalue()


def read(path):
    content = path.read_bytes()
    text = gzip.decompress(content) if path.suffix == ".gz" else content
    return [json.loads(line) for line in text.decode().splitlines()]


QUESTIONS = [{"question": f"Who is {n}", "answer": f"#### {n}"} for n in range(6)]
# the second question of the category belongs to the other half, so 0 leaves and 3 joins
TURNS = [{"category": "qa", "turns": [f"Who is {n}?"]} for n in (3, 0)] + [{"category": "x", "turns": ["Hi."]}]


@pytest.fixture
def github(tmp_path, monkeypatch):
    """Yields the files that a mirror of GitHub has, by path, and a function that runs the command."""
    monkeypatch.setenv(directory.VARIABLE, str(tmp_path / "data"))
    files = {BENCH: lines(TURNS), GSM8K: lines(QUESTIONS)}
    with serving() as server:

        def answer(path, token):
            content = files.get(path.lstrip("/"))
            return (404, b"", {}) if content is None else (200, content, {})

        monkeypatch.setattr(server, "answer", answer)
        files["asked"] = server.asked
        yield files, lambda *names: fetch_data.main([*names, "--github", server.url])


def test_every_file_of_the_few_shot_tasks_has_a_source(tmp_path, monkeypatch):
    """TriviaQA's test split has no answers, so it has no source."""
    (tmp_path / "empty.jsonl").touch()
    wanted = set[str]()
    monkeypatch.setattr(directory, "require", lambda *parts: wanted.add("/".join(parts)) or tmp_path / "empty.jsonl")
    for task in table.FEW_SHOT:
        for split in task.splits:
            assert not list(task.stream(split))
    wanted = {name.replace(".json", ".jsonl") if name.endswith(".json") else name for name in wanted}
    known = {f"{name}/{file.name}" for name, (_, files) in DATA_SETS.items() for file in files}
    assert wanted - known == {"triviaqa/test.jsonl"} and known - wanted == {"spec_bench/dev_half.jsonl"}


def test_halves_follow_those_of_spec_bench(github, tmp_path, capsys):
    files, run = github
    files[f"{public_sources._GSM8K}/train.jsonl"] = lines(QUESTIONS)
    files[f"{public_sources._NQ}.dev.jsonl"] = lines(QUESTIONS)
    files[f"{public_sources._NQ}.efficientqa.dev.1.1.jsonl"] = lines(QUESTIONS[:1])
    assert run("gsm8k", "nq_open", "spec_bench") == 0
    data = tmp_path / "data"
    assert read(data / "gsm8k/test_dev_half.jsonl") == [{"id": n, **QUESTIONS[n]} for n in (2, 3, 4)]
    assert read(data / "nq_open/dev_half.jsonl") == [QUESTIONS[n] for n in (2, 3, 4)]
    assert read(data / "gsm8k/train.jsonl.gz") == QUESTIONS
    assert read(data / "spec_bench/dev_half.jsonl") == [TURNS[0], TURNS[2]]
    assert len([path for path in files["asked"] if path.endswith(BENCH)]) == 1
    assert "gsm8k/test_dev_half.jsonl: 3 rows, sha256 " in capsys.readouterr().out


def test_every_form_of_a_source_is_read(github, tmp_path):
    files, run = github
    article = {"article": "###\nArticle: Much.\n\nSummarize the above article in 1 sentence.\n", "summary_gt": "M."}
    entry = {"id": "a", "question": "q", "is_impossible": False, "answers": [{"text": "b"}, {"text": "a"}] * 2}
    squad = [{"title": str(n), "paragraphs": [{"context": "c", "qas": [entry]}]} for n in range(3)]
    files |= {
        public_sources._HUMANEVAL: gzip.compress(lines({"task_id": f"HumanEval/{n}"} for n in range(3))),
        public_sources._SQUAD: json.dumps({"data": squad}).encode(),
        public_sources._XSUM: lines([article] * 3),
        public_sources._CNN: zipped("train_sample.csv", ',id,article,highlights\r\n0,x,"a\nb",h\r\n'),
        public_sources._DIALOGSUM: lines([{"fname": "dev_0"}]),
        public_sources._DIALOGSUM_TRAIN: zipped("DialogSum_Data/dialogsum.train.jsonl", "{'fname': 'it\\'s'}\n"),
        public_sources._WMT.format("sources", "src.en"): "".join(f"en {n}\u2028\n" for n in range(101)).encode(),
        public_sources._WMT.format("references", "ref.A.de"): "".join(f"de {n}\n" for n in range(101)).encode(),
        **{f"{public_sources._WEB}/{part}.json": b'[{"qId": 1}, {"qId": 2}, {"qId": 3}]'
           for part in ("test", "val", "devtest", "trainmodel")},
    }  # fmt: skip
    names = ("humaneval", "squad2", "xsum_1000", "cnn_dailymail_100", "dialogsum", "wmt22_en_de", "webquestions")
    assert run(*names) == 0
    data = tmp_path / "data"
    assert [row["task_id"][-1] for row in read(data / "humaneval/dev_half.jsonl")] == ["0", "2"]
    squads = read(data / "squad2/dev_articles_even.jsonl.gz")
    assert [(row["title"], row["answers"]) for row in squads] == [("0", ["a", "b"]), ("2", ["a", "b"])]
    xsum = [{"id": n, "document": "Much.", "summary": "M."} for n in (0, 2)]
    assert read(data / "xsum_1000/dev_half.jsonl") == xsum
    cnn = [{"id": "x", "document": "a\nb", "summary": "h"}]
    assert read(data / "cnn_dailymail_100/train_sample.jsonl") == cnn
    assert read(data / "dialogsum/train.jsonl.gz") == [{"fname": "it's"}]
    assert [row["qId"] for row in read(data / "webquestions/test_dev_half.jsonl")] == [1, 3]
    rows = [json.loads(line) for line in (data / "wmt22_en_de/dev_half.jsonl").read_text().split("\n") if line]
    assert [row["id"] for row in rows] == [*range(50), 100] and rows[50]["de_refA"] == "de 100"
    assert rows[0]["en"] == "en 0\u2028"


def test_checksums_are_recorded_once_and_enforced(github, tmp_path, capsys):
    files, run = github
    data = tmp_path / "data"
    file, record = data / "spec_bench/dev_half.jsonl", data / directory.RECORD
    assert run("spec_bench") == 0
    first, content = json.loads(record.read_bytes())["sha256"]["spec_bench/dev_half.jsonl"], file.read_bytes()
    files["asked"].clear()
    assert run("spec_bench") == 0 and "dev_half.jsonl: unchanged" in capsys.readouterr().out and not files["asked"]
    file.write_bytes(content + b"\n")
    now = directory.checksum(content + b"\n")
    said = f"has changed: its sha256 is {now}, but {first} was recorded: delete it and run  python -m experiments."
    assert run("spec_bench") == 1 and said in capsys.readouterr().err
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        directory.require("spec_bench", "dev_half.jsonl")
    file.unlink()
    files[BENCH] = lines(TURNS[1:])
    assert run("spec_bench") == 1
    said = capsys.readouterr().err
    assert f"but {first} was recorded: to accept them, delete the entry in" in said and said.count("error") == 1
    assert not file.exists() and json.loads(record.read_bytes())["sha256"]["spec_bench/dev_half.jsonl"] == first
    record.unlink()
    assert run("spec_bench") == 0 and read(file) == [TURNS[1], TURNS[2]]


def test_compressed_files_are_compared_unpacked(github, tmp_path):
    """Two versions of zlib may pack the same rows into other bytes; a damaged file is another one in any case."""
    files, run = github
    files[f"{public_sources._GSM8K}/train.jsonl"] = lines(QUESTIONS)
    assert run("gsm8k") == 0
    file = tmp_path / "data/gsm8k/train.jsonl.gz"
    file.write_bytes(gzip.compress(gzip.decompress(file.read_bytes()), 1, mtime=5))
    assert directory.require("gsm8k", "train.jsonl.gz") == file and run("gsm8k") == 0
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match="has changed"):
        directory.require("gsm8k", "train.jsonl.gz")


def test_files_of_others_are_kept(github, tmp_path, capsys):
    files, run = github
    file = tmp_path / "data/spec_bench/dev_half.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    assert run("spec_bench") == 0 and "kept as it is: this command did not make it" in capsys.readouterr().out
    assert file.read_text() == "mine" and not (tmp_path / "data" / directory.RECORD).exists()


def test_an_interrupted_run_continues(github, tmp_path, monkeypatch, capsys):
    """The first run is killed between the record and the file, and the second one lacks a source."""
    files, run = github
    from speccascade_jax.data import fetching

    real, data, writes = fetching.write_atomically, tmp_path / "data", []

    def killed(path, content):
        writes.append(path)
        if len(writes) == 2:
            raise KeyboardInterrupt
        real(path, content)

    monkeypatch.setattr(fetching, "write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        run("gsm8k")
    monkeypatch.setattr(fetching, "write_atomically", real)
    assert run("gsm8k") == 1
    said = capsys.readouterr().err
    assert "train.jsonl cannot be fetched (HTTP Error 404" in said and "--to FOLDER on another machine" in said
    assert [path.name for path in (data / "gsm8k").iterdir()] == ["test_dev_half.jsonl"]
    files[f"{public_sources._GSM8K}/train.jsonl"] = lines(QUESTIONS)
    files["asked"].clear()
    assert run("gsm8k") == 0 and len(files["asked"]) == 1
    assert json.loads((data / directory.RECORD).read_bytes())["sha256"].keys() == {
        "gsm8k/test_dev_half.jsonl", "gsm8k/train.jsonl.gz",
    }  # fmt: skip


@pytest.mark.parametrize("content", [b"<html>", b'{"category": "qa"}', b"\n", b"\xff", b"{'a': f()}"])
def test_other_content_than_the_published_one_is_refused(github, tmp_path, content, capsys):
    files, run = github
    files[BENCH] = content
    assert run("gsm8k" if content != b"\n" else "spec_bench") == 1
    said = capsys.readouterr().err
    assert "is not in its published form (" in said and said.count("error:") == 1
    assert not list((tmp_path / "data").glob("*/*")) and not (tmp_path / "data" / directory.RECORD).exists()


@pytest.mark.parametrize(("name", "content"), [
    ("webquestions", b"[1, 2]"), ("dialogsum", b"404\n"), ("spec_bench", b'{"category": "\\ud800"}'),
    ("gsm8k", b'{"question": 5}'),
])  # fmt: skip
def test_values_that_are_no_rows_are_refused(github, tmp_path, name, content, capsys):
    files, run = github
    source = DATA_SETS[name][1][0].sources[0]
    files[source] = content
    assert run(name) == 1
    assert f"error: {source} is not in its published form (" in capsys.readouterr().err
    assert not list((tmp_path / "data").rglob("*"))


def test_folders_that_stand_for_nothing_are_refused(github, tmp_path, capsys):
    _, run = github
    (folder := tmp_path / "data/spec_bench/dev_half.jsonl").mkdir(parents=True)
    assert run("spec_bench") == 1 and f"error: {folder} is a folder, but" in capsys.readouterr().err
    assert run("spec_bench", "--to", "") == 1 and "error: --to is empty: give a folder" in capsys.readouterr().err


def test_refusals_are_one_line(github, tmp_path, capsys):
    assert fetch_data.main(["gsm8", "--to", str(tmp_path)]) == 1
    assert "did you mean gsm8k, dialogsum? 'gsm8' is no data set: give some of spec_bench" in capsys.readouterr().err
    for address, reason in (("http://127.0.0.1:9", "refused"), ("nowhere", "unknown url type")):
        assert fetch_data.main(["spec_bench", "--github", address]) == 1
        assert f"error: {address}/{BENCH} cannot be fetched (" in (said := capsys.readouterr().err) and reason in said
    assert fetch_data.main(["--list"]) == 0
    assert "gsm8k (licence: MIT)" in capsys.readouterr().out


def test_sets_on_the_hub_are_pinned_to_the_commit_of_the_first_fetch(empty_hub, tmp_path, monkeypatch, capsys):
    pytest.importorskip("huggingface_hub", reason="needs pip install 'speccascade_jax[hub]'")
    from tests.data.tasks.hub_data_test import parquet

    question = {"question": "q", "choices": ["1", "2", "3", "4"], "answer": 3}
    subjects = ("b", "b", "a")
    answer = {"value": "A", "aliases": ["a"], "normalized_aliases": ["a"], "type": "x"}
    choice = {"id": "1", "question": "q", "choices": {"label": ["A"], "text": ["t"]}, "answerKey": "A"}
    mmlu = {f"all/{split}-00000-of-00001.parquet": parquet([question | {"subject": s} for s in subjects])
            for split in ("test", "validation", "dev")}  # fmt: skip
    commit = empty_hub.upload("datasets/cais/mmlu", mmlu)
    trivia = {f"unfiltered.nocontext/{split}/0000.parquet": parquet([{"question": "q", "answer": answer}] * 2)
              for split in ("validation", "train")}  # fmt: skip
    empty_hub.upload("datasets/mandarjoshi/trivia_qa", trivia, branch=hub_data.COPY)
    empty_hub.upload("datasets/tau/commonsense_qa", {"data/validation-0.parquet": parquet([choice] * 3)})
    names, data = ["mmlu", "triviaqa", "commonsenseqa"], tmp_path / "data"
    assert fetch_data.main([*names, "--to", str(data)]) == 0
    assert [row["subject"] for row in read(data / "mmlu/val.jsonl")] == ["a", "b", "b"]
    assert [(row["subject"], row["answer"]) for row in read(data / "mmlu/test_dev_half.jsonl.gz")] == [
        ("a", "D"),
        ("b", "D"),
    ]
    assert read(data / "commonsenseqa/dev_half.jsonl") == [choice] * 2
    monkeypatch.setenv(directory.VARIABLE, str(data))
    assert [record.reference for record in table.trivia_records("train")] == [("A", "a")] * 2
    record = json.loads((data / directory.RECORD).read_bytes())
    assert record["revisions"]["hf:cais/mmlu:all#dev"] == commit
    empty_hub.upload("datasets/cais/mmlu", {name: parquet([question | {"subject": "c"}]) for name in mmlu})
    hub._COMMITS.clear()
    (data / "mmlu/dev.jsonl").unlink()
    assert fetch_data.main(["mmlu", "--to", str(data)]) == 0 and len(read(data / "mmlu/dev.jsonl")) == 3
    capsys.readouterr()
    assert fetch_data.main(["mbpp", "--to", str(data)]) == 1
    said = capsys.readouterr().err
    assert "knows no such dataset" in said and said.count("error:") == 1
