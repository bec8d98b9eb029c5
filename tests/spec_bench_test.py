"""Spec-Bench end to end with a tabular pair: its answer schema, its arithmetic, its timing."""

from __future__ import annotations

import json

import pytest

import speccascade_jax as sc
from speccascade_jax import conversing, evaluation, spec_bench
from speccascade_jax.data import directory
from speccascade_jax.data.spec_bench import Conversation, Question, get_conversation
from speccascade_jax.points import Method, ModelPair, Sampling
from tests import text_pair

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["The dog sleeps.", "And the cat?"]},
    {"question_id": 92, "category": "math", "turns": ["One and one.", "And two?"]},
    {"question_id": 250, "category": "qa", "turns": ["Who is it?"], "reference": ["nobody"]},
]
LONGEST = 9
PLAIN = get_conversation("plain")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> sc.Pair:
    return text_pair.make(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def run(pair, tmp_path, monkeypatch):
    monkeypatch.setenv(directory.VARIABLE, str(tmp_path))
    monkeypatch.setattr(evaluation, "load_source", lambda source: pair)
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))

    def run(**changes):
        given = {
            "pair": ModelPair(name="some/tiny"),
            "method": Method(name="spec_decode", block_size=2),
            "sampling": Sampling(),
            "questions": "q.jsonl",
            "max_new_tokens": LONGEST,
            "output": str(tmp_path / "answers"),
        }
        return spec_bench.run(**given | changes)

    return run


def read(folder, name) -> list[dict]:
    return [json.loads(line) for line in (folder / "answers" / name).read_text(encoding="utf-8").splitlines()]


def test_answers_have_the_schema_that_spec_benchs_scripts_read(run, tmp_path):
    rows = run()
    ours, target = (read(tmp_path, f"tiny-{name}.jsonl") for name in ("spec_decode", "autoregressive"))
    for answers, question in zip((*ours, *target), QUESTIONS * 2, strict=True):
        assert {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"} == set(answers)
        assert (answers["question_id"], answers["category"]) == (question["question_id"], question["category"])
        (choice,) = answers["choices"]
        assert set(choice) == {"index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"}
        for name in ("turns", "decoding_steps", "new_tokens", "wall_time"):
            assert len(choice[name]) == len(question["turns"])
        assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
        assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
        assert all(1 <= count <= LONGEST for count in choice["new_tokens"])
        assert all(1 <= length <= 3 for length in choice["accept_lengths"]) and min(choice["wall_time"]) > 0
    assert {answer["model_id"] for answer in ours} == {"tiny-spec_decode"}
    assert all(set(answer["choices"][0]["accept_lengths"]) == {1} for answer in target)
    assert max(length for answer in ours for length in answer["choices"][0]["accept_lengths"]) > 1
    # greedy and lossless: the same answers, hence the same second prompts
    assert [answer["choices"][0]["turns"] for answer in ours] == [answer["choices"][0]["turns"] for answer in target]
    assert [(row.category, row.questions, row.same) for row in rows] == [
        ("mt_bench", 2, 2),
        ("qa", 1, 1),
        ("overall", 3, 3),
    ]


def test_the_second_prompt_contains_the_first_answer(pair, monkeypatch):
    speaker = conversing.Speaker(pair, Method(name="autoregressive"), Sampling(), PLAIN, max_new_tokens=LONGEST)
    asked, answer = [], speaker.answer
    monkeypatch.setattr(speaker, "answer", lambda text, number: asked.append(text) or answer(text, number))
    first, _ = speaker.converse(Question(81, "writing", ("The dog sleeps.", "And the cat?")))
    assert asked == [
        "User: The dog sleeps.\nAssistant:",
        f"User: The dog sleeps.\nAssistant: {first.text}\nUser: And the cat?\nAssistant:",
    ]


def test_compilation_is_not_timed(pair, monkeypatch):
    speaker = conversing.Speaker(pair, Method(name="autoregressive"), Sampling(), PLAIN, max_new_tokens=LONGEST)
    clock, calls, generate = [0.0], [], conversing.generate

    def slow_at_first(*arguments, **more):
        clock[0] += 1.0 if calls else 100.0
        calls.append(arguments)
        return generate(*arguments, **more)

    monkeypatch.setattr(conversing, "generate", slow_at_first)
    monkeypatch.setattr(conversing.time, "perf_counter", lambda: clock[0])
    assert [speaker.answer("The dog sleeps.").seconds for _ in range(3)] == [1.0, 1.0, 1.0]
    assert len(calls) == 4


def test_generation_stops_at_a_turns_end_that_is_one_token(pair):
    token = next(t for t in range(40, text_pair.PIECES) if pair.vocabulary.encode(pair.vocabulary.piece(t))[-1] == t)
    ends = Conversation(user="{text}", answer="{text}", stop=(pair.vocabulary.piece(token), "zzqq zzqq"))
    assert conversing.stop_ids(pair, ends) == [*pair.vocabulary.stop_ids, token]
    assert conversing.stop_ids(pair, PLAIN) == [*pair.vocabulary.stop_ids]


def answers(speeds: dict[str, list[tuple[list[int], list[float], list[int]]]]) -> list[dict]:
    return [
        {
            "question_id": number,
            "category": category,
            "choices": [{"new_tokens": tokens, "wall_time": times, "accept_lengths": lengths, "turns": [str(number)]}],
        }
        for category, choices in speeds.items()
        for number, (tokens, times, lengths) in enumerate(choices)
    ]


def test_speeds_are_means_over_questions_and_accepted_tokens_over_rounds():
    ours = answers({"math": [([10, 20], [1.0, 2.0], [3, 3]), ([40], [1.0], [1])], "rag": [([6], [2.0], [2, 4])]})
    alone = answers({"math": [([10, 20], [3.0, 3.0], [1]), ([10], [1.0], [1])], "rag": [([6], [3.0], [1])]})
    alone[-1]["choices"][0]["turns"] = ["another"]
    first, second, overall = spec_bench.table(ours, alone)
    assert (first.category, first.speed, first.target_speed) == ("mt_bench", 25.0, 7.5)
    assert first.accepted == pytest.approx(7 / 3) and first.speed_up == pytest.approx(25 / 7.5)
    assert (second.category, second.speed, second.same, first.same) == ("rag", 3.0, 0, 2)
    assert (overall.questions, overall.speed) == (3, pytest.approx(53 / 3))
    with pytest.raises(ValueError, match="different questions"):
        spec_bench.table(ours, alone[:-1])


def test_who_answers_first_alternates(tmp_path):
    said = []

    class Fake:
        def __init__(self, name):
            self.name = name

        def converse(self, question):
            said.append(self.name)
            return [conversing.Turn(text="x", new_tokens=1, target_calls=1, seconds=1.0, accept_lengths=[1])]

    questions = [Question(n, "qa", ("x",)) for n in range(3)]
    spec_bench.answer_all([Fake("a"), Fake("b")], questions, [tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert said == ["a", "b", "b", "a", "a", "b"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"categories": ("writing",)}, "categories: 'writing' is not one of mt_bench"),
        ({"categories": "qa"}, "is one value where a tuple is meant"),
        ({"categories": ("rag",)}, "q.jsonl has no questions of rag"),
        ({"conversation": "chat"}, "unknown conversation 'chat'"),
        ({"per_category": 0}, "per_category=0 is not a whole number >= 1"),
        ({"method": Method(name="autoregressive")}, "autoregressive is measured beside every method"),
        ({"method": Method(name="spek_decode")}, "unknown rule 'spek_decode': did you mean spec"),
        ({"method": Method(name="seq_cascade", alpha=-3.0)}, "decides about whole outputs"),
        ({"method": Method(name="chow")}, "rule 'chow' needs alpha"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_what_has_no_meaning_is_refused(run, changes, message):
    with pytest.raises(ValueError, match=message):
        run(**changes)


def test_answers_are_never_overwritten(run, tmp_path):
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers/tiny-spec_decode.jsonl").write_text("hours of work")
    with pytest.raises(ValueError, match=r"tiny-spec_decode.jsonl holds answers already; remove it"):
        run()


def test_a_pair_without_a_vocabulary_is_refused(pair):
    bare = sc.Pair(target=pair.target, draft=pair.draft, name="bare")
    with pytest.raises(ValueError, match="pair 'bare' has no vocabulary"):
        conversing.Speaker(bare, Method(name="autoregressive"), Sampling(), PLAIN)
