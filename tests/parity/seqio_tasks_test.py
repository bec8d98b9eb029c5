"""Tests of seqio tasks from end to end: the data sets of Narasimhan et al. (2024), mocked, and a user's own task."""

import gin
import numpy as np
import pytest

from speccascade_jax.core.names import TARGET
from speccascade_jax.data.tasks.seqio_task import SeqioTask
from speccascade_jax.data.tasks.table import Example, get_task
from speccascade_jax.data.vocabularies.load import Vocabulary
from speccascade_jax.evaluation import experiment, measuring
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings
from speccascade_jax.evaluation.session import Session
from speccascade_jax.metrics import quality
from speccascade_jax.pairs.pair import PAIRS_DIRECTORY
from speccascade_jax.results.store import result_store
from speccascade_jax.runtime import gin_flags
from tests.support import tiny_pair

pytestmark = pytest.mark.parity
seqio = pytest.importorskip("seqio", reason="needs the extra seqio: make parity")
tf = pytest.importorskip("tensorflow", reason="needs the extra seqio: make parity")
tfds = pytest.importorskip("tensorflow_datasets", reason="needs the extra seqio: make parity")

SHIPPED = PAIRS_DIRECTORY / "tatoeba_en_de" / "vocabulary.model"
NAMES = ("wmt14_en_de", "xsum", "cnn_dailymail")
LONG = "The quick brown fox is cold. " * 800


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> ModelPair:
    """Returns a pair of random, very small T5s with the shipped vocabulary."""
    return ModelPair(name=str(tiny_pair.write(tmp_path_factory.mktemp("pair"), SHIPPED)))


@pytest.fixture
def long_texts():
    """Mocks every data set so that each of its features is one text of 5,600 words."""

    def repeat(builder, *args, **kwargs):
        return tf.data.Dataset.from_tensors(dict.fromkeys(builder.info.features, LONG)).repeat(3)

    with tfds.testing.mock_data(as_dataset_fn=repeat):
        yield


def their_task(name: str, **changes) -> SeqioTask:
    lengths = {"max_input_length": 32, "max_output_length": 8}
    return SeqioTask(name=name, module="tests.support.their_seqio_tasks", **lengths | changes)


def small(task) -> Evaluation:
    return Evaluation(task=task, max_new_tokens=4, quality_examples=3, latency_examples=0, resamples=10).resolved()


def test_ids_and_texts_agree_with_seqio():
    """Compares our vocabulary with seqio's for the same file."""
    ours, theirs = Vocabulary(SHIPPED), seqio.SentencePieceVocabulary(str(SHIPPED))
    assert (ours.vocab_size, ours.eos_id) == (theirs.vocab_size, theirs.eos_id)
    for example in get_task("tiny_translation").load():
        for text in (example.source, example.reference):
            ids = ours.encode(text)
            assert ids == theirs.encode(text)
            assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("name", NAMES)
def test_the_seqio_tasks_of_narasimhan_et_al_run_end_to_end(name, source):
    with tfds.testing.mock_data(num_examples=5):
        loaded = Session(source, small(name))
    for method in (Settings(method=TARGET), Settings(method="chow", alpha=0.5, block_size=2)):
        point = Point(pair=source, evaluation=small(name), settings=method)
        (record,) = measuring.evaluate(loaded, [point])
        assert record["point"]["task"] == name and record["point"]["split"] == "validation"
        assert record["quality"]["examples"] == 3 and set(record["quality"]["all"]) == {*get_task(name).metrics}
        assert record["quality"]["metric"] == ("bleu" if name == "wmt14_en_de" else "rouge2")
        assert record["counts"]["committed"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_returns_the_beginning_of_one_fixed_order(name):
    task = get_task(name)
    with tfds.testing.mock_data(num_examples=7):
        everything = task.load("test")
        assert len(everything) == 7 and task.load("test", 3) == everything[:3]
    assert [example.id for example in everything] == list(range(7))
    assert not any(example.source.startswith(task.prefix) for example in everything)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_cut_and_tokenised_as_in_seqio(name, source, long_texts):
    """Compares T5X's ids (vocabulary by path, lengths) with the ids that a session makes with the pair's vocabulary."""
    from speccascade_jax.data.tasks import seqio_registry

    task, vocabulary = get_task(name), Vocabulary(SHIPPED)
    lengths = {"inputs": task.max_input_length, "targets": task.max_output_length}
    dataset = seqio_registry.make_task(name, SHIPPED).get_dataset(
        lengths, "validation", shuffle=False, try_in_mem_cache=False
    )
    theirs = next(dataset.as_numpy_iterator())
    point = Point(pair=source, evaluation=small(name), settings=Settings(method=TARGET))
    ours = Session(source, small(name)).prepare(point, np.array([0])).args[0].encoder_tokens[0]
    assert len(theirs["inputs"]) == task.max_input_length and theirs["inputs"][-1] == vocabulary.eos_id
    assert (
        ours[: task.max_input_length].tolist() == theirs["inputs"].tolist() and not ours[task.max_input_length :].any()
    )
    assert vocabulary.decode(theirs["targets"]) == LONG[: len(vocabulary.decode(theirs["targets"]))]


@pytest.mark.parametrize("name", NAMES)
def test_the_error_for_missing_data_names_the_download_command(name, tmp_path, monkeypatch):
    from speccascade_jax.data.tasks import seqio_registry

    monkeypatch.setattr(seqio.utils, "_TFDS_DATA_DIR_OVERRIDE", str(tmp_path))
    seqio.TaskRegistry.add_provider("absent", seqio_registry.make_task(name))
    try:
        with pytest.raises(FileNotFoundError) as error:
            SeqioTask(name="absent", max_input_length=8, max_output_length=8).load(limit=1)
    finally:
        seqio.TaskRegistry.remove("absent")
    data_set = seqio_registry.SOURCES[name].data_set
    assert f"lacks {data_set} in {tmp_path}" in str(error.value)
    assert f"tfds.builder('{data_set}', data_dir='{tmp_path}').download_and_prepare()" in str(error.value)
    assert ("xsum-extracts-from-downloads.tar.gz" in str(error.value)) == (name == "xsum")


def test_the_error_names_missing_data_of_a_mixture_whose_splits_come_from_the_data(tmp_path):
    from speccascade_jax.data.tasks import seqio_registry

    like = seqio_registry.make_task("xsum")
    source = seqio.TfdsDataSource("xsum:1.1.0", tfds_data_dir=str(tmp_path), read_only=True)
    seqio.TaskRegistry.add("absent", source, like.output_features, like.preprocessors)
    seqio.MixtureRegistry.add("absent_mixture", ["absent"], default_rate=1.0)
    try:
        with pytest.raises(FileNotFoundError, match="absent_mixture has no data .* lacks xsum:1.1.0"):
            SeqioTask(name="absent_mixture", max_input_length=8, max_output_length=8).load(limit=1)
    finally:
        seqio.TaskRegistry.remove("absent")
        seqio.MixtureRegistry.remove("absent_mixture")


@pytest.mark.parametrize("name", NAMES)
def test_seqio_scores_with_the_metrics_of_the_row(name):
    from speccascade_jax.data.tasks import seqio_registry

    targets, predictions = ["a cold day in May", "so it goes"], ["a cold day in June", "so it went"]
    (metric,) = seqio_registry.make_task(name).predict_metric_fns
    assert metric(targets, predictions) == quality.score(get_task(name).metrics, predictions, targets)


@pytest.mark.parametrize("name", ["their_texts", "their_ids"])
def test_texts_of_a_registered_task_are_returned_unchanged(name):
    task = their_task(name, prefix="ask: ")
    wanted = [Example(n, f"Number {n} is cold.", f"Nummer {n} ist kalt.") for n in range(12)]
    assert task.load() == wanted and task.load(limit=5) == wanted[:5] and task.load() == wanted
    assert task.build_prompt(wanted[0]) == "ask: Number 0 is cold."
    assert task.load("test") == [Example(0, "Only one.", "Nur eines.")]


@pytest.mark.parametrize("name", ["their_mixture", "their_uneven_mixture"])
def test_a_mixture_is_deterministic(name):
    first = their_task(name).load()
    assert first == their_task(name).load() and 12 <= len(first) < 24
    assert {example.source for example in first} == {f"ask: Number {n} is cold." for n in range(12)}
    assert their_task(name).load(limit=4) == first[:4]


@pytest.mark.parametrize(("changes", "message"), [
    ({"name": "their_text"}, "no Task or Mixture 'their_text'; did you mean their_texts"),
    ({"name": "their_ids", "splits": ("train",)}, "their_ids has no split 'train'; its splits: test, validation"),
])  # fmt: skip
def test_unregistered_tasks_and_splits_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        their_task(**changes).load(limit=1)


def test_a_users_task_runs_and_its_record_can_be_run_again(source, tmp_path):
    """Runs the files of a run with gin/tasks/seqio.gin, then the record's recipe, which must find its own result."""
    files = ["gin/run.gin", "gin/models/directory.gin", "gin/tasks/seqio.gin", "gin/methods/token_v3.gin"]
    output = f"run.output='{tmp_path / 'runs.jsonl'}'"
    task = "name='their_texts' module='tests.support.their_seqio_tasks' max_input_length=32 max_output_length=4"
    bindings = [f"PAIR={source.name!r}", "Method.alpha=0.5", "Evaluation.quality_examples=2", output]
    bindings += ["Evaluation.latency_examples=0", *(f"SeqioTask.{setting}" for setting in task.split())]
    record = _run(files, bindings)
    recipe = tmp_path / "recipe.gin"
    recipe.write_text(record["configuration"])
    assert _run([str(recipe)], [output])["key"] == record["key"]
    assert len(result_store.read_records(tmp_path / "runs.jsonl")) == 1


def _run(files, bindings):
    gin.clear_config()
    gin_flags.parse_gin(files, bindings)
    try:
        return gin.get_configurable(experiment.run)()
    finally:
        gin.clear_config()
