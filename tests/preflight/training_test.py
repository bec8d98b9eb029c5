"""Tests of compiling a training step: its job, its shapes, its messages between devices, and the program itself."""

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from speccascade_jax import preflight
from speccascade_jax.models.families import model_from
from speccascade_jax.models.t5_config import T5Config
from speccascade_jax.preflight import hlo, traffic, training
from speccascade_jax.preflight.training import Training
from speccascade_jax.training.finetune.corpus import JoinedCorpus, SpanCorruption, TaskCorpus
from speccascade_jax.training.finetune.schedule import Schedule
from speccascade_jax.training.finetune.trainer import Trainer, random_params
from tests.support.compiling import needs_tpu_compiler

TINY = T5Config(
    vocab_size=512, num_embeddings=512, d_model=64, num_heads=4, head_dim=16, d_ff=128, num_encoder_layers=2,
    num_decoder_layers=2, scan_layers=True,
)  # fmt: skip


def job(**arguments):
    arguments = {
        "part": "train",
        "topology": "v5e:2x2",
        "batch": 8,
        "prompt_length": 16,
        "max_new_tokens": 8,
    } | arguments
    return preflight.Job(target="tiny", training=arguments.pop("training", Training(config=TINY)), **arguments)


@pytest.mark.parametrize(
    ("corpus", "expected"),
    [
        (TaskCorpus(task="xsum", rows=128, target_widths=(64,)), (128, 1024, 64)),
        (TaskCorpus(task="wmt14_en_de", rows=128, widths=(32, 80), target_widths=(32, 80)), (128, 80, 80)),
        (JoinedCorpus(path="none", tokens_per_batch=1280, widths=(16, 64)), (20, 64, 64)),
        (SpanCorruption(text="none.txt", rows=4), (4, 512, 114)),
    ],
)
def test_the_widest_batch_of_a_corpus_is_compiled_and_no_text_is_read(corpus, expected):
    trainer = Trainer(
        run_dir="none", init_from="t5_1_1_small", dropout=0.1, dtype="bfloat16", mesh=(4, 2), accumulate=2, remat=True,
        corpus=corpus, schedule=Schedule(max_steps=1),
    )  # fmt: skip
    fields = training.fields_of(trainer)
    assert tuple(fields[name] for name in ("batch", "prompt_length", "max_new_tokens")) == expected
    assert fields["mesh"] == (4, 2) and fields["training"].config.dropout_rate == 0.1
    assert (fields["training"].accumulate, fields["training"].remat) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 6, "mesh": (4, 1)}, "6 rows does not divide"),
        ({"training": Training(config=TINY, accumulate=3)}, "8 rows does not divide into 3"),
        ({"dtype": "int8"}, "training computes in float32 or bfloat16"),
    ],
)
def test_a_step_that_cannot_be_taken_is_refused_before_compiling(arguments, message):
    with pytest.raises(ValueError, match=message):
        job(**arguments)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_shapes_are_those_of_the_parameters_that_training_creates(scan_layers):
    model = training.model_of(job(scan_layers=scan_layers), None)
    created = jax.eval_shape(lambda: random_params(model, jax.random.key(0)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), training.shapes_of(model)) == jax.tree.map(
        lambda x: (x.shape, x.dtype), created
    )


def test_the_arguments_of_a_step_are_its_parameters_its_moments_and_the_batch(monkeypatch):
    monkeypatch.setattr(training, "sharding_of", lambda *_: SingleDeviceSharding(jax.devices()[0]))
    lowered = training.lower(job(), None)
    sizes = [leaf.size for leaf in jax.tree.leaves(training.shapes_of(model_from(TINY)))]
    _, teacher, batch, rate, _ = lowered.in_avals[0]
    assert teacher is None and batch.encoder_tokens.shape == (8, 16) and batch.tokens.shape == (8, 8)
    assert rate.shape == () and sum(leaf.size for leaf in jax.tree.leaves(lowered.in_avals[0][0].params)) == sum(sizes)


def test_the_text_of_a_configuration_shows_a_different_layout_of_layers():
    texts = [
        job(training=Training(config=T5Config(**{**vars(TINY), "scan_layers": scan}))).as_values() for scan in (0, 1)
    ]
    assert texts[0] != texts[1]


FUSED = """
%start (p0: bf16[4,8]) -> (bf16[4,8], bf16[8,8]) {
  %p0 = bf16[4,8]{1,0} parameter(0)
  %all-gather.1 = bf16[8,8]{1,0} all-gather(%p0), dimensions={0}
  ROOT %c = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%middle (p0.1: bf16[4,8]) -> bf16[8,8] {
  %p0.1 = bf16[4,8]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[8,8]{1,0} all-gather(%p0.1), dimensions={0}
}

%all-reduce-scatter.1 (p0.2: f32[8,8]) -> f32[4,8] {
  %p0.2 = f32[8,8]{1,0} parameter(0)
  %all-reduce.1 = f32[8,8]{1,0} all-reduce(%p0.2), to_apply=%add
  ROOT %d = f32[4,8]{1,0} dynamic-slice(%all-reduce.1), dynamic_slice_sizes={4,8}
}

ENTRY %main (a: bf16[4,8], b: f32[8,8]) -> f32[4,8] {
  %a = bf16[4,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %f1 = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) fusion(%a), kind=kCustom, calls=%start
  %f2 = bf16[8,8]{1,0} fusion(%a), kind=kCustom, calls=%middle
  ROOT %f3 = f32[4,8]{1,0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_a_message_in_a_chain_of_fusions_counts_once():
    module = hlo.parse(FUSED)
    messages = [traffic.message(module, part) for part in module.computations["main"].instructions]
    assert [message for message in messages if message] == [("all-gather", 128), ("reduce-scatter", 256)]


@pytest.mark.accelerators
@needs_tpu_compiler
@pytest.mark.xdist_group("training")
def test_a_step_on_a_mesh_gathers_parameters_and_scatters_gradients():
    report = preflight.report(
        "tiny", topology="v5e:2x2", mesh=(2, 2), part="train", batch=8, prompt_length=16, max_new_tokens=8, dump=False,
        training=Training(config=TINY),
    )  # fmt: skip
    assert report.fits and report.messages["all-gather"].count and report.messages["reduce-scatter"].count
