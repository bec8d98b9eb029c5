"""Tests of a model's own outputs as a corpus: kept and omitted outputs, resumption after a kill, refused input."""

import dataclasses
from pathlib import Path

import pytest
import sacrebleu

import speccascade_jax as sc
from speccascade_jax.data.sentence_pairs import read_tokens
from speccascade_jax.data.vocabularies.load import Vocabulary
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.training.finetune import decoding, evaluations
from speccascade_jax.training.finetune import trainer as trainers
from speccascade_jax.training.finetune.corpus import JoinedCorpus
from speccascade_jax.training.finetune.output_files import Outputs, joined_examples
from tests.support.killing import killed_at

EXAMPLES, SEED, WIDTH = 20, 3, 64


@pytest.fixture
def make(finished, tmp_path):
    """Returns a function that creates `Outputs` of the trained micro model; sampled, so only some outputs end."""
    trainer, _, exported = finished

    def make_outputs(name="outputs.pieces", **changes):
        settings = {"checkpoint": str(exported), "examples": EXAMPLES, "temperature": 1.0, "part_size": 8}
        settings |= {"trainer": dataclasses.replace(trainer, seed=SEED), "batch_size": 4}
        return Outputs(path=str(tmp_path / name), **settings | changes)

    return make_outputs


@pytest.fixture(scope="module")
def alone(finished):
    """Returns source and output ids of every example, each decoded alone by `sc.decode`."""
    trainer, vocabulary = finished[0], Vocabulary(finished[0].vocabulary)
    bound, _ = trainers.trained(trainer)
    data = trainer.corpus.tokens(vocabulary, True)
    sources = [example.source for example in joined_examples(data, SEED, EXAMPLES)]
    decoded = []
    for number, source in enumerate(sources):
        decoded.append((source, sampled(bound, vocabulary, source, [number])[0]))
    return decoded


def sampled(bound, vocabulary, source, ids):
    """Returns the samples of `sc.decode` for a source, one for each id."""
    settings = {"method": "autoregressive", "temperature": 1.0, "seed": SEED, "max_new_tokens": WIDTH}
    out = sc.decode(Pair(bound, bound, vocabulary), [[*source, 1]] * len(ids), example_ids=ids, **settings)
    return [row[:length].tolist() for row, length in zip(out.tokens, out.lengths, strict=True)]


@pytest.mark.laws
def test_the_file_holds_the_tokens_of_finished_outputs_and_counts_the_others(make, alone):
    outputs = make()
    result = outputs.write()
    ended = [(source, ids[:-1]) for source, ids in alone if ids[-1] == 1]
    assert 0 < len(ended) < EXAMPLES, "the micro model must do both for this test to say anything"
    vocabulary = Vocabulary(outputs.trainer.vocabulary)
    assert [tuple(pair) for pair in read_tokens(outputs.path, vocabulary)] == ended
    assert (result["examples"], result["left_out"]) == (len(ended), EXAMPLES - len(ended))
    assert result["tokens"] == sum(len(ids) + 1 for _, ids in ended)
    # ids are stored, because decoded text would encode to other tokens
    assert any(vocabulary.encode(vocabulary.decode(ids)) != ids for _, ids in ended)


@pytest.mark.laws
def test_training_reads_the_file_without_joining(make, alone):
    outputs = make("outputs.pieces.gz")
    outputs.write()
    corpus = JoinedCorpus(path=outputs.path, max_joined=1, widths=(WIDTH,), tokens_per_batch=256)
    data = corpus.tokens(Vocabulary(outputs.trainer.vocabulary), True)
    rows = [target for _, target in _rows(data, 0, 0)]
    assert sorted(rows) == sorted(ids for _, ids in alone if ids[-1] == 1)


@pytest.mark.laws
def test_a_killed_translation_continues_with_the_next_part(make):
    whole, broken = make("whole.pieces.gz"), make("broken.pieces.gz")
    whole.write()
    with killed_at(decoding, "decode", 2):
        broken.write()
    assert [path.name for path in broken.parts.glob("*.pieces")] == ["0-8.pieces"]
    with pytest.raises(ValueError, match="was started with other values of temperature: remove it"):
        dataclasses.replace(broken, temperature=0.0).write()
    result = broken.write()
    assert Path(broken.path).read_bytes() == Path(whole.path).read_bytes()
    assert result["examples"] + result["left_out"] == EXAMPLES
    assert not broken.parts.exists()


@pytest.mark.laws
def test_a_file_in_a_bucket_equals_a_local_one(make, bucket):
    whole, place = make(examples=4, part_size=2), BucketPath("gs://bucket/outputs.pieces.gz")
    packed = make(name="outputs.pieces.gz", examples=4, part_size=2)
    remote = dataclasses.replace(whole, path=str(place))
    with killed_at(decoding, "decode", 2):
        remote.write()
    assert place.parent.below() == ["outputs.pieces.gz.parts/0-2.pieces", "outputs.pieces.gz.parts/settings.json"]
    remote.write()
    packed.write()
    assert place.read_bytes() == Path(packed.path).read_bytes() and place.parent.below() == [place.name]


def _rows(data, seed, number):
    """Returns the encoder's input and the target of every example of an epoch."""
    batches = [planned.build() for planned in data.epoch(seed, number)]
    return [
        (batch.encoder_tokens[row, : batch.encoder_lengths[row]].tolist(), batch.tokens[row, :length].tolist())
        for batch in batches for row, length in enumerate(batch.lengths) if length
    ]  # fmt: skip


def test_sources_are_joined_as_in_training_and_continue_into_the_next_epoch(finished):
    corpus, vocabulary = finished[0].corpus, Vocabulary(finished[0].vocabulary)
    data = corpus.tokens(vocabulary, True)
    rows = [[source[:-1] for source, _ in _rows(data, SEED, epoch)] for epoch in (0, 1)]
    sources = [example.source for example in joined_examples(data, SEED, sum(map(len, rows)))]
    assert sorted(sources[: len(rows[0])]) == sorted(rows[0])
    assert sorted(sources[len(rows[0]) :]) == sorted(rows[1])


@pytest.mark.parametrize("least", [0.0, 1.0])
def test_the_candidate_nearest_to_the_reference_is_written(make, finished, least):
    outputs, vocabulary = make(candidates=4, examples=12, least=least), Vocabulary(finished[0].vocabulary)
    outputs.write()
    bound, _ = trainers.trained(finished[0])
    data = outputs.trainer.corpus.tokens(vocabulary, True)
    expected, chosen = [], []
    for number, example in enumerate(joined_examples(data, SEED, 12)):
        rows = sampled(bound, vocabulary, example.source, range(4 * number, 4 * number + 4))
        texts = [vocabulary.decode(ids[:-1]) for ids in rows if ids[-1] == 1]
        reference = vocabulary.decode(example.target)
        scores = [sacrebleu.sentence_bleu(text, [reference], use_effective_order=True).score for text in texts]
        near = max(scores, default=-1.0) >= least
        chosen.append(near)
        expected += [texts[scores.index(max(scores))]] if near else [reference] if least else []
    assert [vocabulary.decode(pair.target) for pair in read_tokens(outputs.path, vocabulary)] == expected
    assert any(chosen) and (not least or not all(chosen)), "both must happen for this test to say anything"


def test_candidates_that_cannot_differ_are_refused(make):
    with pytest.raises(ValueError, match="4 candidates at temperature 0.0: .* above 0"):
        make(candidates=4, temperature=0.0)


def test_unusable_names_and_existing_files_are_refused(make, finished):
    with pytest.raises(ValueError, match="x.pieces.gz"):
        make("outputs.tsv")
    make(examples=1, temperature=0.0).write()
    with pytest.raises(ValueError, match="exists already; remove it"):
        make()


def test_a_checkpoint_with_another_vocabulary_is_refused(finished):
    trainer, _, exported = finished
    wider = dataclasses.replace(trainer, config=dataclasses.replace(trainer.config, vocab_size=289))
    with pytest.raises(ValueError, match="has 290 tokens, but .* has 289 pieces"):
        evaluations.model_of(wider, str(exported))
