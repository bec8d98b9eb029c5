"""Tests of hierarchies and choices of drafters as values: decoded, streamed, swept and tabulated without code."""

import json
from dataclasses import replace

import gin
import numpy as np
import pytest

import speccascade_jax as sc
from experiments import tables
from speccascade_jax.core import rngs
from speccascade_jax.evaluation import experiment
from speccascade_jax.evaluation.curves import facts
from speccascade_jax.evaluation.heads import asks_head
from speccascade_jax.evaluation.points import Evaluation, Level, ModelPair, Point, Settings, recorded, validate
from speccascade_jax.results.analysis import panels
from speccascade_jax.results.analysis.panels import label as labelled
from speccascade_jax.results.report.tables import table2
from speccascade_jax.results.store import result_store
from speccascade_jax.runtime import gin_flags
from speccascade_jax.runtime.paths import repository_root
from tests.support import conformance, reference, tiny_pair

ROWS = 10_000


def three_tables():
    """Returns logits of a small, a middle and a large tabular model over V = 3."""
    q, middle = conformance.tables(3, seed=21)
    return q, middle, conformance.tables(3, seed=22)[1]


@pytest.fixture(scope="module")
def pair():
    small, middle, large = (sc.TableLM(table) for table in three_tables())
    return sc.Pair(target=large, draft=small, others={"middle": middle})


MIDDLE = Level(model="middle", budget=3, block_size=2)
LOSSY = Level(model="middle", budget=3, block_size=2, rule="opt", alpha=0.2, temperature=0.7)
DEEP = Level(model="middle", budget=4, drafters=(Level(model="draft", budget=2, drafters=("middle",)),))


HEAVY = [pytest.param(drafters, marks=pytest.mark.laws) for drafters in ((DEEP,), (LOSSY,), ("middle",))]


@pytest.mark.parametrize("drafters", [(MIDDLE,), *HEAVY])
def test_a_lossless_rule_keeps_the_targets_distribution_under_any_drafter(pair, drafters):
    out = sc.decode(pair, [[0]] * ROWS, drafters=drafters, temperature=0.9, max_new_tokens=6, seed=3)
    assert out.stats["acceptance_rate"] > 0.2
    law = conformance.law_by_rule(sc.RULES["spec_decode"], *(three_tables()[n] for n in (0, 2)), 0.0, 0.9, 1.0)
    assert conformance.sequence_p_value(np.asarray(out.tokens), law) > 1e-3


@pytest.mark.laws
def test_a_lossy_rule_reads_the_distribution_of_the_lossy_level_below(pair):
    small, middle, large = three_tables()
    settings = {"rule": "token_v3", "alpha": 0.4, "drafters": (LOSSY,), "temperature": 0.9}
    out = sc.decode(pair, [[0]] * ROWS, max_new_tokens=6, **settings)
    handed = reference.transitions("opt", small, middle, 0.2, 0.7)
    law = reference.law_over_handed("token_v3", np.log(np.maximum(handed, 1e-300)), handed, large, 0.4, 0.9)
    assert conformance.sequence_p_value(np.asarray(out.tokens), law) > 1e-3


@pytest.mark.laws
def test_levels_draw_separate_random_bits(pair):
    """A bit shared between levels would correlate draws and decisions: see `core.rngs.below`."""
    out = sc.decode(pair, [[0]] * 4000, drafters=(DEEP,), temperature=1.0, max_new_tokens=6)
    law = conformance.law_by_rule(sc.RULES["spec_decode"], *(three_tables()[n] for n in (0, 2)), 0.0, 1.0, 1.0)
    assert min(conformance.transition_p_values(np.asarray(out.tokens), law)) > 1e-4


@pytest.mark.laws
def test_stream_and_decode_agree_on_a_stack(pair):
    settings = {"rule": "opt", "alpha": 0.2, "drafters": (LOSSY,), "temperature": 1.0, "max_new_tokens": 12, "seed": 4}
    streamed = [token.id for token in sc.stream(pair, [0], **settings)]
    assert streamed == np.asarray(sc.decode(pair, [[0]], **settings).tokens)[0].tolist()


LEVELS = Level(model="middle", budget=3, drafters=(Level(model="draft", budget=2),))


@pytest.mark.parametrize(("chosen", "said"), [
    ({"drafters": MIDDLE}, "drafters=.* is one value where a tuple is meant"),
    ({"drafters": "draft"}, "drafters='draft' is one value where a tuple is meant"),
    ({"drafters": (MIDDLE,), "block_size": 3}, "block_size=3 has no effect where a level drafts"),
    ({"drafters": (MIDDLE,), "stop": "confidence", "stop_threshold": 0.3}, "ends blocks by 'confidence'"),
    ({"drafters": (MIDDLE,), "method": "bild", "stop_threshold": 0.3}, "ends blocks by 'confidence'"),
    ({"drafters": (LOSSY,), "draft_temperature": 0.2}, "draft_temperature=0.2 contradicts the temperature=0.7"),
    ({"drafters": (LOSSY,), "method": "lossy_greedy", "alpha": 0.1}, "defined at temperature 0 only"),
    ({"drafters": (replace(LEVELS, stop="entropy", stop_threshold=1.0),)}, "stop='entropy' of level 'middle'"),
    ({"drafters": (replace(LEVELS, block_size=9),)}, "block_size=9 of level 'middle' has no effect"),
    ({"drafters": ("middle",), "method": "seq_cascade", "alpha": -3.0}, "'seq_cascade' has no drafters"),
    ({"drafters": ("middle",), "method": "autoregressive"}, "'autoregressive' has no drafters"),
    ({"stop": "oracle"}, "stop='oracle' must know beforehand where to stop: use method 'stop_oracle'"),
    ({"drafters": (MIDDLE,), "method": "stop_oracle"}, "ends blocks by 'oracle'"),
    ({"accept": "some"}, "unknown acceptance 'some'"),
    ({"accept": "deferral", "rule": "lossy", "alpha": 0.1}, "lossy"),
    ({"stop": 5}, "stop policy 5 is not a policy"),
    ({"rule": 0.5}, "rule=0.5 is not a name"),
    ({"method": ".a.b"}, "unknown method '.a.b'"),
])  # fmt: skip
def test_unused_settings_and_unknown_names_are_refused_before_loading(pair, chosen, said):
    """Both `decode` and a point refuse; a point has no pair yet."""
    with pytest.raises(ValueError, match=said):
        sc.decode(pair, [[0]], **chosen, max_new_tokens=3)
    if chosen.get("stop") == 5 or "rule" in chosen and chosen["rule"] == 0.5:
        return  # a point is refused earlier, because a record could not name these objects
    with pytest.raises(ValueError, match=said):
        point = Point(
            pair=ModelPair(name="pair"), evaluation=Evaluation(task="tiny_translation").resolved(),
            settings=Settings(**chosen),
        )  # fmt: skip
        validate(point)


def test_a_head_is_used_only_if_some_level_needs_it():
    headed = replace(MIDDLE, stop="acceptance_head", stop_threshold=0.3)
    assert asks_head(Settings(method="spec_decode", drafters=(headed,)))
    assert asks_head(Settings(method="spec_decode", drafters=(replace(LEVELS, drafters=(headed,)),)))
    assert asks_head(Settings(method="specdecpp", stop_threshold=0.3))
    assert not asks_head(Settings(method="spec_decode", drafters=(MIDDLE,)))


def test_equal_levels_share_a_point_and_records_name_all_parts():
    fields = {"model": "middle", "budget": 3, "rule": "opt"}
    levels = [Level(**fields, alpha=alpha) for alpha in (1, 1.0, np.float64(1))]
    same = [recorded(Settings(method="spec_decode", drafters=(level,))) for level in levels]
    assert len(set(same)) == 1 and repr(same[0].drafters[0].alpha) == "1.0"
    with pytest.raises(ValueError, match="level 'middle' has a value that is not a number"):
        recorded(Settings(method="spec_decode", drafters=(Level(**fields, alpha=[0.1, 0.2]),)))
    with pytest.raises(ValueError, match="has no name for a record: write 'module.NAME'"):
        recorded(Settings(method="spec_decode", drafters=(replace(MIDDLE, rule=sc.RULES["opt"]),)))


def test_different_settings_have_different_labels_and_distribution_names():
    chosen = [
        Settings(method="chow", alpha=0.1), Settings(method="chow", alpha=0.1, accept="deferral"),
        Settings(method="chow", alpha=0.1, drafters=("middle",)), Settings(method="fuzzy", alpha=0.1),
        Settings(method="fuzzy", alpha=0.1, rule="bild_star"),
        Settings(method="fuzzy", alpha=0.1, rule="random_accept"),
    ]  # fmt: skip
    labels = [labelled({"point": {"head": None, "stop_threshold": None, **facts(choice)}}) for choice in chosen]
    assert len(set(labels)) == len(labels), labels
    laws = [facts(choice)["law"] for choice in chosen]
    assert laws[0] == laws[1] == "chow" != laws[2] and laws[3] != "fuzzy_js"
    lossless = [facts(Settings(method="spec_decode", drafters=choice))["law"] for choice in (("draft",), ("middle",))]
    assert lossless == ["spec_decode"] * 2


@pytest.mark.parametrize(("drafters", "said"), [
    (("midle",), "unknown drafter 'midle': did you mean middle"),
    ((Level(model="large", budget=3),), "has no model 'large'.* it has target, draft, middle"),
    ((Level(model="target", budget=3),), "level 'target' is the target itself: as a level, name a smaller model"),
    ((Level(model="middle", budget=0),), "budget=0 is not a whole number >= 1"),
    ((Level(model="middle", budget=3, block_size=0),), "block_size=0 is not a whole number >= 1"),
    ((Level(model="middle", budget=3, rule="opt"),), "level 'middle': rule 'opt' needs alpha"),
    ((Level(model="middle", budget=3, rule="optt"),), "unknown rule 'optt': did you mean opt"),
    ((Level(model="middle", budget=3, bonus="some"),), "unknown bonus 'some'"),
    ((Level(model="middle", budget=3, accept="some"),), "unknown acceptance 'some'"),
    ((Level(model="middle", budget=3, stop="confidence"),), "level 'middle' needs stop_threshold"),
    ((Level(model="middle", budget=3, temperature=-1.0),), "temperature=-1 .*is negative"),
    (("draft", "middle"), "has 2 drafters .* and needs choose, which selects one"),
    ((), "has no drafters to choose from"),
])  # fmt: skip
def test_impossible_stacks_are_refused_by_name(pair, drafters, said):
    with pytest.raises(ValueError, match=said):
        sc.decode(pair, [[0]], drafters=drafters, max_new_tokens=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes a pair with a third model and returns its folder."""
    return tiny_pair.write(tmp_path_factory.mktemp("three"), middle=True)


SWEEP = """
from __gin__ import dynamic_registration
from speccascade_jax.evaluation import experiment
from speccascade_jax.evaluation import points
include 'gin/methods/hierarchy.gin'

points.ModelPair.name = {folder!r}
points.Evaluation:
  task = 'tiny_translation'
  max_new_tokens = 6
  quality_examples = 4
  latency_examples = 0
  resamples = 10
other/points.Settings:
  method = 'spec_decode'
  drafters = ('middle',)
swept/points.Settings:
  method = 'chow'
  drafters = (@middle/points.Level(),)
middle/points.Level.budget = 3
middle/points.Level.block_size = 2
experiment.sweep:
  pair = @points.ModelPair()
  evaluation = @points.Evaluation()
  methods = ('spec_decode', @points.Settings(), @other/points.Settings(), @swept/points.Settings())
  alphas = {{'chow': (0.2, 0.8)}}
  block_sizes = (2,)
  output = {output!r}
"""


@pytest.mark.laws
def test_gin_alone_sweeps_and_tabulates_three_levels(folder, tmp_path, capsys):
    file, output = tmp_path / "stack.gin", tmp_path / "stack.jsonl"
    file.write_text(SWEEP.format(folder=str(folder), output=str(output)))
    gin.clear_config()
    gin_flags.parse_gin([str(file)], search_paths=[str(repository_root())])
    gin.get_configurable(experiment.sweep)()
    gin.clear_config()
    said = capsys.readouterr().out
    records = result_store.read_records(output)
    (panel,) = panels.panels(records)
    assert list(panel.curves) == [
        "spec_decode", "spec_decode[draft 2 → middle 3]", "spec_decode[middle]", "chow[draft 2 → middle 3]",
    ]  # fmt: skip
    assert [spot.alpha for spot in panel.curves["chow[draft 2 → middle 3]"]] == [0.2, 0.8]
    for label in ("SpecDecode [draft 2 → middle 3]", "SpecDecode [middle]", "SpecCascade [Chow, draft 2 → middle 3]"):
        assert label in said
    (grid,) = table2.table2_grids([panel])
    assert [row[0] for row in grid.rows if "middle" in row[0]] == [
        "SpecDecode [draft 2 → middle 3]", "SpecDecode [middle]", "SpecCascade [Chow, draft 2 → middle 3]",
    ]  # fmt: skip
    assert list(tmp_path.glob("stack*.png"))
    target = next(r for r in records if r["point"]["method"] == "autoregressive")
    lossless = [r for r in records if r["point"]["lossless"]]
    # greedy and lossless methods have equal outputs with any drafter
    assert len(lossless) >= 3 and {r["quality"]["value"] for r in lossless} == {target["quality"]["value"]}
    (stack,) = (r for r in records if r["point"]["curve"] == "spec_decode[draft 2 → middle 3]")
    assert json.loads(json.dumps(stack))["point"]["drafters"] == ["draft 2 → middle 3"]
    (level,) = stack["levels"]
    assert level["model"] == "middle" and level["draft_steps"] > level["target_calls"] > 0
    assert all(("levels" in r) == ("→" in r["point"]["curve"]) for r in records)
    assert tables.main([str(output), "--measures", "levels", "--format", "csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first_line = next(n for n, line in enumerate(lines) if "SpecDecode [draft 2 → middle 3]" in line)
    tokens = stack["counts"]["committed"]
    assert lines[first_line].split(",")[-5:-3] == ["target", f"{stack['counts']['target_calls'] / tokens:.3f}"]
    assert lines[first_line + 1].split(",")[-5:-3] == ["middle", f"{level['target_calls'] / tokens:.3f}"]
    assert lines[first_line + 2].split(",")[-5:-3] == ["lowest draft", f"{level['draft_steps'] / tokens:.3f}"]


def test_a_missing_model_is_named_before_measuring(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "evaluate", lambda *_, **more: pytest.fail("measured"))
    evaluation = Evaluation(task="tiny_translation", quality_examples=2, latency_examples=0)
    arguments = {"pair": ModelPair(name=str(folder)), "evaluation": evaluation, "output": str(tmp_path / "x.jsonl")}
    with pytest.raises(ValueError, match="has no model 'large'"):
        experiment.sweep(
            methods=[Settings(method="spec_decode", drafters=(Level(model="large", budget=2),))], **arguments
        )


def test_levels_beyond_the_random_bits_are_refused():
    level = "draft"
    for _ in range(10):
        level = Level(model="a", budget=2, drafters=(level,))
    rngs_level = 0
    for _ in range(10):
        rngs_level = rngs.below(rngs_level)
    with pytest.raises(ValueError, match="level 'b' is above 10 others: nest at most 10 levels"):
        Level(model="b", budget=2, drafters=(level,))
    with pytest.raises(ValueError, match="nested too deeply to have random bits of their own; use at most 10 levels"):
        rngs.below(rngs_level)
