"""Tests of tasks by the names of data sets on the hub, against a server on this machine."""

import io
import sys

import pytest

from speccascade_jax.data.tasks import hub_data
from speccascade_jax.data.tasks.file_task import FileTask
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.evaluation import session
from speccascade_jax.storage import hub
from tests.support import text_pair
from tests.support.hub_server import on_the_hub

pytest.importorskip("huggingface_hub", reason="needs pip install 'speccascade_jax[hub]'")

XSUM = "datasets/EdinburghNLP/xsum"
ARTICLES = [{"document": f"Article {n} says much.", "summary": f"Much {n}.", "id": str(n)} for n in range(4)]


def parquet(rows):
    arrow = pytest.importorskip("pyarrow", reason="needs pip install 'speccascade_jax[hub]'")
    import pyarrow.parquet as files

    files.write_table(arrow.Table.from_pylist(rows), buffer := io.BytesIO())
    return buffer.getvalue()


def test_the_columns_of_a_known_data_set_are_known(empty_hub):
    halves = {f"data/test-{n:05}-of-00002.parquet": parquet(ARTICLES[2 * n : 2 * n + 2]) for n in range(2)}
    commit = empty_hub.upload(XSUM, {**halves, "data/train-00000-of-00001.parquet": b"large", "README.md": b""})
    task = get_task("hf:EdinburghNLP/xsum")
    assert (task.name, task.metrics, task.splits) == ("hf_xsum", ("rouge2", "rouge1", "rougeL"), hub_data.SPLITS)
    examples = task.load("test")
    assert [example.source for example in examples] == [f"summarize: {row['document']}" for row in ARTICLES]
    assert [example.reference for example in examples] == [row["summary"] for row in ARTICLES]
    assert not any("train" in path for path in empty_hub.asked)
    assert hub_data.commits("hf:EdinburghNLP/xsum", "test") == {"hf:EdinburghNLP/xsum": commit}
    hub._COMMITS.clear()
    assert not hub_data.commits("hf:EdinburghNLP/xsum", "test")


def test_the_hubs_own_copy_replaces_a_script(empty_hub):
    empty_hub.upload(XSUM, {"xsum.py": b"import os", "data/all.tar.gz": b""})
    copied = {"default/validation/0000.parquet": parquet(ARTICLES), "default/train/0000.parquet": b"large"}
    commit = empty_hub.upload(XSUM, copied, branch="refs/convert/parquet")
    assert len(get_task("hf:EdinburghNLP/xsum").load()) == 4
    assert hub_data.commits("hf:EdinburghNLP/xsum", "validation") == {"hf:EdinburghNLP/xsum": commit}


def test_the_commit_is_that_of_the_place_that_the_rows_came_from(empty_hub):
    """Reads two splits: the hub's copy has one of them, and the repository has both."""
    copy = empty_hub.upload(XSUM, {"default/validation/0000.parquet": parquet(ARTICLES)}, branch=hub_data.COPY)
    main = empty_hub.upload(XSUM, {f"data/{split}-0.parquet": parquet(ARTICLES) for split in ("validation", "test")})
    name = "hf:EdinburghNLP/xsum"
    for split in ("validation", "test"):
        get_task(name).load(split)
    read = {split: hub_data.commits(name, split) for split in ("validation", "test", "train")}
    assert read == {"validation": {name: copy}, "test": {name: main}, "train": {}}


def test_other_data_sets_need_their_columns_which_may_be_parts(empty_hub):
    pair = {"id": 0, "translation": {"en": "Good morning.", "de": "Guten Morgen."}, "answers": {"text": ["a", "b"]}}
    files = {"de-en/test-00000-of-00001.parquet": parquet([pair]), "de-en/train-00000-of-00001.parquet": b"large"}
    commit = empty_hub.upload("datasets/wmt/wmt14", files)
    (example,) = get_task(f"hf:wmt/wmt14@{commit}").load("test")
    assert (example.source, example.reference) == ("translate English to German: Good morning.", "Guten Morgen.")
    empty_hub.upload("datasets/me/mine", {"data/train-00000-of-00001.parquet": parquet([pair])})
    (example,) = FileTask(path="hf:me/mine", source="translation.en", reference="answers.text").load("train")
    assert (example.source, example.reference) == ("Good morning.", ("a", "b"))
    with pytest.raises(ValueError, match="hf:me/mine, row 0 has no column 'source': .*translation.en"):
        get_task("hf:me/mine").load("train")


def test_records_name_the_commit_of_the_data_set(empty_hub, tmp_path):
    commit = empty_hub.upload(
        "datasets/me/mine", {"data/test-0.parquet": parquet([{"source": "Tom.", "reference": "Tim."}])}
    )
    evaluation = text_pair.evaluation(task="hf:me/mine", split="test", quality_examples=1, quality_batch=1)
    opened = session.Session(text_pair.SOURCE, evaluation, text_pair.make(tmp_path))
    assert opened.revisions == {"hf:me/mine": commit}


def test_what_is_missing_is_named_in_one_line(empty_hub, tmp_path, monkeypatch):
    empty_hub.upload(XSUM, {"xsum.py": b"import os"})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"needs pyarrow: pip install 'speccascade_jax\[hub\]'"):
        get_task("hf:EdinburghNLP/xsum").load()
    for path, message in (
        ("hf:EdinburghNLP/xsum", "no split 'test' of the configuration 'default' .*none of the files"),
        ("hf:me/nothing:other", "no split 'test' of the configuration 'other' .*knows no such dataset"),
        ("hf:EdinburghNLP/xsum@v9", "EdinburghNLP/xsum has no revision 'v9'"),
    ):
        with pytest.raises(FileNotFoundError, match=message) as error:
            hub_data._files(path, "test")
        assert "\n" not in str(error.value)
    with on_the_hub(empty_hub, tmp_path / "empty", offline=True):
        download = f"hf download EdinburghNLP/xsum --repo-type dataset --revision {hub_data.COPY} "
        with pytest.raises(FileNotFoundError, match=f"HF_HUB_OFFLINE is set: run  {download}"):
            hub_data._files("hf:EdinburghNLP/xsum", "test")
    for path, message in (
        ("hf:xsum", "'hf:xsum' is no name on the hub"),
        *((f"hf:o/n:{name}", "is no configuration") for name in ("/etc", "*", "../x", "..", "a?", "[a]")),
        ("hf:o/n:default@main", "the revision comes first: write hf:o/n@main:default"),
    ):
        with pytest.raises(ValueError, match=message):
            get_task(path)


def test_a_missing_configuration_is_answered_with_those_that_exist(empty_hub):
    pytest.importorskip("pyarrow", reason="needs pip install 'speccascade_jax[hub]'")
    copied = {f"{configuration}/train/0000.parquet": b"" for configuration in ("v1", "v1.en")}
    empty_hub.upload("datasets/me/two", copied, branch=hub_data.COPY)
    main = empty_hub.upload("datasets/me/two", {"data/test-00000-of-00001.parquet": b"", "v2/test.parquet": b""})
    with pytest.raises(
        FileNotFoundError, match=r"its configurations and splits are default \(test\), v1 \(train\), v1.en \(train\);"
    ):
        get_task("hf:me/two:v3").load("train")
    with pytest.raises(FileNotFoundError, match=r"no split 'train' .* its .* are default \(test\); give"):
        get_task(f"hf:me/two@{main}").load("train")


def test_a_damaged_file_is_named_with_the_file_to_delete(empty_hub):
    name = "hf:me/mine"
    path = "default/validation/0000.parquet"
    rows = [{"source": "Tom.", "reference": "Tim."}]
    empty_hub.upload("datasets/me/mine", {path: parquet(rows)}, branch=hub_data.COPY)
    (file,) = hub_data._files(name, "validation")
    content = file.resolve()
    content.write_bytes(b"PAR1xxxx")
    with pytest.raises(ValueError, match=f"^{name}: 0000.parquet is damaged .*: delete {content}, and run") as error:
        get_task(name).load()
    assert "\n" not in str(error.value)
    content.unlink()
    assert len(get_task(name).load()) == 1
