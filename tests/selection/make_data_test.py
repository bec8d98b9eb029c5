"""Tests of making selection data on a tiny pair: contents, kills, and the extra work of another candidate."""

import json

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.evaluation.points import Evaluation
from speccascade_jax.methods.settings import Arm, Level
from speccascade_jax.metrics import quality
from speccascade_jax.selection import data, make_data
from speccascade_jax.storage import archives
from speccascade_jax.storage.buckets import BucketPath
from tests.support.killing import killed_at

ARMS = ("draft", "middle", "autoregressive")
QUERIES = 6


def domains(queries=QUERIES, first=0):
    settings = {"quality_examples": queries, "quality_batch": 4, "max_new_tokens": 8, "first_example": first}
    return tuple(Evaluation(task=task, **settings) for task in ("tiny_translation", "tiny_translation_de_en"))


def make(pair, folder, drafters=ARMS, queries=QUERIES, **more):
    return make_data.make(pair=pair, domains=domains(queries), drafters=drafters, output=str(folder), **more)


@pytest.fixture(scope="module")
def made(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return folder, make(pair, folder)


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_data_hold_the_outputs_of_the_models(pair, made):
    folder, count = made
    stored, loaded = data.read(folder), sc.load_pair(pair.name)
    assert (
        count["queries"] == 2 * QUERIES and stored.arms == ARMS and list(stored.domain) == [0] * QUERIES + [1] * QUERIES
    )
    example = get_task("tiny_translation_de_en").load(limit=3)[2]
    methods = ("autoregressive_draft", "autoregressive")
    texts = [sc.decode(loaded, [example.source], method=method, max_new_tokens=8).texts[0] for method in methods]
    assert stored.alignment[QUERIES + 2, 0] == pytest.approx(quality.sentence_rouge_l(*texts), abs=1e-6)
    assert stored.features.shape == (2 * QUERIES, 16) and np.isfinite(stored.features).all()
    assert 0 < stored.alignment[:, 2].mean() < 1, "autoregressive is the sampled target against the greedy one"
    assert stored.parameters[2] == max(stored.parameters)


def test_a_killed_call_gives_the_result_of_an_uninterrupted_one(pair, made, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "SHARD", 4)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    make(pair, whole)
    with killed_at(archives, "write", 4):
        make(pair, broken)
    shard_count = len(list(broken.rglob("0*.npz")))
    assert 0 < shard_count < len(list(whole.rglob("0*.npz")))
    make(pair, broken)
    assert contents(whole) == contents(broken)


@pytest.mark.laws
def test_a_folder_in_a_bucket_equals_a_local_one(pair, bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "SHARD", 4)
    place, whole = BucketPath("gs://bucket/data"), tmp_path / "whole"
    with killed_at(archives, "write", 4):
        make(pair, place)
    assert make(pair, place) == make(pair, whole)
    assert {name: (place / name).read_bytes() for name in place.below()} == {
        str(name): content for name, content in contents(whole).items()
    }
    assert data.read(str(place)).key == data.read(whole).key


def test_another_candidate_and_more_queries_need_only_their_own_outputs(pair, made, tmp_path, monkeypatch):
    make(pair, tmp_path, drafters=("draft",))
    written, write = [], make_data.Writer._write

    def counted(self, rows):
        written.append((self.session.task.name, self.name, len(rows)))
        return write(self, rows)

    monkeypatch.setattr(make_data.Writer, "_write", counted)
    make(pair, tmp_path, drafters=("middle", "draft"))
    tasks = [domain.task for domain in domains()]
    assert written == [(task, "middle", QUERIES) for task in tasks]
    written.clear()
    make(pair, tmp_path, drafters=("middle",))
    assert not written and data.read(tmp_path).arms == ("middle",)


def test_more_or_fewer_queries_need_only_missing_outputs(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "SHARD", 4)
    make(pair, tmp_path, drafters=("draft",), queries=6)
    first = data.read(tmp_path)
    make(pair, tmp_path, drafters=("draft",), queries=10)
    more = data.read(tmp_path)
    assert len(more.features) == 20 and len(first.features) == 12
    np.testing.assert_array_equal(more.alignment[:6], first.alignment[:6])
    written = contents(tmp_path)
    make(pair, tmp_path, drafters=("draft",), queries=6)
    assert data.read(tmp_path).key == first.key and set(contents(tmp_path)) == set(written)


def test_a_stack_writes_the_outputs_of_the_model_below_the_target(pair, tmp_path):
    stack = Arm(drafter=Level(model="middle", budget=3, drafters=("draft",)), name="stack")
    make(pair, tmp_path, drafters=(stack, "middle"))
    dataset = data.read(tmp_path)
    np.testing.assert_array_equal(dataset.alignment[:, 0], dataset.alignment[:, 1])
    assert dataset.parameters[0] > dataset.parameters[1]


def test_invalid_values_are_refused_before_anything_is_written(pair, tmp_path):
    lossy = Level(model="middle", budget=3, drafters=("draft",), rule="opt", alpha=0.1)
    for drafters, words in (
        ((), "drafters"),
        (("draft", "drafft"), "has no model 'drafft'"),
        (("draft", "tests.support.drafters.build"), "has no 'build'"),
        ((Arm(drafter=lossy, name="lossy"),), "has a lossy rule"),
    ):
        with pytest.raises(ValueError, match=words):
            make(pair, tmp_path / "data", drafters=drafters)
    twice = (domains()[0], domains()[0])
    with pytest.raises(ValueError, match="names the task 'tiny_translation' twice"):
        make_data.make(pair=pair, domains=twice, drafters=ARMS, output=str(tmp_path / "data"))
    assert not list((tmp_path / "data").rglob("*.npz"))


def test_a_damaged_shard_is_named(pair, made, tmp_path):
    make(pair, tmp_path, drafters=("draft",))
    shard = next(tmp_path.rglob("0*.npz"))
    content = bytearray(shard.read_bytes())
    content[-30] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=f"{shard.name} is damaged"):
        make(pair, tmp_path, drafters=("draft",))
    manifest = json.loads((tmp_path / data.MANIFEST).read_text()) | {"format": 9}
    (tmp_path / data.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="has format 9"):
        data.read(tmp_path)
