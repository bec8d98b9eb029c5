"""Command-line settings, and the shipped gin files."""

import gin
import pytest

from speccascade_jax.runtime import gin_flags, paths
from speccascade_jax.training.t5 import loop


def test_settings_become_bindings():
    argv = ["train", "--gin_file=a.gin", "--gin.MINUTES=5", "--gin.loop.Trainer.seed=3"]
    wanted = ["train", "--gin_file=a.gin", "--gin_bindings=MINUTES = 5", "--gin_bindings=loop.Trainer.seed = 3"]
    assert gin_flags.rewrite_arguments(argv) == wanted


def test_a_setting_without_a_value_is_refused():
    with pytest.raises(ValueError, match="--gin.MINUTES has no value"):
        gin_flags.rewrite_arguments(["train", "--gin.MINUTES"])


def _trainer(name, bindings, monkeypatch):
    # The vocabulary they name exists only once it has been trained.
    monkeypatch.setattr(loop.Trainer, "__post_init__", lambda self: None)
    gin.clear_config()
    try:
        gin_flags.parse_gin([str(paths.repository_root() / "gin" / f"{name}.gin")], bindings)
        return gin.get_configurable(loop.Trainer)()
    finally:
        gin.clear_config()


@pytest.mark.parametrize("name", ["train_target", "train_draft"])
def test_shipped_configurations_resolve(name, monkeypatch):
    trainer = _trainer(name, ["STEPS = 7", "MINUTES = 3", "loop.Trainer.seed = 5"], monkeypatch)
    assert (trainer.schedule.max_steps, trainer.schedule.max_minutes, trainer.seed) == (7, 3, 5)
    assert trainer.objective.smoothing == 0.0 and not trainer.objective.distill_from
    assert trainer.corpus.tokens_per_batch == trainer.validation.tokens_per_batch
    assert trainer.corpus.max_joined == trainer.validation.max_joined == 4


def test_the_draft_is_narrower_than_the_target_and_shares_its_vocabulary(monkeypatch):
    target, draft = (_trainer(name, [], monkeypatch).config for name in ("train_target", "train_draft"))
    assert (draft.vocab_size, draft.num_embeddings) == (target.vocab_size, target.num_embeddings)
    assert draft.d_model < target.d_model and draft.num_decoder_layers < target.num_decoder_layers


def test_a_draft_can_learn_from_outputs_and_a_teacher(monkeypatch):
    bindings = ["CORPUS = 'x.pieces.gz'", "MAX_JOINED = 1", "TEACHER = 'target'"]
    trainer = _trainer("train_draft", bindings, monkeypatch)
    assert (trainer.corpus.path, trainer.corpus.max_joined) == ("x.pieces.gz", 1)
    assert trainer.objective.distill_from == "target"
    assert trainer.validation.path.endswith("valid.en-de.tsv")
