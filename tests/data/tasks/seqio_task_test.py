"""Tests of seqio tasks without seqio: table rows, values, errors, and no import before use."""

import json
import sys
from types import SimpleNamespace

import gin
import numpy as np
import pytest

from speccascade_jax.data.tasks import seqio_task, table
from speccascade_jax.data.tasks.seqio_task import SeqioTask
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.evaluation import experiment
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings, validate
from speccascade_jax.evaluation.session import Session
from speccascade_jax.runtime import gin_flags
from tests.support import new_process, tiny_pair


def own_task(**changes) -> SeqioTask:
    return SeqioTask(**{"name": "theirs", "max_input_length": 32, "max_output_length": 8, **changes})


def point(task: SeqioTask) -> Point:
    evaluation, settings = Evaluation(task=task).resolved(), Settings(method="chow", alpha=0.5)
    return Point(pair=ModelPair(name="pair"), evaluation=evaluation, settings=settings)


@pytest.mark.parametrize(("name", "prefix", "longest_in", "longest_out", "metrics"), [
    ("wmt14_en_de", "translate English to German: ", 80, 80, ("bleu",)),
    ("xsum", "summarize: ", 1024, 64, ("rouge2", "rouge1", "rougeL")),
    ("cnn_dailymail", "summarize: ", 2048, 128, ("rouge2", "rouge1", "rougeL")),
])  # fmt: skip
def test_tasks_have_the_settings_of_narasimhan_et_al(name, prefix, longest_in, longest_out, metrics):
    task = get_task(name)
    assert (task.prefix, task.max_input_length, task.max_output_length) == (prefix, longest_in, longest_out)
    assert task.metrics == metrics and task.splits[0] == "validation"


RESOLVE = """
import json, sys
from pathlib import Path
import gin
from speccascade_jax.data.tasks import table
from speccascade_jax.evaluation import points
from speccascade_jax.runtime import gin_flags
lengths = {}
for file in sorted(Path("gin/tasks").glob("*.gin")):
    gin.clear_config()
    holes = [f"SeqioTask.{name}={value!r}" for name, value in json.loads(sys.argv[1]).items()]
    of = {"seqio": holes, "file": ["FileTask.path='mine.csv'"]}
    gin_flags.parse_gin([str(file)], of.get(file.stem, []))
    evaluation = gin.get_configurable(points.Evaluation)()
    lengths[file.stem] = table.get_task(evaluation.resolved().task).max_output_length
print(json.dumps([lengths, sorted({"seqio", "tensorflow", "tensorflow_datasets", "tokenizers"} & set(sys.modules))]))
"""


def test_reading_task_files_imports_no_optional_library():
    holes = {"name": "theirs", "module": "no.such.module", "max_input_length": 32, "max_output_length": 8}
    lengths, imported = new_process.answer(RESOLVE, json.dumps(holes))
    assert lengths.items() >= {"wmt14_en_de": 80, "xsum": 64, "cnn_dailymail": 128, "seqio": 8}.items()
    assert imported == []


@pytest.mark.parametrize("task", ["xsum", own_task(module="no.such.module")])
def test_without_seqio_the_error_says_how_to_install_it(task, monkeypatch):
    monkeypatch.setitem(sys.modules, "seqio", None)  # importing seqio now fails
    with pytest.raises(ImportError, match=r"(speccascade_xsum|theirs) is read through seqio.*pip install .*\[seqio\]"):
        get_task(task).load(limit=1)
    with pytest.raises(SystemExit, match="^error: .* is read through seqio"), gin_flags.one_line_errors():
        get_task(task).load(limit=1)


def test_the_error_for_an_unknown_task_explains_how_to_name_a_seqio_task():
    with pytest.raises(ValueError, match=r"unknown task 'cnn_dm'.*TASKS; .*seqio a SeqioTask \(gin/tasks/seqio.gin\)"):
        get_task("cnn_dm")


def test_seqio_tasks_with_equal_settings_are_equal():
    assert own_task(splits=["test"], metrics=["rouge1"]) == own_task(splits=("test",), metrics=("rouge1",))
    assert hash(own_task()) == hash(own_task()) and own_task() != own_task(module="their.tasks")
    assert get_task(own_task()) == own_task()


@pytest.mark.parametrize("field", ["splits", "metrics"])
def test_a_string_in_place_of_a_tuple_is_rejected(field):
    with pytest.raises(ValueError, match=rf"{field}='test' is one value.*write \('test',\)"):
        own_task(**{field: "test"})


def test_lengths_have_no_default():
    with pytest.raises(TypeError, match="max_input_length"):
        SeqioTask(name="theirs", max_output_length=8)


def test_a_record_stores_the_task_and_can_be_run_again(monkeypatch):
    task = own_task(module="their.tasks", splits=("dev",), metrics=("rouge1", "bleu"), prefix="say: ", registered="x")
    gin.clear_config()
    gin_flags.parse_gin([], point(task).configuration().splitlines())
    again = []

    def stop(found):
        again.extend(found)
        raise InterruptedError

    monkeypatch.setattr(experiment, "open_session", stop)
    with pytest.raises(InterruptedError):
        gin.get_configurable(experiment.run)()
    gin.clear_config()
    assert again == [point(task)]
    assert again[0].coordinates()["task"] == "theirs"


def test_a_point_with_an_unknown_split_is_rejected():
    wrong = point(own_task(splits=("dev",))).evaluation
    with pytest.raises(ValueError, match="task theirs has no split 'test'; its splits: dev"):
        validate(Point(**vars(point(own_task())) | {"evaluation": Evaluation(**vars(wrong) | {"split": "test"})}))


class Registered:
    """A minimal seqio Task for the reader: endless, so that reading beyond the limit never ends."""

    splits = ("test", "dev")
    source = object()
    vocabulary = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    output_features = dict.fromkeys(("inputs", "targets"), SimpleNamespace(vocabulary=vocabulary))

    def __init__(self, **features):
        self.features, self.asked = features, []

    def get_dataset(self, **asked):
        self.asked.append(asked)
        return self

    def as_numpy_iterator(self):
        while True:
            yield self.features


@pytest.fixture
def register(monkeypatch):
    def register(**features) -> Registered:
        task = Registered(**features)
        no_class = type("NoClass", (), {})
        seqio = SimpleNamespace(
            TaskRegistry=SimpleNamespace(names=lambda: ["theirs", "other"]),
            MixtureRegistry=SimpleNamespace(names=lambda: ["mixed"]),
            get_mixture_or_task={"theirs": task, "mixed": task}.get,
            get_subtasks=lambda provider: [provider],
            FunctionDataSource=no_class, TfdsDataSource=no_class, Mixture=no_class,
        )  # fmt: skip
        monkeypatch.setattr(seqio_task, "_import_seqio", lambda name: seqio)
        return task

    return register


IDS = np.array([5, 6], np.int32)


@pytest.mark.parametrize(("features", "source", "reference"), [
    ({"inputs": b"text", "targets": b"Wort"}, "text", "Wort"),
    ({"inputs": IDS, "targets": IDS, "inputs_pretokenized": b"a", "targets_pretokenized": "ü".encode()}, "a", "ü"),
    ({"inputs": IDS, "targets": IDS}, "5 6", "5 6"),
    ({"inputs": IDS, "targets": b"Wort"}, "5 6", "Wort"),
])  # fmt: skip
def test_texts_are_preferred_to_tokens(register, features, source, reference):
    provider = register(**features)
    task = own_task()
    assert task.load("test", 3) == [table.Example(number, source, reference) for number in range(3)]
    (asked,) = provider.asked
    assert asked["split"] == "test" and not asked["shuffle"] and asked["seed"] == 0 and asked["num_epochs"] == 1


def test_prompts_are_the_registered_inputs_with_and_without_a_prefix(register):
    register(inputs=b"say: a", targets=b"b")
    for task, source in ((own_task(), "say: a"), (own_task(prefix="say: "), "a")):
        (example,) = task.load("test", 1)
        assert example.source == source and task.build_prompt(example) == "say: a"


ASK = {"inputs": b"say: a", "targets": b"b"}


@pytest.mark.parametrize(("features", "changes", "error", "message"), [
    (ASK, {"name": "their"}, ValueError, "no Task or Mixture 'their'; did you mean theirs.*set SeqioTask.module"),
    (ASK, {"name": "x", "module": "json"}, ValueError, "no Task or Mixture 'x'; importing json did not register it"),
    (ASK, {"module": "no.such"}, ImportError, "module 'no.such', which should register theirs, cannot be imported"),
    (ASK, {"splits": ("train",)}, ValueError, "theirs has no split 'train'; its splits: dev, test"),
    (ASK, {"prefix": "ask: "}, ValueError, "example 0 of seqio's theirs begins with 'say: a', not with .*'ask: '"),
    ({"targets": b"b"}, {}, ValueError, "feature 'inputs' is missing in targets"),
    ({"inputs": b"a", "targets": np.float32(0.5)}, {}, ValueError, "feature 'targets' is not text"),
])  # fmt: skip
def test_errors_name_what_seqio_lacks_and_the_remedy(register, features, changes, error, message):
    register(**features)
    with pytest.raises(error, match=message):
        own_task(**{"splits": ("test",), **changes}).load(limit=1)


def test_a_tasks_input_length_may_exceed_the_pairs_limit(register, tmp_path):
    register(inputs=b"a cold day " * 600, targets=b"b")
    source = ModelPair(name=str(tiny_pair.write(tmp_path)))
    task = own_task(max_input_length=2048, splits=("test",))
    loaded = Session(source, Evaluation(task=task, quality_examples=1, latency_examples=0))
    assert np.count_nonzero(loaded.prepare(point(task), np.array([0])).args[0].encoder_tokens) == 2048


def test_an_unknown_metric_is_rejected_before_loading():
    with pytest.raises(ValueError, match="unknown metric 'rogue2': did you mean"):
        Session(ModelPair(name="no/such/pair"), Evaluation(task=own_task(metrics=("rogue2",))))
