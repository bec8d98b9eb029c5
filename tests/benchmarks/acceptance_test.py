"""The section for model cards against what can be computed by hand."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks import acceptance
from benchmarks.setting import Bench, Sizes, quick
from speccascade_jax.core.names import TARGET
from speccascade_jax.evaluation.points import Settings, recorded

EXAMPLES = 35  # a batch and a part of one
SMALL = dataclasses.replace(quick(Sizes(acceptance_task="tiny_translation")), acceptance_examples=EXAMPLES)


def test_agreement_is_that_of_the_laws_along_the_outputs(tabular):
    bench, task = Bench(SMALL, tabular), acceptance.get_task("tiny_translation")
    prompts = acceptance.prompts_of(bench, task, [task.build_prompt(example) for example in task.load(limit=EXAMPLES)])
    # sampled outputs: greedy ones of a table are all alike
    outputs = acceptance.write(bench, recorded(Settings(method=TARGET)), 1.0, prompts, task)
    found = acceptance._agreement(bench, prompts, outputs)
    p, q = (np.asarray(jax.nn.softmax(bound.params)) for bound in (tabular.target, tabular.draft))
    pending = np.take_along_axis(np.asarray(prompts.tokens), np.asarray(prompts.length)[:, None] - 1, axis=1)
    before = np.concatenate([pending, outputs.tokens[:, :-1]], axis=1)
    seen = before[np.arange(before.shape[1])[None] < outputs.lengths[:, None]]
    assert found["positions"] == len(seen) > 8 * 32
    assert found["shared_mass"] == pytest.approx(np.minimum(p, q)[seen].sum(-1).mean(), rel=1e-5)
    assert found["greedy_agreement"] == pytest.approx((p[seen].argmax(-1) == q[seen].argmax(-1)).mean())
    assert 0.1 < found["shared_mass"] < 0.9


def test_a_draft_that_is_the_target_is_always_accepted(tabular):
    found = acceptance.run(Bench(SMALL, dataclasses.replace(tabular, draft=tabular.target)))
    assert found["agreement"][0]["greedy_agreement"] == 1.0
    assert found["agreement"][0]["shared_mass"] == pytest.approx(1.0)
    rows = {(row["method"], row["temperature"]): row for row in found["acceptance"]}
    assert rows["spec_decode", 0.0]["acceptance_rate"] == 1.0 == rows["spec_decode", 1.0]["acceptance_rate"]
    assert rows["spec_decode", 0.0]["quality"] == rows["autoregressive", 0.0]["quality"]
    assert rows["spec_decode", 0.0]["block_efficiency"] > 2 and "acceptance_rate" not in rows["autoregressive", 0.0]
