"""A task's examples as a session takes them: enough of them, and none longer than prompts may be."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

from speccascade_jax.data.tasks.task import Example, Task
from speccascade_jax.evaluation.points import Evaluation
from speccascade_jax.metrics import quality
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.prompts import text_ids


class Fitted(NamedTuple):
    """Examples and their prompts' token ids, and how many prompts were too long: cut, or passed over."""

    examples: list[Example]
    prompts: list[list[int]]
    cut: int = 0
    skipped: int = 0

    def told(self) -> dict[str, int]:
        """What records say of it, where there is something to say."""
        counts = {"prompts_cut": self.cut, "prompts_skipped": self.skipped}
        return {name: count for name, count in counts.items() if count}


def _wanted(asked: Evaluation) -> int:
    return asked.first_example + max(asked.quality_examples, asked.latency_examples)


def load(task: Task, asked: Evaluation) -> list[Example]:
    """The examples that an evaluation asks for, from the split's first one on; all, where some may be passed over.

    Raises:
        ValueError: there are fewer.
    """
    wanted = _wanted(asked)
    examples = task.load(asked.split, None if task.too_long == "skip" else wanted)
    _check_references(task, examples)
    if len(examples) < wanted:
        raise ValueError(
            f"{task.name} has {len(examples)} examples in split {asked.split!r}, fewer than "
            f"the {wanted} asked for: lower quality_examples, latency_examples or first_example "
            f"(of a calibration: search_, test_ or held_out_examples)"
        )
    return examples


def _check_references(task: Task, examples: Sequence[Example]) -> None:
    """Refuse several references where a metric compares with one, before anything is decoded."""
    alone = [name for name in task.metrics if not quality.get_metric(name).several]
    for each in examples if alone else ():
        if not isinstance(each.reference, str) and len(each.reference) > 1:
            raise ValueError(
                f"{task.name}: example {each.id} has {len(each.reference)} references; {alone[0]} compares with one: "
                f"choose metrics that take the best of several"
            )


def fit(pair: Pair, task: Task, asked: Evaluation, examples: Sequence[Example]) -> Fitted:
    """Examples with their prompts, each cut to the task's length or passed over, as the task says; warns of both.

    Raises:
        ValueError: too few are left.
    """
    kept, prompts, long, wanted = list[Example](), list[list[int]](), 0, _wanted(asked)
    skip, longest = task.too_long == "skip", task.max_input_length
    for example in examples:
        if len(kept) == wanted:
            break
        too_long = list[bool]()

        def cut(ids: list[int], room: int, said: list[bool] = too_long) -> list[int]:
            said += [True] * (len(ids) > room)
            return task.cut(ids, room)

        ids = text_ids(pair, task.build_prompt(example), longest, cut)
        long += bool(too_long)
        if not (skip and too_long):
            kept.append(example)
            prompts.append(ids)
    if len(kept) < wanted:
        raise ValueError(
            f"{task.name} has {len(kept)} examples of at most {longest} tokens, fewer than the {wanted} asked for: ask "
            f"for fewer, raise max_input_length, or cut them (too_long='cut')"
        )
    found = Fitted(kept, prompts, 0 if skip else long, long if skip else 0)
    if long:
        done = "passed over" if skip else "cut"
        warnings.warn(f"{task.name}: {long} prompts of more than {longest} tokens were {done}", stacklevel=3)
    return found
