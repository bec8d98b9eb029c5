"""Training step as a program to compile: its settings, the shapes of its arguments, and its amount of work.

The step is that of `training.finetune.steps`. Its state is distributed over the mesh as in
`training.finetune.partition`. No parameter, checkpoint or text is read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, PartitionSpec

from speccascade_jax import checkpoints
from speccascade_jax.core.checks import whole
from speccascade_jax.core.types import Params
from speccascade_jax.models import sharding
from speccascade_jax.models.families import Config, Model, family_of, model_from
from speccascade_jax.models.stacks import stacked_shapes
from speccascade_jax.preflight.chips import chip_of
from speccascade_jax.preflight.report import Report, Work
from speccascade_jax.preflight.topologies import sharding_of
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.training.finetune.batches import Batch, check_rows
from speccascade_jax.training.finetune.corpus import SpanCorruption, TaskCorpus
from speccascade_jax.training.finetune.distillation import Distillation
from speccascade_jax.training.finetune.objective import Objective
from speccascade_jax.training.finetune.optimizers import Adafactor, Optimizer
from speccascade_jax.training.finetune.partition import state_layout
from speccascade_jax.training.finetune.span_corruption import chunk_length, noise_counts
from speccascade_jax.training.finetune.steps import jitted_step
from speccascade_jax.training.finetune.trainer import Trainer
from speccascade_jax.training.finetune.watching import training_flops

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings that a training step does not share with decoding; the defaults are those of T5's recipe.

    Attributes:
        config: configuration of the model; it replaces that of the job's target.
        dropout: dropout rate; `None`: the rate in the configuration.
        optimizer, objective, distillation, accumulate, remat: as in `training.finetune.trainer.Trainer`. Of a teacher,
            only the name and the shapes are read.
    """

    config: Config | None = None
    dropout: float | None = None
    optimizer: Optimizer = Adafactor()
    objective: Objective = Objective(z_loss=1e-4)
    distillation: Distillation | None = None
    accumulate: int = 1
    remat: bool = False

    def __post_init__(self) -> None:
        whole("accumulate", self.accumulate, 1)

    def as_values(self) -> dict[str, str]:
        """Returns the settings that differ from their defaults, as texts."""
        usual = Training()
        chosen = {name: value for name, value in vars(self).items() if value != getattr(usual, name)}
        return {name: _text(value) for name, value in chosen.items()}


def _text(value: Any) -> str:
    """Returns a setting as text with all its fields, because a configuration's `repr` omits some."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({dataclasses.asdict(value)})"
    return str(value)


def fields_of(trainer: Trainer) -> dict[str, Any]:
    """Returns the fields of a `Job` that a training run's settings decide; no text and no array is read.

    The batch is the one with the most tokens per row in the corpus.
    """
    config = trainer.configuration
    rows, prompt_length, max_new_tokens = widest(trainer.corpus, model_from(config).is_encoder_decoder)
    settings = {name: getattr(trainer, name) for name in ("optimizer", "objective", "distillation", "accumulate")}
    return {
        "target": trainer.init_from or "the model", "part": "train", "mesh": trainer.mesh, "dtype": trainer.dtype,
        "batch": rows, "prompt_length": prompt_length, "max_new_tokens": max_new_tokens,
        "training": Training(config=config, remat=trainer.remat, **settings),
    }  # fmt: skip


def widest(corpus: Any, encoder_decoder: bool) -> tuple[int, int, int]:
    """Returns the number of rows of a corpus's widest batch, its tokens of a prompt, and its tokens of an answer.

    Raises:
        ValueError: the corpus does not define how wide its batches are.
    """
    encoder, width = _limits(corpus, encoder_decoder)
    if isinstance(corpus, SpanCorruption) and not corpus.widths:
        corpus = dataclasses.replace(corpus, widths=(encoder or width,), target_widths=(width,) if encoder else ())
    shape = corpus.shapes((encoder, width))[-1]
    if encoder_decoder:
        return shape.rows, shape.encoder, shape.width
    answer = min(corpus.resolved.max_output_length if isinstance(corpus, TaskCorpus) else width, shape.width - 1)
    return shape.rows, shape.width - answer, answer


def _limits(corpus: Any, encoder_decoder: bool) -> tuple[int, int]:
    """Returns the largest numbers of encoder tokens (0: no encoder) and of tokens that a corpus allows."""
    if isinstance(corpus, TaskCorpus):
        inputs, outputs = corpus.resolved.max_input_length, corpus.resolved.max_output_length
        return (inputs, outputs) if encoder_decoder else (0, inputs + outputs)
    if isinstance(corpus, SpanCorruption):
        chunk = chunk_length(corpus.length, corpus.noise_density, corpus.mean_span)
        removed, spans = noise_counts(chunk, corpus.noise_density, corpus.mean_span)
        return (chunk - removed + spans + 1, removed + spans + 1) if encoder_decoder else (0, corpus.length)
    if not corpus.widths:
        raise ValueError(f"{type(corpus).__name__} has no widths: set `widths`, the tokens per row of a batch")
    return (corpus.widths[-1] if encoder_decoder else 0), corpus.widths[-1]


def check(job: Any) -> None:
    """Raises a ValueError if a job's values are not valid for a training step."""
    if job.dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype={job.dtype!r}: training computes in float32 or bfloat16")
    check_rows(job.batch, job.training.accumulate * job.mesh[0])


def model_of(job: Any, mesh: Mesh | None) -> Model:
    """Returns the model to train.

    Raises:
        ValueError: the mesh does not fit the model.
    """
    config: Any = job.training.config or checkpoints.named(job.target).config
    changes: dict[str, Any] = {"dtype": job.dtype}
    if job.scan_layers is not None:
        changes["scan_layers"] = job.scan_layers
    if job.training.dropout is not None and hasattr(config, "dropout_rate"):
        changes["dropout_rate"] = job.training.dropout
    return _on_mesh(dataclasses.replace(config, **changes), job, mesh)


def _on_mesh(config: Any, job: Any, mesh: Mesh | None) -> Model:
    model: Any = model_from(config)
    if mesh is not None:
        sharding.check(config, job.mesh, job.target)
        model = dataclasses.replace(model, mesh=mesh)
    return cast(Model, model)


def shapes_of(model: Model) -> Params:
    """Returns the shapes of a model's parameters in training: float32, kernels not fused, layers stacked in a scan."""
    shapes = dict(family_of(model.config).shapes(model.config))
    shapes = stacked_shapes(shapes) if model.config.scanned else shapes
    leaves = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
    return unflatten_dict(leaves, sep="/")


def lower(job: Any, mesh: Mesh | None) -> jax.stages.Lowered:
    """Returns a job's training step as a program, lowered for the job's devices.

    Raises:
        ValueError: the mesh does not fit the models, or the teacher does not fit the model.
    """
    training, model = job.training, model_of(job, mesh)
    layout = state_layout(shapes_of(model), training.optimizer, mesh)
    teacher, teacher_params = _teacher(job, mesh)
    step = jitted_step(
        model, training.optimizer, training.objective, distillation=training.distillation, teacher=teacher,
        accumulate=training.accumulate, remat=training.remat, layout=None if mesh is None else layout,
    )  # fmt: skip
    state = layout if mesh is not None else jax.tree.map(lambda leaf: _shape(job, mesh, leaf.shape, leaf.dtype), layout)
    numbers = (_shape(job, mesh, (), dtype) for dtype in ("float32", "uint32"))
    lowered: jax.stages.Lowered = step.lower(state, teacher_params, _batch(job, mesh, model), *numbers)
    return lowered


def _teacher(job: Any, mesh: Mesh | None) -> tuple[Model | None, Params | None]:
    """Returns the teacher, and the shapes of its parameters in float32 with the layout for decoding."""
    if job.training.distillation is None:
        return None, None
    model = _on_mesh(checkpoints.named(job.training.distillation.teacher).config, job, mesh)

    def laid_out(path: Any, leaf: Any) -> Any:
        name = "/".join(key.key for key in path)
        return _shape(job, mesh, leaf.shape, leaf.dtype, PartitionSpec() if mesh is None else sharding.spec_of(name))

    return model, jax.tree_util.tree_map_with_path(laid_out, shapes_of(model))


def _batch(job: Any, mesh: Mesh | None, model: Any) -> Batch:
    rows, spec = job.batch, sharding.ROWS if mesh is not None else PartitionSpec()
    lengths = _shape(job, mesh, (rows,), "int32", spec)
    if not model.is_encoder_decoder:
        tokens = _shape(job, mesh, (rows, job.prompt_length + job.max_new_tokens), "int32", spec)
        return Batch(tokens, lengths, lengths, None, None)
    source, target = (
        _shape(job, mesh, (rows, width), "int32", spec) for width in (job.prompt_length, job.max_new_tokens)
    )
    return Batch(target, lengths, lengths, source, lengths)


def _shape(
    job: Any, mesh: Mesh | None, shape: Sequence[int], dtype: Any, spec: PartitionSpec | None = None
) -> jax.ShapeDtypeStruct:
    layout = sharding_of(job.topology, mesh, PartitionSpec() if spec is None else spec)
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=layout)


def work_of(job: Any) -> Work:
    """Returns the work of a job's training step, if every row is full."""
    model: Any = model_of(job, None)
    prompts, answers = (np.full(job.batch, width) for width in (job.prompt_length, job.max_new_tokens))
    lengths = (answers, prompts) if model.is_encoder_decoder else (prompts + answers, None)
    return Work(
        tokens=job.batch * job.max_new_tokens,
        flops=float(training_flops(model.config, *lengths)),
        devices=math.prod(job.mesh),
    )


def grid(result: Any) -> Grid:
    """Returns the table of a training step: memory, time, speed and messages, per device."""
    job, report = result.planned.job, result.report
    rows = [["fits", result.fits]]
    if report is not None:
        rows += [*_memory_rows(report), *_time_rows(report), *_message_rows(report)]
    chip = chip_of(job.topology)
    training = job.training
    notes = [
        f"Compiled for {job.topology}, mesh {job.mesh}; nothing ran. A device has {chip.memory / GB:.1f} GB.",
        f"{job.batch} rows of {job.prompt_length} + {job.max_new_tokens} tokens, accumulate {training.accumulate}, "
        f"remat {training.remat}, dtype {job.dtype}.",
        "Speeds are computed from the compiled program, not measured: in the first figure every start of an op has its "
        "largest cost, in the second starts cost nothing. No computation is assumed to run during messages.",
    ]
    return Grid(title=f"Training step of {job.target}", header=["of one device", ""], rows=rows, notes=notes)


def _memory_rows(report: Report) -> list[list[str]]:
    memory = report.memory
    return [
        ["memory, GB", f"{memory.peak / GB:.2f}"],
        ["parameters, optimiser state and batch, GB", f"{memory.arguments / GB:.2f}"],
        ["temporary arrays, GB", f"{memory.temporaries / GB:.2f}"],
    ]


def _time_rows(report: Report) -> list[list[str]]:
    band, work, shares = report.band, report.work, report.utilisation
    assert work is not None and shares is not None
    speeds = sorted(work.tokens / seconds for seconds in (band.low, band.high))
    return [
        ["HBM traffic, ms", f"{band.memory * 1e3:.3g}"],
        ["compute, ms", f"{band.compute * 1e3:.3g}" if band.compute else NONE],
        ["messages, ms", f"{band.collectives * 1e3:.3g}"],
        ["a step, ms", f"{band.low * 1e3:.3g} to {band.high * 1e3:.3g}"],
        ["bound by", band.bound],
        ["target tokens/s of all devices", f"{speeds[0]:,.0f} to {speeds[1]:,.0f}"],
        ["MFU", f"{shares[0]:.0%} to {shares[1]:.0%}" if band.compute else NONE],
    ]


def _message_rows(report: Report) -> list[list[str]]:
    return [
        [kind, f"{parts.count:,.0f}, {parts.sent_bytes / GB:.2f} GB, the largest {parts.largest / GB:.3f} GB"]
        for kind, parts in sorted(report.messages.items())
    ]
