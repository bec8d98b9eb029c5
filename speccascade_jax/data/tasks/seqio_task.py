"""Tasks from the registry of seqio, which can be used in place of a task's name.

seqio is imported only when a task is read, because it loads TensorFlow (860 MB).

Source and reference are the registered `inputs` and `targets` before tokenisation (`…_pretokenized`, or the features
themselves if they are strings). The pair's own vocabulary tokenises them, not seqio's. If a task has token ids only,
the vocabulary with which the task was registered decodes them.

Examples come in seqio's order, without shuffling, and an example's id is its position in this order. A Mixture draws
from its tasks with a fixed seed and ends with the first exhausted task. seqio cannot pass its seed to a
`FunctionDataSource`. So a preprocessor that draws random numbers gives other examples in every run if it reads such a
source.
"""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from speccascade_jax.core import names
from speccascade_jax.core.checks import several
from speccascade_jax.data.tasks.task import Example, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqioTask(Task):
    """A Task or Mixture of seqio's registry, as a value that can be used in place of a task's name.

    All fields are plain values, so that gin can bind the task and a record can store it. The fields add lengths and
    metrics, which seqio does not have. The module's docstring describes prompts, references and their order.

    Attributes:
        module: the module whose import registers the task; empty if the task is registered already.
        registered: the name in seqio's registry, if it differs from `name`.
        splits: as in `Task`; whether a split is registered is checked when it is read.
        max_input_length, max_output_length: as in `Task`, but without a default; longer prompts are cut.
        prefix: the beginning of every registered input, such as "summarize: ". It is removed from the source, and
            `build_prompt` adds it again. So the prompt equals the registered input, whether or not this field is set.

    Raises:
        ValueError: a string is given in place of a tuple of strings.

    Examples:
        >>> from speccascade_jax.extend import Example, SeqioTask
        >>> task = SeqioTask(
        ...     name="wmt_t2t_ende_v003", module="t5.data.tasks", prefix="translate English to German: ",
        ...     max_input_length=128, max_output_length=128,
        ... )
        >>> task.build_prompt(Example(id=0, source="Good day.", reference="Guten Tag."))
        'translate English to German: Good day.'
    """

    max_input_length: int = dataclasses.field()
    max_output_length: int = dataclasses.field()
    splits: tuple[str, ...] = ("validation", "test", "train")
    module: str = ""
    registered: str = ""
    read: Callable[[str], Iterable[Example]] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for field in ("splits", "metrics"):
            object.__setattr__(self, field, several(field, getattr(self, field)))
        reader = functools.partial(read, self.registered or self.name, self.module, self.prefix)
        object.__setattr__(self, "read", reader)


def read(name: str, module: str, prefix: str, split: str) -> Iterator[Example]:
    """Yields the examples of a split of a Task or Mixture of seqio.

    Args:
        name: the name in seqio's registry of Tasks or of Mixtures.
        module: a module that is imported first, to register the task; empty if the task is registered.
        prefix: the beginning of every input, which is removed from the sources.
        split: one of the registered splits.

    Raises:
        ImportError: seqio or the module cannot be imported.
        ValueError: the name or the split is unknown, an input lacks the prefix, or a feature is not text.
        FileNotFoundError: a data set of TensorFlow Datasets is not on this machine.
    """
    seqio = _import_seqio(name)
    provider = _look_up(seqio, name, module)
    splits = list[str]()
    with contextlib.suppress(
        ValueError
    ):  # raised if the data are absent; the later error about the data is more helpful
        splits += sorted(provider.splits)
    if splits and split not in splits:
        raise ValueError(f"seqio's {name} has no split {split!r}; its splits: {', '.join(splits)}")
    for number, record in enumerate(_dataset(seqio, name, provider, split).as_numpy_iterator()):
        source, reference = (_text(record, feature, provider.output_features) for feature in ("inputs", "targets"))
        if not source.startswith(prefix):
            remedy = "leave SeqioTask.prefix empty, or give the registered prefix"
            begins = f"begins with {source[:40]!r}, not with the prefix {prefix!r}"
            raise ValueError(f"example {number} of seqio's {name} {begins}; {remedy}")
        yield Example(number, source.removeprefix(prefix), reference)


def _import_seqio(name: str) -> Any:
    try:
        import seqio
        import tensorflow
    except ImportError as error:
        install = "Install the extra (3 GB): pip install -c constraints.txt -e '.[seqio]'"
        raise ImportError(f"{name} is read through seqio, which cannot be imported ({error}). {install}") from error
    with contextlib.suppress(RuntimeError):  # raised if TensorFlow is in use already: its user has chosen the devices
        # Without this, TensorFlow reserves all GPU memory, which JAX needs, to read a few texts.
        tensorflow.config.set_visible_devices([], "GPU")
    return seqio


def _look_up(seqio: Any, name: str, module: str) -> Any:
    """Imports the module that registers a Task or Mixture, then returns the Task or Mixture."""
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            failed = f"module {module!r}, which should register {name}, cannot be imported ({error})"
            raise ImportError(f"{failed}: add its folder to PYTHONPATH") from error
    known = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
    if name in known:
        return seqio.get_mixture_or_task(name)
    hint = names.hint(name, known)
    cause = (
        f"importing {module} did not register it" if module else "set SeqioTask.module to the module that registers it"
    )
    raise ValueError(f"seqio has no Task or Mixture {name!r}; {hint}{cause} ({len(known)} are registered)")


def _dataset(seqio: Any, name: str, provider: Any, split: str) -> Any:
    """Returns the tf.data.Dataset of a split: one epoch, not shuffled, and with uncut examples."""
    tasks = seqio.get_subtasks(provider)
    takes_seed = not any(isinstance(task.source, seqio.FunctionDataSource) for task in tasks)
    # seqio's cache in memory is off, because it needs the size of the split, and every example is read only once.
    asked: dict[str, Any] = {"sequence_length": None, "split": split, "shuffle": False, "num_epochs": 1}
    asked |= {"seed": 0 if takes_seed else None, "try_in_mem_cache": False}
    try:
        if isinstance(provider, seqio.Mixture):
            with contextlib.suppress(TypeError):  # raised if some tasks lack texts: then only ids are common to all
                return provider.get_dataset(**asked, copy_pretokenized=True)
        return provider.get_dataset(**asked)
    except (AssertionError, OSError, ValueError) as error:  # raised by seqio and TensorFlow Datasets without data
        if absent := [message for task in tasks if (message := _absent(seqio, task.source, split))]:
            raise FileNotFoundError(f"seqio's {name} has no data on this machine. {' '.join(absent)}") from error
        raise


def _absent(seqio: Any, source: Any, split: str) -> str:
    """Returns a text that names the data set that a source lacks and says how to get it.

    The text is empty if the data are present, or if the source is not one of TensorFlow Datasets.
    """
    if not isinstance(source, seqio.TfdsDataSource):
        return ""
    import tensorflow_datasets as tfds

    data_set, folder = source.tfds_dataset.get_split_params(split)
    builder = tfds.builder(data_set, data_dir=folder) if data_set else tfds.builder_from_directory(folder)
    if builder.info.splits:
        return ""
    folder_argument = f", data_dir={folder!r}" if folder else ""
    by_hand = " ".join((builder.MANUAL_DOWNLOAD_INSTRUCTIONS or "").split())
    # `tfds build` is not proposed, because version 4.9.10 always needs apache-beam, even if the data set does not.
    return (
        f"TensorFlow Datasets lacks {data_set} in {builder.data_path}; get it with: python -c "
        f'"import tensorflow_datasets as tfds; tfds.builder({data_set!r}{folder_argument}).download_and_prepare()"'
        + (
            ""
            if folder
            else ". To use another folder, set the environment variable TFDS_DATA_DIR for this command and for the run"
        )
        + (f". The data set's instructions: {by_hand}" if by_hand else "")
    )


def _text(record: Mapping[str, Any], feature: str, features: Mapping[str, Any]) -> str:
    """Returns one feature of an example as text (see the module's docstring).

    Args:
        record: dictionary from a feature to bytes, or to an array `[T]` of token ids.
        feature: the feature's name.
        features: dictionary from a feature to a seqio.Feature, which holds its vocabulary.
    """
    if feature not in record:
        raise ValueError(f"feature {feature!r} is missing in {', '.join(record)}: a task needs 'inputs' and 'targets'")
    value = record.get(f"{feature}_pretokenized", record[feature])
    if not isinstance(value, bytes) and feature in features and np.ndim(value) == 1:
        value = features[feature].vocabulary.decode(record[feature].tolist())
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, str):
        return value
    raise ValueError(
        f"feature {feature!r} is not text, and its vocabulary cannot decode it: {value!r:.80}; register the task with "
        "texts, or with the vocabulary of its token ids"
    )
