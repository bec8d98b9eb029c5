"""Tests of divergences against NumPy, and of sampled outputs: distribution, shapes, random bits, chosen rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core.types import BoundModel
from speccascade_jax.engine.generate import compilations
from speccascade_jax.models.decoder import tiny
from speccascade_jax.models.t5 import T5, T5Config
from speccascade_jax.models.teacher_forcing import along
from speccascade_jax.training.finetune import outputs
from speccascade_jax.training.finetune.batches import Batch
from speccascade_jax.training.finetune.distillation import DIVERGENCES, Distillation, OutputSource, check_teacher
from speccascade_jax.training.finetune.objective import Objective
from speccascade_jax.training.finetune.optimizers import ScaledAdam
from speccascade_jax.training.finetune.steps import make_train_step, predict
from speccascade_jax.training.runs import TrainState
from tests.support import random_t5, tiny_decoders

VOCAB, EOS = 13, 1
STUDENT, TEACHER = (random_t5.bound(T5Config(VOCAB, 16, 8, 2, 4, 8, 1, 1), seed=seed) for seed in (0, 1))
SOURCE = np.array([[3, 4, 5, 1], [6, 1, 0, 0], [1, 0, 0, 0]], np.int32)
TARGET = np.array([[6, 7, 8, 9, 1, 0], [9, 1, 0, 0, 0, 0], [0] * 6], np.int32)
BATCH = Batch(TARGET, np.array([5, 2, 0], np.int32), np.zeros(3, np.int32), SOURCE, np.array([4, 2, 1], np.int32))


def settings(**changes):
    return Distillation(teacher="runs/target", **changes)


def redrawn(step=0, seed=0, batch=BATCH, student=STUDENT, teacher=TEACHER, **changes):
    source = OutputSource(settings(**changes), student.model, teacher.model, (EOS,))
    batch = _program(source)(student.params, teacher.params, batch, np.uint32(seed), np.int32(step))
    return jax.tree.map(np.asarray, batch)


@functools.cache
def _program(source):
    return jax.jit(source)


@functools.partial(jax.jit, static_argnums=0)
def forced(model, params, batch):
    predictions = predict(model, params, batch)
    return predictions.logits, predictions.targets, predictions.counted


def log_law(bound, batch):
    """Returns the log distributions of a batch's tokens, float64 `[B, T, VOCAB]`, and the targets and their mask."""
    logits, *rest = (np.asarray(array) for array in forced(bound.model, bound.params, batch))
    logits = logits[..., :VOCAB].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True)), *rest


def by_hand(name, p, q, beta):
    def kl(first, second):
        return (first * (np.log(first) - np.log(second))).sum(-1)

    middle = beta * p + (1 - beta) * q
    return {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": beta * kl(p, middle) + (1 - beta) * kl(q, middle),
        "tvd": 1 - np.minimum(p, q).sum(-1),
    }[name]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_equal_their_formulas_over_the_real_entries(name):
    rng = np.random.default_rng(0)
    logits = [rng.normal(0, 3, (2, 5, 7)).astype(np.float32) for _ in range(2)]
    laws = [np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in logits]
    # the teacher's padding is -inf, the student's has values, and more entries
    teacher = np.concatenate([logits[0], np.full((2, 5, 2), -np.inf, np.float32)], -1)
    student = np.concatenate([logits[1], rng.normal(size=(2, 5, 4)).astype(np.float32)], -1)
    values = jax.jit(settings(divergence=name, beta=0.3).divergences, static_argnums=2)(teacher, student, 7)
    np.testing.assert_allclose(values, by_hand(name, *laws, 0.3), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_and_gradients_are_finite_where_a_model_excludes_tokens(name):
    inf = np.inf
    teacher = jnp.array([[[0.0, -inf, 3.0, 900.0], [0.0, 1.0, -900.0, -inf]]])
    student = jnp.array([[[-inf, 1.0, 0.0, -900.0], [0.0, 1.0, 2.0, -inf]]])

    def total(teacher, student):
        return settings(divergence=name).divergences(teacher, student, 4).sum()

    value, (of_teacher, of_student) = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(teacher, student)
    assert abs(value) < 1e4, "an excluded token costs a moderate number of nats"
    assert np.isfinite(of_student).all()
    assert not np.any(of_teacher), "the teacher is fixed"
    if name != "tvd":  # at these positions the total variation is at its largest, where it is flat
        assert np.any(np.asarray(of_student) != 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"divergence": "kl"}, "unknown divergence 'kl': .*there are forward_kl, reverse_kl, jsd, tvd"),
        ({"outputs": "students"}, "unknown outputs 'students': did you mean student\\?"),
        ({"others": "mixed"}, "unknown others 'mixed'"),
        ({"beta": 1.0}, "beta=1.0 is not a share"),
        ({"student_share": 0}, "student_share=0 is not a share"),
        ({"weight": 0.0}, r"weight=0.0 is not in \(0, 1\]"),
        ({"temperature": -1.0}, "temperature=-1.0 is not a temperature"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1 is not a whole number"),
        ({"teacher": ""}, "teacher='' is no folder"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Distillation(**{"teacher": "runs/target"} | changes)


def test_a_teacher_of_another_kind_is_refused():
    other = BoundModel({}, T5(T5Config(12, 16, 8, 2, 4, 8, 1, 1)))
    decoder = BoundModel({}, tiny_decoders.DecoderLM(tiny("gemma2_2b", vocab_size=VOCAB)))
    for teacher, message in ((other, "has 12 tokens, but the student has 13"), (decoder, "is a decoder-only model")):
        with pytest.raises(ValueError, match=f"the teacher {message}"):
            check_teacher(teacher.model, STUDENT.model)


def test_greedy_outputs_are_the_students_most_likely_tokens():
    batch = redrawn(outputs="student", temperature=0.0)
    logits, _, _ = log_law(STUDENT, batch)
    for row, length in zip(range(2), batch.lengths, strict=False):
        assert batch.tokens[row, :length].tolist() == np.argmax(logits[row, :length], -1).tolist()
        ended = batch.tokens[row, :length] == EOS
        assert not ended[:-1].any()
        assert length == 6 or ended[-1], "an output ends with EOS, or fills its row"
        assert not batch.tokens[row, length:].any()
    assert batch.lengths[2] == 0
    assert not batch.tokens[2].any(), "a row that only fills the batch up stays empty"
    assert batch.tokens.shape == TARGET.shape
    np.testing.assert_array_equal(batch.encoder_tokens, SOURCE)


@pytest.mark.parametrize(("outputs_name", "model"), [("student", STUDENT), ("teacher", TEACHER)])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_outputs_have_the_distribution_of_their_model(outputs_name, model, temperature):
    rows = 2000
    batch = Batch(*(np.repeat(field[:1], rows, axis=0) for field in BATCH))
    tokens = redrawn(batch=batch, outputs=outputs_name, temperature=temperature).tokens
    # the first token is not EOS, after which nothing follows
    first = np.bincount(tokens[tokens[:, 0] != EOS, 0]).argmax()
    prefix = Batch(*(field[:1] for field in BATCH))._replace(tokens=np.array([[first] + [0] * 5], np.int32))
    for place, logs in enumerate(log_law(model, prefix)[0][0, :2]):
        drawn, scaled = tokens[:, 0] if place == 0 else tokens[tokens[:, 0] == first, 1], np.exp(logs / temperature)
        counts, wanted = np.bincount(drawn, minlength=VOCAB), scaled / scaled.sum() * len(drawn)
        chi_square = ((counts - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum()
        assert chi_square < 45, (place, counts, wanted)  # with 12 degrees of freedom this means p < 1e-5


def test_random_bits_depend_on_seed_step_row_and_purpose_alone():
    batch = Batch(*(np.repeat(field[:1], 4, axis=0) for field in BATCH))
    first = redrawn(batch=batch, outputs="student").tokens
    np.testing.assert_array_equal(first, redrawn(batch=batch, outputs="student").tokens)
    assert len({row.tobytes() for row in first}) == 4, "equal prompts in other rows draw other bits"
    shorter = redrawn(batch=Batch(*(field[:2] for field in batch)), outputs="student").tokens
    np.testing.assert_array_equal(shorter, first[:2])
    for change in ({"step": 1}, {"seed": 1}, {"outputs": "teacher", "teacher": STUDENT}):
        assert (redrawn(batch=batch, **{"outputs": "student"} | change).tokens != first).any(), change
    # neighbouring seeds must not share the bits of later steps
    assert int(outputs.step_seed(0, 1)) != int(outputs.step_seed(1, 0))


def test_one_program_serves_all_steps_and_parameters():
    source = OutputSource(settings(outputs="student"), STUDENT.model, TEACHER.model, (EOS,))
    redrawn(outputs="student")
    programs, compiled = _program(source)._cache_size(), compilations()
    hosts = [jax.tree.map(lambda x, n=n: np.asarray(x) * np.float32(1 + n), STUDENT.params) for n in range(3)]
    students = [BoundModel(jax.device_put(params), STUDENT.model) for params in hosts]
    drawn = [redrawn(step=n, student=student, outputs="student") for n, student in enumerate(students)]
    assert (_program(source)._cache_size(), compilations()) == (programs, compiled)
    assert len({batch.tokens.tobytes() for batch in drawn}) == 3


@pytest.mark.parametrize("others", ["data", "teacher"])
def test_the_set_share_of_mixed_outputs_comes_from_the_student(others):
    rows = 400
    batch = Batch(*(np.repeat(field[:1], rows, axis=0) for field in BATCH))
    changes = {"batch": batch, "step": 3}
    student = redrawn(outputs="student", **changes)
    other = batch if others == "data" else redrawn(outputs="teacher", **changes)
    mixed = redrawn(outputs="mixed", others=others, student_share=0.3, **changes)
    is_student, is_other = ((mixed.tokens == part.tokens).all(-1) for part in (student, other))
    assert (is_student | is_other).all()
    np.testing.assert_array_equal(mixed.lengths, np.where(is_other, other.lengths, student.lengths))
    share = 1 - is_other.mean()
    assert 0.2 < share < 0.4
    assert (is_student != np.roll(is_student, 1)).any(), "the choice is made for every row"


@pytest.mark.parametrize(
    ("weight", "outputs_name", "parts"), [(0.25, "data", 1), (0.25, "student", 2), (1.0, "student", 1)]
)
def test_the_loss_of_a_step_mixes_cross_entropy_on_the_data_with_divergence_on_the_outputs(weight, outputs_name, parts):
    batch = Batch(*(np.concatenate([field, field[:1]]) for field in BATCH))
    chosen, optimizer = settings(weight=weight, outputs=outputs_name, divergence="reverse_kl"), ScaledAdam()
    models = {"distillation": chosen, "teacher": TEACHER, "stop_ids": (EOS,), "accumulate": parts}
    step = make_train_step(STUDENT.model, optimizer, Objective(), **models)
    # copied, because the step donates its state
    copied = jax.tree.map(lambda x: jnp.asarray(np.array(x)), STUDENT.params)
    state = TrainState.fresh(copied, optimizer.transformation())
    _, metrics = step(state, batch, np.float32(0), np.uint32(7))

    sequences = redrawn(seed=7, batch=batch, outputs=outputs_name) if outputs_name == "student" else batch
    logs, targets, counted = log_law(STUDENT, batch)
    entropies = -np.take_along_axis(logs, targets[..., None], axis=-1)[..., 0][counted]
    (logs, _, counted), (taught, _, _) = log_law(STUDENT, sequences), log_law(TEACHER, sequences)
    divergences = (np.exp(logs) * (logs - taught)).sum(-1)[counted]
    total = (1 - weight) * entropies.mean() + weight * divergences.mean()
    assert float(metrics["loss"]) == pytest.approx(total, rel=1e-5)
    assert int(metrics["tokens"]) == 12


def test_distillation_that_leaves_early_exits_untrained_is_refused():
    model, models = T5(T5Config(VOCAB, 16, 8, 2, 4, 8, 1, 2)), {"distillation": settings(), "teacher": TEACHER}
    with pytest.raises(ValueError, match="distillation of weight 1 trains no early exit"):
        make_train_step(model, ScaledAdam(), Objective(exit_weight=0.5), **models)


def test_a_limit_shortens_outputs():
    assert redrawn(outputs="student", max_new_tokens=2).lengths.max() <= 2


@pytest.fixture(scope="module")
def decoder():
    bound = tiny_decoders.bound(tiny("llama2_7b", vocab_size=VOCAB))
    return BoundModel(bound.params, bound.model)


def test_a_decoder_only_model_answers_after_its_prompts(decoder):
    tokens = np.array([[5, 6, 7, 8, 1, 0, 0, 0], [4, 9, 1, 0, 0, 0, 0, 0], [7, 3, 4, 5, 6, 7, 8, 1], [0] * 8], np.int32)
    batch = Batch(tokens, np.array([5, 3, 8, 0], np.int32), np.array([3, 1, 7, 0], np.int32), None, None)
    drawn = redrawn(batch=batch, student=decoder, teacher=decoder, outputs="student", temperature=0.0)
    assert drawn.tokens.shape == tokens.shape
    assert drawn.lengths[3] == 0
    np.testing.assert_array_equal(drawn.answers, batch.answers)
    for row, start in enumerate((3, 1, 7)):
        length = drawn.lengths[row]
        assert start < length <= 8
        np.testing.assert_array_equal(drawn.tokens[row, :start], tokens[row, :start])
        prompt = outputs.prompt_of(decoder.model, Batch(*(f if f is None else f[row : row + 1] for f in batch)))
        logits = along(
            decoder, prompt, np.pad(drawn.tokens[row : row + 1, start:length], ((0, 0), (0, 8 - length + start)))
        )
        assert drawn.tokens[row, start:length].tolist() == np.argmax(logits[0, : length - start], -1).tolist()
        assert length == 8 or drawn.tokens[row, length - 1] == EOS
        assert not drawn.tokens[row, length:].any()
    answers, lengths = outputs.outputs_of(drawn)
    assert np.asarray(answers)[0, : lengths[0]].tolist() == drawn.tokens[0, 3 : drawn.lengths[0]].tolist()
