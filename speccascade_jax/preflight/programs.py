"""Programs of a pair of models and a decoding method, traced from shapes for devices that this machine does not have.

Nothing is allocated or read: parameters, prompts and states are `jax.ShapeDtypeStruct`s with their layout on the
devices. The compiled functions are those that `decode`, sweeps and training run.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, PartitionSpec

from speccascade_jax import checkpoints
from speccascade_jax.core import names, rngs
from speccascade_jax.core.checks import whole
from speccascade_jax.core.types import BoundModel, Controls, Packed, Params, Prompt, PyTree
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import generate
from speccascade_jax.engine.loop import one_round
from speccascade_jax.methods import table
from speccascade_jax.methods.method import Method, Program, run
from speccascade_jax.methods.settings import AUTO, Settings
from speccascade_jax.models import sharding
from speccascade_jax.models.families import Model, family_of
from speccascade_jax.models.layers import fused_names
from speccascade_jax.models.stacks import stacked_shapes
from speccascade_jax.models.teacher_forcing import features
from speccascade_jax.pairs.derived import derive, is_derived
from speccascade_jax.pairs.head_files import Card, Head
from speccascade_jax.pairs.pair import Pair, fitted_head
from speccascade_jax.preflight import training
from speccascade_jax.preflight.chips import chip_of
from speccascade_jax.preflight.topologies import devices, mesh_of, sharding_of
from speccascade_jax.preflight.training import Training
from speccascade_jax.runtime import mesh as meshes
from speccascade_jax.runtime import platforms
from speccascade_jax.stopping import acceptance_head

PARTS = ("prefill", "round", "generation", "target", "draft", "train")
DTYPES = ("bfloat16", "float32", "int8")
DEPTH = 4
"""Number of residual blocks of an acceptance head: the largest that training tries (Huang et al., 2024, SpecDec++)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program to compile, and the devices to compile it for.

    Attributes:
        target, draft: names of presets (`models.families.PRESETS`) or paths of checkpoints, of which only names and
            shapes are read. A draft may be a name such as "exit:2", which uses the target's first two layers; `None`:
            the target drafts for itself.
        others: pairs (name, model) of further drafts.
        topology: "CHIP:SIZES" (`topologies.devices`).
        mesh: (data, model), as for `sc.Pair.load`; draft_whole: whether drafts are replicated on every device.
        batch: number of rows; prompt_length, max_new_tokens: numbers of tokens of a prompt and of an output.
        dtype: dtype of the parameters: "bfloat16", "float32" or "int8" (computed in bfloat16); draft_dtype: dtype of
            the drafts; `None`: the same as `dtype`.
        part: the part of decoding to compile: "prefill" (the models read the prompts), "round" (draft, score, verify,
            commit), "generation" (prefill and all rounds), "target" or "draft" (one token of this model alone), or
            "train" (one training step of the target).
        scan_layers: whether layers run as a scan over stacked parameters (`models.stacks`); `None`: only in deep
            models.
        settings: settings of `sc.decode`, by name.
        training: settings of the part "train". For this part, `batch` is the number of rows, and the two lengths are
            those of the encoder's input and of the target output (for a decoder-only model: of prompt and answer).

    Raises:
        ValueError: a field has an invalid value.
    """

    target: str
    draft: str | None = None
    others: tuple[tuple[str, str], ...] = ()
    topology: str = "v5e"
    mesh: tuple[int, int] = (1, 1)
    draft_whole: bool = False
    batch: int = 1
    prompt_length: int = 80
    max_new_tokens: int = 80
    dtype: str = "bfloat16"
    draft_dtype: str | None = None
    part: str = "round"
    scan_layers: bool | None = None
    settings: Settings = field(default_factory=Settings)
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", meshes.checked(self.mesh))
        if self.part not in PARTS:
            raise ValueError(f"part={self.part!r}: {names.hint(self.part, PARTS)}choose one of {', '.join(PARTS)}")
        for name in ("dtype", "draft_dtype"):
            value = getattr(self, name)
            if value not in DTYPES and not (name == "draft_dtype" and value is None):
                raise ValueError(f"{name}={value!r}: choose one of {', '.join(DTYPES)}")
        if "int8" in (self.dtype, self.draft_dtype) and tuple(self.mesh) != (1, 1):
            raise ValueError(f"mesh={tuple(self.mesh)}: 8-bit weights work on one device only: choose bfloat16")
        for name in ("batch", "prompt_length", "max_new_tokens"):
            whole(name, getattr(self, name), 1)
        chip_of(self.topology)
        if self.part == "train":
            training.check(self)

    def as_values(self) -> dict[str, Any]:
        """Returns the job as JSON values, without settings that have their default values; objects become texts."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        usual, plain = Settings(), (str, int, float, bool, type(None))
        chosen = {name: value for name, value in vars(self.settings).items() if value != getattr(usual, name)}
        settings = {name: value if isinstance(value, plain) else str(value) for name, value in chosen.items()}
        values |= {"settings": settings, "training": self.training.as_values()}
        return values | {"mesh": list(self.mesh), "others": dict(self.others)}


@dataclass(frozen=True, eq=False)
class Traced:
    """A job with the shapes of its models, its decoding method and its devices, from which its program is traced.

    Attributes:
        job: the program to compile.
        mesh: the mesh of devices; `None`: a single device.
    """

    job: Job
    mesh: Mesh | None

    @classmethod
    def of(cls, job: Job) -> Traced:
        """Returns a job with the mesh of its devices.

        Raises:
            ValueError: unknown devices, models or settings; a mesh that does not fit them.
            ImportError: the compiler of the devices is not installed.
        """
        return cls(job, mesh_of(job.topology, job.mesh))

    @cached_property
    def pair(self) -> Pair:
        """The models, with the shapes of their parameters instead of values."""
        job = self.job
        target = self._bound(job.target, job.dtype, whole=False)
        drafts = {"draft": job.draft or job.target, **dict(job.others)}
        bound = {name: self._draft(name, source, target) for name, source in drafts.items()}
        size = max(target.model.vocab_size, *(draft.model.vocab_size for draft in bound.values()))
        target, *fitted = (_with_vocabulary(model, size) for model in (target, *bound.values()))
        models = dict(zip(bound, fitted, strict=True))
        return Pair(target, models.pop("draft"), others=models, name=f"{job.draft} under {job.target}")

    def _draft(self, name: str, source: str, target: BoundModel) -> BoundModel:
        if is_derived(source):
            return derive(source, target, None)
        return fitted_head(self._bound(source, self.job.draft_dtype or self.job.dtype, self.job.draft_whole), target)

    def _bound(self, source: str, dtype: str, whole: bool) -> BoundModel:
        model: Any = checkpoints.named(source)
        # As in `checkpoints.load`, layers with 8-bit weights never run as a scan.
        scanned = False if dtype == "int8" else self.job.scan_layers
        config = dataclasses.replace(
            model.config, dtype="float32" if dtype == "float32" else "bfloat16", scan_layers=scanned
        )
        if self.mesh is not None and not whole:  # A replicated draft runs as if on one device (`checkpoints.load`).
            sharding.check(config, self.job.mesh, source)
            model = dataclasses.replace(model, mesh=self.mesh)
        model = dataclasses.replace(model, config=config)
        return BoundModel(params=self._params(model, dtype, whole), model=model)

    def _params(self, model: Model, dtype: str, whole: bool) -> Params:
        """Returns the shapes of a model's parameters, in the layout of `checkpoints.load(prepared=True)`."""
        shapes = dict(family_of(model.config).shapes(model.config))
        for fused, parts in fused_names(shapes).items():
            columns = [shapes.pop(part) for part in parts]
            shapes[fused] = (*columns[0][:-1], sum(shape[-1] for shape in columns))
        shapes = stacked_shapes(shapes) if model.config.scanned else shapes

        def leaf(path: str, shape: tuple[int, ...]) -> Any:
            spec = PartitionSpec() if whole or self.mesh is None else sharding.spec_of(path)
            matrix = path.endswith("/kernel") or (path.endswith("/embedding") and model.config.tied)
            if dtype == "int8" and matrix:
                return self._packed(shape, turned=path.endswith("/embedding"))
            return self.shape(shape, "bfloat16" if dtype == "int8" else dtype, spec)

        return unflatten_dict({path: leaf(path, shape) for path, shape in shapes.items()}, sep="/")

    def _packed(self, shape: tuple[int, ...], turned: bool) -> Packed:
        if len(shape) == 3:  # kernels of experts
            scales = shape[0] * shape[2]
            return Packed(self.shape(shape, "int8"), self.shape((scales,), "float32"), scales, stacked=True)
        inputs, columns = shape[::-1] if turned else shape
        panel, scales = self.shape((1, inputs, columns), "int8"), self.shape((columns,), "float32")
        return Packed(panel, scales, columns, turned)

    def shape(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec | None = None) -> Any:
        """Returns an array's shape with its layout on the devices, a `jax.ShapeDtypeStruct`."""
        layout = sharding_of(self.job.topology, self.mesh, PartitionSpec() if spec is None else spec)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=layout)

    @cached_property
    def method(self) -> Method:
        """The decoding method that the settings name; for the parts "target" and "draft", decoding with one model."""
        alone = {"target": names.TARGET, "draft": names.DRAFT}
        return table.get(alone.get(self.job.part, self.settings.method))

    @cached_property
    def settings(self) -> Settings:
        """The settings, complete with the method's defaults."""
        asked = self.job.settings
        if self.job.part in ("target", "draft"):
            name = names.TARGET if self.job.part == "target" else names.DRAFT
            sampling = {part: getattr(asked, part) for part in ("temperature", "top_p", "top_k")}
            asked = Settings(method=name, **sampling)
        return asked

    @cached_property
    def program(self) -> tuple[Program, Params]:
        """The engine (or a sequence of generations, if the method has several), and the shapes of its parameters."""
        head = _ShapesHead.of(self.pair) if self.method.needs_head(self.settings) else None
        if self.settings.block_size == AUTO:
            raise ValueError(
                "block_size='auto' chooses among programs by costs that are measured while it decodes, so it cannot be "
                "compiled ahead: give a number"
            )
        return self.method.program(self.pair, self.settings, (1,), head)

    @property
    def one_engine(self) -> Engine | None:
        """The engine; `None` for a training step and for methods that run more than one generation."""
        program = None if self.job.part == "train" else self.program[0]
        return program if isinstance(program, Engine) else None

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            ValueError: the method runs more than one generation.
        """
        program = self.one_engine
        if program is None:
            raise ValueError(
                f"{self.method.called} runs more than one generation, so it has no {self.job.part}: compile "
                f"part='generation', or the parts 'target' and 'draft'"
            )
        return program

    @cached_property
    def prompt(self) -> Prompt:
        """The shapes of the prompts."""
        rows, width, spec = self.job.batch, self.job.prompt_length, sharding.ROWS if self.mesh else None
        if rows % self.job.mesh[0]:
            raise ValueError(
                f"a batch of {rows} is not divisible by the {self.job.mesh[0]} parts that mesh={self.job.mesh} spreads "
                f"rows over: give a multiple of {self.job.mesh[0]}"
            )
        tokens, lengths = self.shape((rows, width), "int32", spec), self.shape((rows,), "int32", spec)
        if self.pair.encoder_decoder:
            return Prompt(self.shape((rows, 1), "int32", spec), lengths, tokens, lengths)
        return Prompt(tokens, lengths)

    @cached_property
    def controls(self) -> Controls:
        """The shapes of the sampling settings, which have one value per row."""
        spec = sharding.ROWS if self.mesh else None
        values = self.method.controls(self.settings, self.job.batch)
        return jax.tree.map(lambda x: self.shape(np.shape(x), np.asarray(x).dtype, spec), values)

    @cached_property
    def state(self) -> PyTree:
        """The shapes of the state between two rounds, with the layout of the models' caches."""
        start = jax.eval_shape(self._begin, *self._begin_arguments)
        if self.mesh is None:
            return jax.tree.map(lambda x: self.shape(x.shape, x.dtype), start)
        return jax.tree_util.tree_map_with_path(self._laid_out, start)

    def _laid_out(self, path: Any, leaf: Any) -> Any:
        """Returns a leaf of the state with its layout on the devices.

        XLA chooses the layout of distributions and of replicated drafts' states, as it does inside a generation.
        """
        name = jax.tree_util.keystr(path)
        if ".laws" in name or (self.job.draft_whole and ".drafter" in name):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        rows = leaf.shape[:1] == (self.job.batch,)
        cached = ".keys[" in name or ".values[" in name or ".cross[" in name
        spec = sharding.ROWS if rows else PartitionSpec()
        if cached and leaf.ndim in (3, 4):  # If layers run in a scan, their caches have an axis of layers first.
            spec = sharding.HEADS if leaf.ndim == 3 else sharding.STACKED_HEADS
        if leaf.ndim == 3 and name.endswith(".bias"):
            spec = sharding.BIAS
        return self.shape(leaf.shape, leaf.dtype, spec)

    @property
    def _begin_arguments(self) -> tuple[Any, ...]:
        spec = sharding.ROWS if self.mesh else None
        return (
            self.program[1],
            self.prompt,
            self.shape((), "uint32"),
            self.shape((self.job.batch,), "int32", spec),
        )

    def _begin(self, params: Params, prompt: Prompt, seed: Any, ids: Any) -> PyTree:
        return self.engine.init(params, prompt, rngs.root(seed), ids, self.job.max_new_tokens)

    def lower(self) -> jax.stages.Lowered:
        """Returns the program of the job's part, lowered for the devices."""
        lowered: jax.stages.Lowered = getattr(self, f"_lower_{self.job.part}", self._lower_round)()
        return lowered

    def _lower_prefill(self) -> Any:
        return jax.jit(self._begin).lower(*self._begin_arguments)

    def _lower_round(self) -> Any:
        engine = self.engine

        def one(params: Params, state: PyTree, controls: Controls) -> PyTree:
            return one_round(engine, params, state, controls)[0]

        # As in the loop over rounds, the compiler chooses the layout of the state, and writes caches in place.
        free = jax.tree.map(lambda leaf: Format(Layout.AUTO, leaf.sharding), self.state)
        jitted = jax.jit(one, in_shardings=(None, free, None), out_shardings=free, donate_argnums=1)
        return jitted.lower(self.program[1], self.state, self.controls)

    def _lower_generation(self) -> Any:
        program, params = self.program
        _, prompt, seed, ids = self._begin_arguments
        whole = partial(run, program) if not isinstance(program, Engine) else partial(generate, program)
        numbers = {"max_new_tokens": self.job.max_new_tokens}

        def all_rounds(params: Params, prompt: Prompt, seed: Any, ids: Any, controls: Controls) -> Any:
            return whole(params, prompt, seed, controls=controls, example_ids=ids, **numbers)

        return jax.jit(all_rounds).lower(params, prompt, seed, ids, self.controls)

    def _lower_train(self) -> Any:
        return training.lower(self.job, self.mesh)

    @cached_property
    def drafted(self) -> int:
        """Number of passes of the draft model in a round that drafts a full block."""
        engine = self.engine
        return engine.block + int(engine.complete) if engine.block else 0

    def on_platform(self) -> AbstractContextManager[None]:
        """Returns a context in which programs are traced for the devices."""
        kind = devices(self.job.topology)[0].device_kind
        return platforms.traced_for("cuda" if chip_of(self.job.topology).is_gpu else "tpu", kind)

    @property
    def first_pass_feeds_two(self) -> bool:
        """Whether the draft's first pass is outside the loop that drafts (`ModelDrafter.feeds_two`)."""
        drafter = self.engine.drafter
        with self.on_platform():
            return isinstance(drafter, ModelDrafter) and drafter.feeds_two(self.engine.complete)

    @property
    def cache_shapes(self) -> frozenset[tuple[str, tuple[int, ...]]]:
        """The dtypes and shapes of the caches' keys and values on one device."""
        shapes = set()
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.state):
            name = jax.tree_util.keystr(path)
            if ".keys[" in name or ".values[" in name:
                local = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
                shapes.add((_XLA_NAMES.get(str(leaf.dtype), str(leaf.dtype)), tuple(local)))
        return frozenset(shapes)


class _ShapesHead(Head):
    """Shapes of an acceptance head with the largest depth that training tries; it fits any draft."""

    @classmethod
    def of(cls, pair: Pair) -> Head:
        width = features(pair.draft) or 0
        params = jax.eval_shape(lambda key: acceptance_head.initial(key, width, DEPTH), jax.random.key(0))
        return cls(params, cast(Card, None))

    def check(self, draft: BoundModel, pair: str) -> None:
        """Accepts every draft: no weights are compared."""


_XLA_NAMES = {"bfloat16": "bf16", "float32": "f32", "float16": "f16", "int8": "s8"}


def _with_vocabulary(bound: BoundModel, size: int) -> BoundModel:
    """Returns a model whose vocabulary has `size` real entries, as a shared vocabulary would give it."""
    model: Any = bound.model
    if not isinstance(getattr(model, "config", None), object) or model.vocab_size == size:
        return bound
    rows = model.config.num_embeddings
    config = dataclasses.replace(model.config, vocab_size=size, missing_rows=max(0, size - rows))
    return BoundModel(params=bound.params, model=dataclasses.replace(model, config=config))
