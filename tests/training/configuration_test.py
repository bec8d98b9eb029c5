"""Command-line settings, and the shipped gin files."""

import gin
import pytest

from speccascade_jax import gin_flags
from speccascade_jax.data import directory
from speccascade_jax.training import loop
from speccascade_jax.training.steps import Objective


def test_settings_become_bindings():
    argv = ["train", "--gin_file=a.gin", "--gin.MINUTES=5", "--gin.loop.Trainer.seed=3"]
    wanted = ["train", "--gin_file=a.gin", "--gin_bindings=MINUTES = 5", "--gin_bindings=loop.Trainer.seed = 3"]
    assert gin_flags.rewrite_arguments(argv) == wanted


def test_a_setting_without_a_value_is_refused():
    with pytest.raises(ValueError, match="--gin.MINUTES has no value"):
        gin_flags.rewrite_arguments(["train", "--gin.MINUTES"])


@pytest.mark.parametrize(("name", "layers"), [("train_target", 3), ("train_draft", 1)])
def test_shipped_configurations_resolve(name, layers, monkeypatch):
    # The vocabulary they name exists only once it has been trained.
    monkeypatch.setattr(loop.Trainer, "__post_init__", lambda self: None)
    gin.clear_config()
    try:
        path = directory.repository_root() / "gin" / f"{name}.gin"
        gin_flags.parse_gin([str(path)], ["MINUTES = 3", "loop.Trainer.seed = 5"])
        trainer = gin.get_configurable(loop.Trainer)()
    finally:
        gin.clear_config()
    assert trainer.config.num_decoder_layers == layers
    assert (trainer.schedule.max_minutes, trainer.seed) == (3, 5)
    assert trainer.objective == Objective(smoothing=0.1, distill_weight=trainer.objective.distill_weight)
    assert trainer.corpus.tokens_per_batch == trainer.validation.tokens_per_batch
