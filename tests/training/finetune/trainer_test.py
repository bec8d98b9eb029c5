"""Tests of training tiny models: learning, resumption bit for bit, one-line errors for bad input; shipped gin files."""

import dataclasses
import itertools
import json
import os
import signal
from pathlib import Path

import gin
import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints.reading import find
from speccascade_jax.data.vocabularies.load import load_vocabulary
from speccascade_jax.models.decoder import DecoderLM, tiny
from speccascade_jax.models.t5 import T5
from speccascade_jax.runtime import gin_flags, interrupts, paths
from speccascade_jax.storage.files import expanded
from speccascade_jax.storage.locks import LockedError
from speccascade_jax.training import runs, states
from speccascade_jax.training.finetune import acceptance, decoding, partition, steps
from speccascade_jax.training.finetune import run as running
from speccascade_jax.training.finetune import trainer as trainers
from speccascade_jax.training.finetune.corpus import TaskCorpus
from speccascade_jax.training.finetune.distillation import Distillation
from speccascade_jax.training.finetune.evaluations import evaluate
from speccascade_jax.training.finetune.run import train
from speccascade_jax.training.finetune.schedule import Schedule
from tests.support import eagle3_files, gemma4_assistant_files, random_t5, tiny_decoders, tokenizer_files
from tests.support.killing import KilledError, killed_at
from tests.training.conftest import CONFIG, PAIRS, micro_trainer

CLOCK = ("minutes", "tokens_per_second", "mfu")


def _leaves(state):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def _left(trainer):
    """Returns a run's results: the leaves of its state, and its log without values that depend on the clock."""
    text = (expanded(trainer.run_dir) / runs.METRICS_FILE).read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    metrics = [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]
    return [leaf.tolist() for leaf in _leaves(running.Run(trainer).state)], metrics


def _loss(run, planned, rate):
    """Takes the first step of a run, and returns its loss."""
    run.started = run._start(1, planned, rate)
    run._settle()
    return run.position.window[-1]["loss"]


def test_the_next_step_starts_before_the_metrics_of_the_last_one_are_read(trainer, monkeypatch):
    """The host prepares and starts a step while the devices compute the one before."""
    run, order = running.Run(dataclasses.replace(trainer, log_every=3, schedule=Schedule(peak=1e-3, max_steps=4))), []
    start, settle = run._start, run._settle
    monkeypatch.setattr(run, "_start", lambda step, *rest: (order.append(f"start {step}"), start(step, *rest))[1])
    monkeypatch.setattr(run, "_settle", lambda: (run.started and order.append(f"read {run.started.step}"), settle())[1])
    run.finish()
    assert order == ["start 1", "start 2", "read 1", "start 3", "read 2", "read 3", "start 4", "read 4"]


@pytest.mark.laws
@pytest.mark.parametrize("deaths", [(14, 3), (31, 2, 5), (34,)])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(trainer, monkeypatch, tmp_path, deaths):
    """Ends each process before its n-th step, save or record, with dropout and reports of odd lengths."""
    whole = dataclasses.replace(trainer, log_every=5, evaluate_every=6, save_every_minutes=0.0)
    result, traces = train(whole), _left(whole)
    assert [line["step"] for line in traces[1]] == [5, 6, 10, 12], "the last step is evaluated once"
    broken, taken = dataclasses.replace(whole, run_dir=str(tmp_path / "broken")), []
    for death in (*deaths, None):
        seen = itertools.count(1)

        def watched(plain, seen=seen, death=death):
            def call(*args, **more):
                if next(seen) == death:
                    raise KilledError
                taken.append(plain.__name__)
                return plain(*args, **more)

            return call

        with monkeypatch.context() as patch:
            for owner, name in ((running.Run, "_start"), (running.Run, "save"), (runs.MetricsLog, "append")):
                patch.setattr(owner, name, watched(getattr(owner, name)))
            try:
                final = train(broken)
            except KilledError:
                continue
    assert final == result and _left(broken) == traces
    assert taken.count("_start") <= 12 + len(deaths), "a resumed run begins at the last save"
    assert train(broken) == result and _left(broken) == traces  # a finished run does not train or log again


class Signals:
    """Calls of a function, of which number `at` (from 1) is followed by a SIGTERM."""

    def __init__(self, function, at):
        self.function, self.at, self.calls = function, at, 0

    def __call__(self, *args, **more):
        self.calls += 1
        if self.calls == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.function(*args, **more)


def _watched_evaluations(monkeypatch, at):
    """Sends a SIGTERM in batch `at` of all batches of evaluations: loss, decoding for both rates, metrics."""
    watched = Signals(lambda: None, at)

    def around(function):
        def call(*args, **more):
            watched()
            return function(*args, **more)

        return call

    monkeypatch.setattr(running.steps, "make_eval_step", lambda model: around(EVAL_STEP(model)))
    for name in ("_decode", "_agreement"):
        monkeypatch.setattr(acceptance, name, around(getattr(acceptance, name)))
    monkeypatch.setattr(decoding, "generate", around(decoding.generate))
    return watched


EVAL_STEP = steps.make_eval_step


@pytest.fixture(scope="module")
def evaluated(finished, folder, tmp_path_factory):
    """Returns settings with every part of an evaluation after steps 2 and 4 of 4, the result and all that is left."""
    corpus = dataclasses.replace(finished[0].corpus, widths=(16,), tokens_per_batch=64, max_joined=1)
    settings = {"validation": corpus, "acceptance_of": str(finished[2]), "loss_batches": 3, "evaluate_every": 2}
    settings |= {"schedule": Schedule(peak=1e-2, max_steps=4), "log_every": 3, "examples": 3}
    of = micro_trainer(folder, tmp_path_factory.mktemp("evaluated") / "run", **settings)
    with pytest.MonkeyPatch.context() as patch:
        watched = _watched_evaluations(patch, 0)
        result = train(of)
    return of, result, _left(of), watched.calls


@pytest.mark.laws
def test_the_last_step_is_evaluated_and_logged_once(evaluated):
    _, result, (_, records), _ = evaluated
    assert [record["step"] for record in records] == [2, 3, 4]
    assert result == records[-1] and {"validation_loss", "acceptance_greedy", "bleu"} <= result.keys()


@pytest.mark.laws
@pytest.mark.parametrize("batch", [2, 5, 8, 11, -1])
def test_sigterm_ends_an_evaluation_after_a_batch_and_a_resumed_run_repeats_it(evaluated, tmp_path, monkeypatch, batch):
    whole, result, left, calls = evaluated
    broken, batch = dataclasses.replace(whole, run_dir=str(tmp_path / "broken")), batch % (calls + 1)
    with monkeypatch.context() as patch, pytest.raises(interrupts.Terminated):
        watched = _watched_evaluations(patch, batch)
        train(broken)
    assert watched.calls == batch, "no further batch was evaluated"
    state, position = states.States(Path(broken.run_dir)).latest(broken.layout())
    assert position["owed"] and int(state.step) in (2, 4)
    assert train(broken) == result and _left(broken) == left
    assert train(broken) == result and _left(broken) == left


@pytest.mark.laws
def test_a_run_in_a_bucket_equals_a_local_one(finished, bucket, tmp_path):
    trainer, result, exported = finished
    remote = dataclasses.replace(trainer, run_dir="gs://bucket/run", save_every_minutes=0.0)
    with killed_at(running.Run, "_start", 8):
        train(remote)
    assert running.Run(remote).state.step == 7
    assert train(remote) == result and _left(remote) == _left(trainer)
    trainers.export(remote, "gs://bucket/exported", "float32")
    for place in ("gs://bucket/run/model", "gs://bucket/exported"):
        assert find(place).fingerprint == find(exported).fingerprint
    assert train(remote) == result, "a finished run is evaluated, and its model is written again"
    assert trainer.text.fingerprint == load_vocabulary("gs://bucket/run/model").fingerprint


@pytest.mark.laws
def test_another_seed_gives_other_masks_of_dropout_and_dropout_acts(trainer, tmp_path):
    """Keeps the data and the initial parameters, and changes only the bits of dropout."""
    once = dataclasses.replace(trainer, schedule=Schedule(peak=1e-2, max_steps=1))
    started = [running.Run(dataclasses.replace(once, run_dir=str(tmp_path / name))) for name in "abcd"]
    (planned, *_), rate = started[0].remaining(), 1e-2
    other, without = dataclasses.replace(once, seed=1), dataclasses.replace(once, dropout=0.0)
    started[1].trainer = other
    started[2] = running.Run(dataclasses.replace(without, run_dir=str(tmp_path / "e")))
    losses = [_loss(run, planned, rate) for run in started]
    assert losses[0] == losses[3] and len(set(losses)) == 3


def test_a_second_trainer_of_a_folder_is_refused(trainer):
    said = rf"run is being written by process {os.getpid()} .*: wait for it, end it, or name another run_dir"
    with runs.alone(Path(trainer.run_dir)), pytest.raises(LockedError, match=said):
        train(trainer)
    assert not Path(trainer.run_dir, runs.METRICS_FILE).exists()


@pytest.mark.laws
def test_the_loss_falls(trainer):
    run = running.Run(dataclasses.replace(trainer, schedule=Schedule(peak=3e-2, warmup_steps=5, max_steps=60)))
    before = run.evaluate(0)["validation_loss"]
    assert run.finish()["validation_loss"] < 0.7 * before


@pytest.mark.laws
def test_a_time_plan_ends_the_run(trainer):
    run = running.Run(dataclasses.replace(trainer, schedule=Schedule(peak=1e-3, warmup_steps=1, max_minutes=0.05)))
    run.finish()
    assert 0.05 <= run.minutes() < 1.0
    assert int(run.state.step) > 0


def test_exports_and_the_finished_model_hold_the_saved_state(finished):
    trainer, _, exported = finished
    bound, step = trainers.trained(trainer)
    assert step == 12
    folder = Path(trainer.run_dir) / trainers.MODEL
    for path in (exported, folder):
        model, params = checkpoints.load(path)
        assert model.config == CONFIG
        for wanted, leaf in zip(_leaves(bound.params), _leaves(params), strict=True):
            np.testing.assert_array_equal(wanted, leaf)
    assert (folder / "vocabulary.model").read_bytes() == Path(trainer.vocabulary).read_bytes()
    assert evaluate(trainer, str(exported), 2) == evaluate(trainer, "", 2)


def test_a_run_without_saved_state_cannot_be_exported(trainer):
    with pytest.raises(FileNotFoundError, match="train first"):
        trainers.trained(trainer)


def test_a_student_that_starts_as_its_teacher_has_nothing_to_learn(finished, tmp_path):
    trainer, _, exported = finished
    teaching = Distillation(teacher=str(exported), weight=1.0)
    changes = {"run_dir": str(tmp_path / "student"), "distillation": teaching, "init_from": str(exported)}
    run = running.Run(dataclasses.replace(trainer, **changes))
    assert _loss(run, next(run.remaining()), 0.0) == pytest.approx(0.0, abs=1e-5)
    evaluation = run.evaluate(0)
    assert (evaluation["acceptance_greedy"], evaluation["acceptance_sampled"]) == pytest.approx((1.0, 1.0), abs=1e-3)


def test_a_diverged_run_raises_an_error(finished, tmp_path):
    run = running.Run(dataclasses.replace(finished[0], run_dir=str(tmp_path / "run")))
    run.state = run.state.replace(params=jax.tree.map(lambda leaf: leaf * np.nan, run.state.params))
    with pytest.raises(FloatingPointError, match="at step 1, learning rate 1.00e-03; lower the schedule's peak"):
        _loss(run, next(run.remaining()), 1e-3)


def test_a_diverged_step_is_neither_saved_nor_evaluated(finished, tmp_path):
    run = running.Run(dataclasses.replace(finished[0], run_dir=str(tmp_path / "run")))
    run.state = run.state.replace(params=jax.tree.map(lambda leaf: leaf * np.nan, run.state.params))
    started = run._start(1, next(run.remaining()), 1e-3)
    for write in (lambda: run.evaluate(1), run.save):
        run.started = started
        with pytest.raises(FloatingPointError, match="at step 1"):
            write()
    assert run.log.logged == 0 and run.states.latest(run.trainer.layout()) is None


def _unfused(config):
    return unflatten_dict(tiny_decoders.flat_parameters(config), sep="/")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """Returns the checkpoint of a micro decoder-only model with its vocabulary, and a file of examples."""
    folder = tmp_path_factory.mktemp("decoder")
    (folder / "text").mkdir()
    path = tokenizer_files.llama2c(folder / "text" / "tok.bin")
    size = trainers.load_vocabulary(path).vocab_size
    config = tiny("llama2_7b", vocab_size=size)
    checkpoints.save(folder / "model", DecoderLM(config), _unfused(config))
    (folder / "model" / "tok.bin").write_bytes(path.read_bytes())
    lines = [f"{source},{target}\n" for source, target in PAIRS]
    (folder / "mine.csv").write_text("source,reference\n" + "".join(lines), encoding="utf-8")
    return folder


def _decoder_trainer(decoder, run_dir, **changes):
    corpus = TaskCorpus(task=str(decoder / "mine.csv"), rows=4, widths=(96,))
    settings = {"init_from": str(decoder / "model"), "corpus": corpus, "schedule": Schedule(peak=1e-3, max_steps=2)}
    return trainers.Trainer(run_dir=str(run_dir), **settings | changes)


def test_a_decoder_only_model_learns_answers_only(decoder, tmp_path):
    run = running.Run(_decoder_trainer(decoder, tmp_path / "run"))
    (planned, *_) = run.data.epoch(0, 0)
    batch = planned.build()
    assert (batch.answers > 0).all() and (batch.answers < batch.lengths).all()
    evaluate = steps.make_eval_step(run.model)
    total, count = evaluate(run.state.params, batch)
    assert int(count) == (batch.lengths - batch.answers).sum()
    # what is predicted inside a prompt does not count: the loss is that of the answers after the prompts
    logits = jax.jit(lambda params: steps.predict(run.model, params, batch).logits)(run.state.params)
    logs = np.asarray(jax.nn.log_softmax(logits[..., : run.model.config.vocab_size]))
    by_hand = -sum(
        logs[row, place - 1, batch.tokens[row, place]]
        for row in range(4) for place in range(batch.answers[row], batch.lengths[row])
    )  # fmt: skip
    assert float(total) == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.laws
def test_a_decoder_only_model_is_trained_and_loads_as_a_target(decoder, tmp_path):
    trainer = _decoder_trainer(decoder, tmp_path / "run")
    train(trainer)
    model, _ = checkpoints.load(tmp_path / "run" / trainers.MODEL)
    assert isinstance(model, DecoderLM)
    assert (tmp_path / "run" / trainers.MODEL / "tok.bin").is_file()


@pytest.fixture
def no_compiling(monkeypatch):
    """Fails a test that compiles or draws parameters before it refuses its input."""
    for owner, name in (
        (steps, "make_train_step"),
        (trainers, "load_float32"),
        (running, "beside"),
        (partition, "fresh_state"),
    ):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("too late"))


def _refused(trainer, said):
    with pytest.raises((ValueError, OSError), match=said) as raised:
        train(trainer())
    assert "\n" not in str(raised.value)


def _of(trainer, **changes):
    return lambda: dataclasses.replace(trainer, **changes)


def _wider(trainer, **changes):
    return dataclasses.replace(trainer.corpus, **changes)


def test_bad_input_is_refused_in_one_line_before_anything_is_compiled(trainer, decoder, tmp_path, no_compiling):
    cases = [
        (lambda: _of(trainer, corpus=TaskCorpus(task="mmlu"))(), "task mmlu has no .*split 'train'.*test, validation"),
        (lambda: _of(trainer, corpus=TaskCorpus(task="wnt22"))(), "unknown task 'wnt22'"),
        (_of(trainer, corpus=_wider(trainer, path=str(tmp_path / "none.tsv"))), "none.tsv"),
        (_of(trainer, corpus=_wider(trainer, widths=(2,))), "no pair of .*pairs.tsv fits into 2 tokens"),
        (_of(trainer, config="t5_1_1_smal"), "'t5_1_1_smal' is neither a preset nor a checkpoint.*t5_1_1_small"),
        (_of(trainer, config=None), "there is no model: give init_from"),
        (_of(trainer, init_from=str(tmp_path / "nothing"), config=None), "is neither a preset nor a checkpoint"),
        (_of(trainer, init_from=str(decoder / "model")), "only a T5 can be enlarged: leave config out"),
        (_of(trainer, accumulate=3), "a batch of 4 rows does not divide into 3 equal parts"),
        (_of(trainer, dropout=1.0), r"dropout=1.0 is not a rate: give a number in \[0, 1\)"),
        (_of(trainer, dtype="float16"), "dtype='float16': training computes in float32 or bfloat16"),
        (_of(trainer, vocabulary=""), "there is no vocabulary"),
        (_of(trainer, mesh=(64, 1)), "64"),
        (_of(trainer, config=dataclasses.replace(CONFIG, vocab_size=291)), "has 290 pieces, but .* vocab_size is 291"),
        (_of(trainer, task="tiny_translations"), "unknown task 'tiny_translations'"),
        (_of(trainer, split="train"), "task tiny_translation has no split 'train'; its splits: test"),
    ]  # fmt: skip
    for make, said in cases:
        _refused(make, said)
    for changes, said in (
        ({"dropout": 0.1}, "dropout=0.1: decoder-only models have no dropout; leave it out"),
        ({"config": CONFIG}, "only a T5 can be enlarged: leave config out, so that .*model"),
    ):
        _refused(lambda changes=changes: _decoder_trainer(decoder, tmp_path / "refused", **changes), said)
    for draft, described in ((gemma4_assistant_files, "a Gemma 4 assistant"), (eagle3_files, "an EAGLE-3 head")):
        path = str(draft.write(tmp_path / described))
        said = f"a draft that belongs to a target cannot be trained alone: .* is {described}.*; choose a model that"
        _refused(_of(trainer, init_from=path, config=None, dropout=None), said)
    # nothing was left behind that a later run with right settings would resume
    assert not list(Path(trainer.run_dir).glob(f"{states.FOLDER}/*"))


@pytest.mark.parametrize(
    ("lacking", "said"),
    [(1, None), (2, "begins texts with id"), (3, "more than the .* rows"), (5, "more than the .* rows")],
)
def test_only_unused_control_pieces_may_lack_a_row(tmp_path, lacking, said):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra huggingface")
    names = {"eos_token": "<|im_end|>", "bos_token": "<|begin|>", "add_bos_token": True}
    path = tokenizer_files.byte_level(tmp_path, tokenizer_config=names)
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    # the last pieces: an ordinary one, the ends of a text and of a turn, the beginning, and Gemma 3's for images
    tokenizer.add_special_tokens(["<image_soft_token>"])
    tokenizer.save(str(path))
    config = tiny("llama2_7b", vocab_size=tokenizer.get_vocab_size() - lacking)
    corpus, schedule = TaskCorpus(task="tiny_translation", split="test"), Schedule(peak=1e-3, max_steps=2)
    trainer = trainers.Trainer(run_dir="run", init_from=str(tmp_path), config=config, corpus=corpus, schedule=schedule)
    if said is None:
        assert trainer.text.vocab_size == trainer.model.config.vocab_size + 1
    else:
        with pytest.raises(ValueError, match=said):
            _ = trainer.text


def test_a_run_needs_a_folder(trainer, no_compiling):
    for name in ("", " "):
        _refused(_of(trainer, run_dir=name), "run_dir='.?' is no folder: name the run's folder")
        with pytest.raises(ValueError, match="is no folder"):
            trainers.trained(_of(trainer, run_dir=name)())


def test_a_model_that_the_run_did_not_write_is_refused_before_training(trainer, no_compiling):
    (Path(trainer.run_dir) / trainers.MODEL).mkdir(parents=True)
    _refused(lambda: trainer, "is not the model of a run in this folder")


def test_sequences_that_are_longer_than_the_model_are_refused(decoder, tmp_path, no_compiling):
    config = dataclasses.replace(checkpoints.named(str(decoder / "model")).config, max_length=48)
    checkpoints.save(tmp_path / "short", DecoderLM(config), _unfused(config))
    (tmp_path / "short" / "tok.bin").write_bytes((decoder / "model" / "tok.bin").read_bytes())
    said = "sequences have up to 96 tokens, but the model has 48 positions: lower the corpus's widths"
    _refused(lambda: _decoder_trainer(decoder, tmp_path / "run", init_from=str(tmp_path / "short")), said)


def test_the_state_of_an_older_version_or_another_model_is_refused(finished, trainer, folder, tmp_path, no_compiling):
    old = tmp_path / "old"
    runs.save_state(old, {"params": np.zeros(3)}, {})
    _refused(_of(trainer, run_dir=str(old)), "state.msgpack was written by an older version")
    deeper = dataclasses.replace(CONFIG, num_decoder_layers=2)
    _refused(_of(finished[0], config=deeper), "12 does not fit this configuration .*name another run_dir")


def test_a_run_is_not_resumed_with_other_data_or_another_seed(finished, no_compiling):
    of = finished[0]
    _refused(_of(of, seed=of.seed + 1), "was begun with another corpus and another seed: name another run_dir, or give")
    _refused(_of(of, corpus=_wider(of, max_joined=1)), "was begun with another corpus: name another run_dir")


def test_a_plan_may_be_extended(finished):
    of = finished[0]
    longer = dataclasses.replace(of.schedule, max_steps=of.schedule.max_steps + 8)
    assert running.Run(dataclasses.replace(of, schedule=longer)).position.begun["corpus"]


@pytest.mark.laws
def test_another_size_of_t5_checkpoint_is_refused_or_grown(trainer, tmp_path):
    large = dataclasses.replace(CONFIG, d_ff=64)
    checkpoints.save(tmp_path / "large", T5(large), random_t5.parameters(large))
    _refused(_of(trainer, init_from=str(tmp_path / "large")), "which cannot grow to .*: only d_model")
    assert dataclasses.replace(trainer, init_from=str(tmp_path / "large"), config=None).model.config.d_ff == 64


def test_settings_become_bindings():
    argv = ["train", "--gin_file=a.gin", "--gin.MINUTES=5", "--gin.trainer.Trainer.seed=3"]
    wanted = ["train", "--gin_file=a.gin", "--gin_bindings=MINUTES = 5", "--gin_bindings=trainer.Trainer.seed = 3"]
    assert gin_flags.rewrite_arguments(argv) == wanted


def test_a_setting_without_a_value_is_refused():
    with pytest.raises(ValueError, match="--gin.MINUTES has no value"):
        gin_flags.rewrite_arguments(["train", "--gin.MINUTES"])


def _shipped(name, *bindings):
    gin.clear_config()
    try:
        gin_flags.parse_gin([str(paths.repository_root() / "gin" / f"{name}.gin")], list(bindings))
        return gin.get_configurable(trainers.Trainer)()
    finally:
        gin.clear_config()


@pytest.mark.parametrize("name", ["train_target", "train_draft"])
def test_shipped_configurations_resolve(name):
    trainer = _shipped(name, "STEPS = 7", "MINUTES = 3", "trainer.Trainer.seed = 5")
    assert (trainer.schedule.max_steps, trainer.schedule.max_minutes, trainer.seed) == (7, 3, 5)
    assert trainer.objective.smoothing == 0.0 and trainer.distillation is None
    assert trainer.corpus.tokens_per_batch == trainer.validation.tokens_per_batch
    assert trainer.corpus.max_joined == trainer.validation.max_joined == 4


def test_the_draft_is_narrower_than_the_target_and_shares_its_vocabulary():
    target, draft = (_shipped(name).config for name in ("train_target", "train_draft"))
    assert (draft.vocab_size, draft.num_embeddings) == (target.vocab_size, target.num_embeddings)
    assert draft.d_model < target.d_model and draft.num_decoder_layers < target.num_decoder_layers


def test_a_draft_can_learn_from_outputs_and_a_teacher():
    taught = ("TEACHER = 'target'", "DISTILLATION = @distillation.Distillation()")
    trainer = _shipped("train_draft", "CORPUS = 'x.pieces.gz'", "MAX_JOINED = 1", *taught)
    assert (trainer.corpus.path, trainer.corpus.max_joined) == ("x.pieces.gz", 1)
    assert (trainer.distillation.teacher, trainer.distillation.weight) == ("target", 0.8)
    assert trainer.validation.path.endswith("valid.en-de.tsv")
