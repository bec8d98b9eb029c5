"""Few-shot tasks, for decoder-only models: a prompt shows some solved records of a data set, then asks the next one.

Which records are shown is fixed: the first of a pool that its reader takes from the data directory. Whatever stands in
the pool is never evaluated, also beyond the exemplars in use, so that the examples are the same for every number of
them. An example's `source` is the whole prompt: what identifies the examples of a record covers template and exemplars.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from speccascade_jax.core.checks import several
from speccascade_jax.data.tasks.task import Example, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One record of a data set as texts: an exemplar, or what is evaluated.

    Attributes:
        id: as `Example.id`.
        question: what is asked, everything included that an answer depends on.
        answer: what is written behind it in an exemplar; evaluated records need none.
        reference: what an output is judged against, as `Example.reference`.
        group: records are shown exemplars of their own group only (the subject in MMLU).
    """

    id: int
    question: str
    answer: str = ""
    reference: str | tuple[str, ...] = ""
    group: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
    """How a prompt is written.

    Attributes:
        question: the text of a record up to where the model goes on; `{question}` stands for the record's.
        answer: what follows in an exemplar, with `{answer}`.
        separator: between exemplars.
        header: the prompt's beginning; `{group}` stands for the record's group. Empty: none.
    """

    question: str = "Question: {question}\nAnswer:"
    answer: str = " {answer}"
    separator: str = "\n\n"
    header: str = ""

    def prompt(self, exemplars: Sequence[Record], record: Record) -> str:
        """The whole text that a model is given for `record`."""
        parts = [self.header.format(group=record.group)] if self.header else []
        parts += [self._asked(one) + self.answer.format(answer=one.answer) for one in exemplars]
        return self.separator.join([*parts, self._asked(record)])

    def _asked(self, record: Record) -> str:
        return self.question.format(question=record.question)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShotTask(Task):
    """A task whose prompts are made of exemplars and a question.

    Attributes:
        records: split -> all records, in an order of which any beginning is a fair sample. Those of the pool may be
            among them.
        pool: () -> the records that exemplars are taken from, in order.
        shots: how many exemplars a prompt shows; "name:shots" is the task with another number.
        template: how they are written.
        stop_strings: the scored text ends before the first of them; a model that goes on writes further questions.
            A `Session`'s generation ends there too where the vocabulary has the string as one token
            (`prompts.stop_ids`), at the beginning of an output as well: that answer is empty. It is not sure to end
            there for "\\n\\n" and the like, which vocabularies with merges also have in tokens with the text before
            it, nor for a string of several tokens.
        clean: what is done to an output before that.

    Raises:
        ValueError: a negative number of exemplars; one string where a tuple is meant. `load`: the pool is too small.
    """

    records: Callable[[str], Iterable[Record]]
    pool: Callable[[], Iterable[Record]] = tuple
    shots: int = 0
    template: Template = Template()
    stop_strings: tuple[str, ...] = ()
    clean: Callable[[str], str] = str.strip
    read: Callable[[str], Iterable[Example]] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.shots < 0:
            raise ValueError(f"task {self.name}: shots={self.shots}; give 0 or more exemplars")
        several("stop_strings", self.stop_strings)
        object.__setattr__(self, "read", self._read)

    def cut(self, ids: list[int], room: int) -> list[int]:
        """The end of a prompt that is too long, since the question stands there: exemplars go first."""
        return ids[max(0, len(ids) - room) :]

    def postprocess(self, text: str) -> str:
        """The output up to the first stop string."""
        text = self.clean(text)
        ends = [at for stop in self.stop_strings if (at := text.find(stop)) >= 0]
        return text[: min(ends, default=len(text))].rstrip()

    def _read(self, split: str) -> Iterator[Example]:
        pools = self._pools()
        reserved = {_spelt(one.question) for pool in pools.values() for one in pool}
        for record in self.records(split):
            if _spelt(record.question) not in reserved:
                prompt = self.template.prompt(self._chosen(pools, record.group), record)
                yield Example(record.id, prompt, record.reference)

    def _pools(self) -> dict[str, list[Record]]:
        pools: dict[str, list[Record]] = defaultdict(list)
        for one in self.pool():
            pools[one.group].append(one)
        return pools

    def _chosen(self, pools: dict[str, list[Record]], group: str) -> list[Record]:
        found = pools.get(group, [])
        if len(found) < self.shots:
            of = f" of {group}" if group else ""
            raise ValueError(
                f"task {self.name} has {len(found)} exemplars{of}, not the {self.shots} asked for; ask for fewer"
            )
        return found[: self.shots]


def with_shots(task: Task, shots: str) -> FewShotTask:
    """A few-shot task with another number of exemplars, called by its name and that number.

    Raises:
        ValueError: the task shows no exemplars, or `shots` is no number.
    """
    if not isinstance(task, FewShotTask):
        raise ValueError(f"task {task.name} has no exemplars; write {task.name!r} without :{shots}")
    if not shots.isdecimal():
        raise ValueError(f"{task.name}:{shots}: {shots!r} is no number of exemplars; write for instance {task.name}:4")
    return dataclasses.replace(task, name=f"{task.name}:{int(shots)}", shots=int(shots))


def _spelt(question: str) -> str:
    """Two questions that differ in case or spaces only are one."""
    return " ".join(question.casefold().split())
