"""Tasks that somebody registered with seqio: one stands wherever a name of the table does."""

import dataclasses
import functools
from collections.abc import Callable, Iterable

from speccascade_jax.core.checks import several
from speccascade_jax.data.tasks import seqio_reader
from speccascade_jax.data.tasks.task import Example, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqioTask(Task):
    """A Task or Mixture of seqio's registry, as a value that stands wherever a task's name does.

    All it holds are plain values, so that gin can bind it and a record can write it down: seqio has neither lengths nor
    our metrics. What prompts and references are, and in which order they come, `seqio_reader` says.

    Attributes:
        module: what is imported first, since importing it registers the task; empty if that has happened already.
        registered: the name in seqio's registry, where that is not `name`.
        splits: as in `Task`; whether one is registered shows when it is read.
        max_input_length, max_output_length: as in `Task`, but without a default: a prompt is cut to the former.
        prefix: what every registered input begins with, such as "summarize: ". It is taken off the source, and
            `build_prompt` puts it back; with or without it, the prompt is the registered input.

    Raises:
        ValueError: one string where a tuple of them is meant.
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
        reader = functools.partial(seqio_reader.read, self.registered or self.name, self.module, self.prefix)
        object.__setattr__(self, "read", reader)
