"""Settings of a training run of any model on any corpus, and the models that a run starts from and ends with."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, cast

import jax
from jax.sharding import Mesh

from speccascade_jax import checkpoints
from speccascade_jax.core.checks import check_seed, whole
from speccascade_jax.core.protocols import AttachedModel
from speccascade_jax.core.types import BoundModel, Params, count
from speccascade_jax.data.tasks import table
from speccascade_jax.data.tasks.task import Task
from speccascade_jax.data.vocabularies.load import FileVocabulary, load_vocabulary
from speccascade_jax.data.vocabularies.tokenizer_files import ADDED, NAMING, NUMBERING
from speccascade_jax.models import sharding
from speccascade_jax.models.families import Config, Model, model_from
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.pairs.pair import check_room, for_target
from speccascade_jax.runtime import mesh as meshes
from speccascade_jax.storage import hub
from speccascade_jax.storage.files import expanded, write_atomically
from speccascade_jax.storage.hub import located
from speccascade_jax.training import runs
from speccascade_jax.training.bucket_states import open_states
from speccascade_jax.training.finetune import growth, held_out, partition
from speccascade_jax.training.finetune.corpus import HELD_OUT, Corpus, TaskCorpus, training_task
from speccascade_jax.training.finetune.distillation import Distillation
from speccascade_jax.training.finetune.objective import Objective
from speccascade_jax.training.finetune.optimizers import Adafactor, Optimizer
from speccascade_jax.training.finetune.schedule import Schedule

MODEL = "model"
"""Name of the folder in a run's folder that holds the trained model, once the run is complete."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """Configuration of one training run.

    Attributes:
        run_dir: folder of the states, the metrics and the trained model; training resumes if the folder holds a run.
        init_from: checkpoint that a new run starts from, of any format that the package reads, or its name on the hub;
            or empty.
        config: configuration of the model, or the name of a preset; `None`: that of `init_from`. With `init_from`, a
            larger T5 is grown from the checkpoint (`growth`). Without, parameters are random.
        vocabulary: path of the vocabulary; empty: the one beside `init_from`.
        dropout: rate of dropout; `None`: that of the configuration. T5's recipe has 0.1.
        dtype: dtype of the computation, float32 or bfloat16; parameters and optimiser state are float32.
        mesh: numbers of devices (data, model). The batch is split over the first axis; attention heads, feed-forward
            units and the vocabulary over the second. The training state is spread over both (`partition`).
        accumulate: number of parts that a batch is divided into, one after the other, to save memory.
        remat: whether gradients recompute each layer instead of keeping its intermediate values, to save memory.
        scan_layers: whether layers are a scan over stacked parameters; `None`: as the configuration says.
        corpus, validation: the training corpus, and the corpus of the validation loss and of the acceptance rate;
            without `validation` neither is computed.
        schedule, optimizer, objective: settings of learning rate, optimiser and loss.
        distillation: settings of distillation from a teacher, which has the dtype of the computation; `None`: no
            teacher.
        seed: random seed of parameters, dropout and data order.
        log_every, evaluate_every: number of steps between records and between evaluations; save_every_minutes: minutes
            between saves of the resumable state.
        loss_batches: number of batches of `validation` for the validation loss.
        acceptance_of: checkpoint of the target under which the trained model will draft; its acceptance rate on
            `loss_batches` batches is logged at every evaluation. Empty: the teacher's, or none.
        task: the task, or its name, whose metrics are computed on its first `examples` examples; empty: none.
        split: the split of the task, or a part of its only split (`corpus.examples_of`); `None`: its first. If the
            corpus trains on the same file, the task holds out the same rows as the corpus (`held_out`).
        examples: number of the task's examples; shown: number of outputs that are printed at every evaluation.
    """

    run_dir: str
    init_from: str = ""
    config: Config | str | None = None
    vocabulary: str = ""
    dropout: float | None = None
    dtype: str = "float32"
    mesh: tuple[int, int] = (1, 1)
    accumulate: int = 1
    remat: bool = False
    scan_layers: bool | None = None
    corpus: Corpus
    validation: Corpus | None = None
    schedule: Schedule
    optimizer: Optimizer = Adafactor()
    objective: Objective = Objective()
    distillation: Distillation | None = None
    seed: int = 0
    log_every: int = 50
    evaluate_every: int = 500
    save_every_minutes: float = 3.0
    loss_batches: int = 8
    acceptance_of: str = ""
    task: str | Task = ""
    split: str | None = None
    examples: int = 128
    shown: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", meshes.checked(self.mesh))
        for name in ("accumulate", "log_every", "evaluate_every", "loss_batches", "examples"):
            whole(name, getattr(self, name), 1)
        whole("shown", self.shown, 0)
        check_seed(self.seed)
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r}: training computes in float32 or bfloat16")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is not a rate: give a number in [0, 1)")
        if not self.init_from and self.config is None:
            raise ValueError(
                "there is no model: give init_from (a checkpoint), or config (a preset or a configuration)"
            )
        if self.task:
            task = table.get_task(self.task)
            splits = dict.fromkeys((*task.splits, *training_task(task, HELD_OUT).splits))
            if self.split not in (None, *splits):
                raise ValueError(f"task {task.name} has no split {self.split!r}; its splits: {', '.join(splits)}")

    def check_folder(self) -> None:
        """Raises a ValueError if the run has no folder; only `experiments.preflight` works without one."""
        if not self.run_dir.strip():
            raise ValueError(f"run_dir={self.run_dir!r} is no folder: name the run's folder (--gin.RUN_DIR)")

    @property
    def scored(self) -> Task:
        """The task whose metrics are computed; it holds out the same rows of a file as the corpus (`held_out`)."""
        return held_out.divided_as(self.task, self.split, self.corpus)

    def check_held_out(self) -> None:
        """Checks that evaluations use no example that the corpus trains on; warns if they use the corpus's split.

        Raises:
            ValueError: some held-out examples would be training examples (`held_out.check`).
        """
        if self.task:
            held_out.check(self.corpus, self.scored, self.split, "the task")
        for part in held_out.parts(self.validation):
            if isinstance(part, TaskCorpus):
                held_out.check(self.corpus, part.resolved, part.split, "the validation corpus")

    @functools.cached_property
    def model(self) -> Model:
        """The model to train, on its mesh, without parameters.

        Raises:
            ValueError: the model is a draft that belongs to a target, it has no dropout but `dropout` is set, or the
                mesh does not fit it.
        """
        model: Any = model_from(self.configuration)
        if isinstance(model, AttachedModel):
            raise ValueError(
                f"a draft that belongs to a target cannot be trained alone: {self.init_from or self.config} is "
                f"{model.about}; choose a model that writes alone"
            )
        if self.devices is not None:
            sharding.check(model.config, self.mesh, self.init_from or "the model")
            model = dataclasses.replace(model, mesh=self.devices)
        return cast(Model, model)

    @functools.cached_property
    def start(self) -> str:
        """The local path of `init_from`, or an empty text; a model of the hub is fetched."""
        return str(located(self.init_from)) if self.init_from else ""

    @functools.cached_property
    def configuration(self) -> Config:
        """The configuration of the model to train; of a checkpoint, only names and shapes are read.

        Raises:
            ValueError: the model has no dropout but `dropout` is set.
        """
        config = self.config
        if config is None or isinstance(config, str):
            config = checkpoints.named(config or self.start).config
        changes: dict[str, Any] = {"dtype": self.dtype}
        if self.scan_layers is not None:
            changes["scan_layers"] = self.scan_layers
        if self.dropout and not hasattr(config, "dropout_rate"):
            raise ValueError(f"dropout={self.dropout}: decoder-only models have no dropout; leave it out, or give 0")
        if self.dropout is not None and hasattr(config, "dropout_rate"):
            changes["dropout_rate"] = self.dropout
        return cast(Config, dataclasses.replace(cast(Any, config), **changes))

    @functools.cached_property
    def devices(self) -> Mesh | None:
        """The mesh of devices; `None`: one device."""
        return meshes.make(self.mesh)

    @functools.cached_property
    def text(self) -> FileVocabulary:
        """The vocabulary, with the sentinels of a T5 and the stop ids of the checkpoint.

        Raises:
            ValueError: a piece that texts can contain has no row in the model's embedding (`pairs.pair.check_room`).
        """
        source = located(self.vocabulary, hub.VOCABULARY) if self.vocabulary else expanded(self.start)
        if not str(self.vocabulary or self.init_from):
            raise ValueError("there is no vocabulary: give the path of its file")
        model = self.model
        vocabulary = for_target(load_vocabulary(source), expanded(self.start or self.run_dir), model.config)
        pieces, entries = vocabulary.vocab_size, model.config.vocab_size
        if not self.init_from and pieces != entries:
            raise ValueError(f"{source} has {pieces} pieces, but the model's vocab_size is {entries}")
        rows = min(entries, model.config.num_embeddings)
        check_room(self.init_from or "the model", vocabulary, rows)
        if vocabulary.bos_id is not None and vocabulary.bos_id >= rows:
            raise ValueError(
                f"{source} begins texts with id {vocabulary.bos_id}, but the model has {rows} rows: give its vocabulary"
            )
        return vocabulary

    def initial(self) -> Params:
        """Returns the float32 parameters that a new run starts from: random, or those of `init_from`, perhaps grown."""
        if not self.init_from:
            return self._random()
        if self.config is None:
            return load_float32(self.start, self.scan_layers).params
        stored, wanted = checkpoints.named(self.start).config, self.model.config
        if not isinstance(stored, T5Config) or not isinstance(wanted, T5Config):
            raise ValueError(f"only a T5 can be enlarged: leave config out, so that {self.init_from} gives it")
        growth.check(stored, wanted)
        return growth.grow(load_float32(self.start, False).params, stored, wanted, self._random())

    def _random(self) -> Params:
        model: Any = dataclasses.replace(cast(Any, self.model), mesh=None)
        return random_params(model, jax.random.key(self.seed))

    def shapes(self) -> Params:
        """Returns the shapes of the parameters; nothing is allocated."""
        return jax.eval_shape(self._random)

    def layout(self) -> runs.TrainState:
        """Returns the shapes of the training state, with their layout on the mesh."""
        return partition.state_layout(self.shapes(), self.optimizer, self.devices)


def random_params(model: Any, key: jax.Array) -> Params:
    """Returns random parameters of a model, as its initialisers draw them."""
    tokens = jax.numpy.ones((1, 2), "int32")
    inputs = (tokens, tokens) if model.is_encoder_decoder else (tokens,)
    params: Params = jax.jit(model.module.init)(key, *inputs)["params"]
    return params


def load_float32(path: str, scan_layers: bool | None = None) -> BoundModel:
    """Returns the model of a checkpoint, with its parameters cast to float32; `scan_layers` is as in `Trainer`."""
    model, params = checkpoints.load(path, scan_layers=scan_layers)
    return BoundModel(params=params, model=model)


def trained(trainer: Trainer) -> tuple[BoundModel, int]:
    """Returns the model in the saved state of a run, and the number of steps that it was trained for.

    Raises:
        FileNotFoundError: the run has not saved anything yet.
        ValueError: the run has no folder.
    """
    trainer.check_folder()
    saved = open_states(expanded(trainer.run_dir)).latest(trainer.layout())
    if saved is None:
        raise FileNotFoundError(f"{trainer.run_dir} holds no saved state; train first (--mode=train)")
    params = partition.for_decoding(saved[0].params, trainer.devices)
    return BoundModel(params=params, model=cast(Any, trainer.model)), int(saved[0].step)


def export(trainer: Trainer, output: Path, dtype: str) -> dict[str, int]:
    """Writes the weights in the saved state of a run to `output` as a checkpoint.

    Returns the number of training steps and the number of parameters.
    """
    bound, step = trained(trainer)
    checkpoints.save(output, cast(Any, bound.model), partition.on_host(bound.params), dtype=dtype)
    return {"step": step, "parameters": count(bound.params)}


def write_model(folder: Path, model: Model, params: Params, vocabulary: FileVocabulary) -> None:
    """Writes a trained model with its vocabulary, so that the folder can be a target or a draft.

    Args:
        folder: the checkpoint's folder; a model of this format that it holds is replaced.
        model: the model.
        params: arrays of NumPy.
        vocabulary: the vocabulary, whose file is copied.
    """
    contents = {folder / file.name: file.read_bytes() for file in beside(vocabulary.path)}
    for path, content in contents.items():
        # A folder with other files is not replaced. These files may be from an earlier call, so they are removed first.
        if path.is_file() and path.read_bytes() == content:
            path.unlink()
    checkpoints.save(folder, model, params, overwrite=True)
    for path, content in contents.items():
        write_atomically(path, content)


def beside(path: Path) -> list[Path]:
    """Returns a vocabulary's file, and the files in its folder that name its special tokens and stop ids."""
    # without `config.json`, because the model writes its own
    names = (*NAMING, ADDED, NUMBERING[0])
    return [path, *(file for name in names if (file := path.parent / name).is_file())]
