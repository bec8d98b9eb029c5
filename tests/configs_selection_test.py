"""Tests that recipes of assistant selection resolve and use each other's outputs (shipped pair, and two domains)."""

import re
import shlex

import gin
import pytest

from speccascade_jax.evaluation import enumeration
from speccascade_jax.methods import build_selection
from speccascade_jax.runtime import gin_flags
from speccascade_jax.selection import make_data as selection_data
from speccascade_jax.selection import report as comparison
from speccascade_jax.selection import serving
from speccascade_jax.selection import train as policies
from tests.support.recipes import CONFIGS, ROOT, resolve, stop_before_loading  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("stop_before_loading")
POLICY = "gin/train_policy.gin"
SELECTIONS = sorted(f"gin/selection/{path.name}" for path in (ROOT / "gin/selection").glob("*.gin"))
COMPARISONS = [config for config in CONFIGS if "report.compare:" in (ROOT / config).read_text()]


@pytest.mark.parametrize("config", COMPARISONS)
def test_each_comparison_of_drafters_uses_the_shipped_example(config):
    first = resolve(comparison.compare, [config, "configs/sizes/tiny.gin"])
    assert first.pair.name in ("tatoeba_two_ways", "tatoeba_en_de") and first.evaluation.quality_examples == 100
    assert first.evaluation.first_example == 100 and first.evaluation.latency_examples == 12


def _commands(config, kind) -> list[list[str]]:
    """Returns the commands after `kind` in a recipe's head, each as words."""
    block = re.search(rf"^# {kind}: (.*?)(?=^# \w+: |^from)", (ROOT / config).read_text(), re.S | re.M)[1]
    lines = [line.lstrip("# ") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("python -m ")]


def _bound(words) -> tuple[list[str], list[str]]:
    """Returns files and bindings of a command, as its flags read them."""
    files = [word.removeprefix("--gin_file=") for word in words if word.startswith("--gin_file=")]
    return files, [word.removeprefix("--gin.") for word in words if word.startswith("--gin.")]


@pytest.fixture
def drafters(monkeypatch):
    """Records the names of the requested drafters, in the order of the calls."""
    names, checked = [], selection_data._checked

    def made(domains, drafters):
        arms = checked(domains, drafters)
        names.append({arm.called for arm in arms})
        return arms

    def compared(**given):
        *_, settings = (
            method for method in given["methods"] if method.choose == "random"
        )  # of several commands, the last one counts
        names.append({arm.called for arm in build_selection.arms_of(settings)})
        return enumeration.enumerate_points(**given)

    monkeypatch.setattr(selection_data, "_checked", made)
    monkeypatch.setattr(comparison, "enumerate_points", compared)
    return names


@pytest.mark.parametrize("kind", ["Command", "Published"])
@pytest.mark.parametrize("config", [config for config in CONFIGS if "paper5" in config])
def test_the_commands_of_a_selection_are_consistent(config, kind, drafters):
    """Checks the data, the policy trained on them, and its drafters, for the example and for two domains."""
    commands, data, written, pairs = _commands(config, kind), None, None, set()
    assert commands and any(config in word for words in commands for word in words)
    for words in commands:
        gin.clear_config()
        files, bindings = _bound(words)
        if "experiments.make_selection_data" in words:
            pairs.add(resolve(selection_data.make, files, bindings).name)
            data = gin.query_parameter("make.output")
        elif "experiments.train_policy" in words:
            gin_flags.parse_gin([str(ROOT / name) for name in files], bindings)
            trainer = gin.get_configurable(policies.PolicyTrainer)()
            assert trainer.data == data and set(trainer.costs or drafters[0]) == drafters[0]
            written = f"{trainer.run_dir}/selection_policy.msgpack"
        elif "experiments.serve_online" in words:
            pairs.add(resolve(serving.serve, files, bindings).name)
        else:
            comparison_ = resolve(comparison.compare, files, bindings)
            pairs.add(comparison_.pair.name)
            timed = next((int(item.removeprefix("TIMED=")) for item in bindings if item.startswith("TIMED=")), 12)
            assert comparison_.evaluation.latency_examples == timed and (timed == 400) == (kind == "Published")
            asked = gin.query_parameter("%POLICIES")
            assert set(comparison_.pair.others) >= {item for item in drafters[0] if item[:4] in ("exit", "usel")}
            assert asked == ((written,) if written else (None,))
    assert all(item == drafters[0] for item in drafters)
    assert len(pairs) == 1 and (pairs == {"runs/two_domains/pair"}) == (kind == "Published")


@pytest.mark.parametrize("file", SELECTIONS)
def test_each_selection_has_data(file):
    assert resolve(selection_data.make, ["gin/selection_data.gin", file]).name


@pytest.mark.parametrize("file", [file for file in SELECTIONS if "exits" not in file])
def test_a_stream_that_shifts_and_returns_is_served(file, monkeypatch):
    phases = []
    monkeypatch.setattr(serving, "_check", lambda phase_names, *more: phases.extend(phase_names))
    assert resolve(serving.serve, ["configs/paper5_online.gin", file], ["SERVED=7"]).name
    first, second, third = phases
    assert first.task == third.task != second.task and (first.first_example, third.first_example) == (0, 7)
    assert {(phase.latency_examples, phase.quality_examples) for phase in phases} == {(7, 32)}


@pytest.mark.parametrize("config", [POLICY, "configs/paper5_figure2.gin", "configs/paper5_figure3.gin"])
def test_a_policy_is_trained_with_the_papers_hyperparameters(config):
    gin_flags.parse_gin([str(ROOT / config)])
    trainer = gin.get_configurable(policies.PolicyTrainer)()
    assert (trainer.rate, trainer.weight_decay, trainer.betas, trainer.batch) == (1e-3, 1e-2, (0.9, 0.99), 64)
    assert trainer.hidden == (512, 512) and trainer.objective == "reinforce"
