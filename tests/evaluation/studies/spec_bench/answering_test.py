"""Tests of Spec-Bench from end to end with a tabular pair: questions, conversations, answers, arithmetic, timing."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest

import speccascade_jax as sc
from speccascade_jax.data import directory
from speccascade_jax.data.tasks.table import TASKS
from speccascade_jax.evaluation.points import ModelPair, Settings
from speccascade_jax.evaluation.studies.spec_bench import answering
from speccascade_jax.evaluation.studies.spec_bench.answering import Question, get_conversation
from speccascade_jax.methods import table
from speccascade_jax.methods.method import Decoder
from speccascade_jax.pairs import prompts
from speccascade_jax.pairs.prompts import text_ids
from speccascade_jax.rules.deferral import RULES
from tests.support import text_pair
from tests.support.acceptance_heads import head_for

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["The dog sleeps.", "And the cat?"]},
    {"question_id": 92, "category": "math", "turns": ["One and one.", "And two?"]},
    {"question_id": 250, "category": "qa", "turns": ["Who is it?"], "reference": ["nobody"]},
]
LONGEST = 9
PLAIN = get_conversation("plain")


@pytest.fixture
def run(pair, tmp_path, monkeypatch):
    monkeypatch.setenv(directory.VARIABLE, str(tmp_path))
    monkeypatch.setattr(answering, "load_source", lambda source: pair)
    # prompts of all turns have one padded length, so one program suffices
    monkeypatch.setattr(prompts, "bucket", lambda length: 128)
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))

    def run(**changes):
        arguments = {"pair": ModelPair(name="some/tiny"), "settings": Settings(method="spec_decode", block_size=2)}
        arguments |= {"questions": "q.jsonl", "max_new_tokens": LONGEST, "output": str(tmp_path / "answers")}
        return answering.run(**arguments | changes)

    return run


def read(folder, name) -> list[dict]:
    return [json.loads(line) for line in (folder / "answers" / name).read_text(encoding="utf-8").splitlines()]


def test_answers_have_the_schema_that_spec_benchs_scripts_read(run, tmp_path):
    rows = run()
    ours, target = (read(tmp_path, f"tiny-{name}.jsonl") for name in ("spec_decode", "autoregressive"))
    for answers, question in zip((*ours, *target), QUESTIONS * 2, strict=True):
        names = {"question_id", "category", "answer_id", "model_id", "choices", "tstamp", "key", "checksum"}
        assert set(answers) == names
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
    counts = [(row.category, row.questions, row.same) for row in rows]
    assert counts == [("mt_bench", 2, 2), ("qa", 1, 1), ("overall", 3, 3)]


@pytest.fixture
def speaker(pair):
    return answering.Speaker(pair, Settings(method="autoregressive"), PLAIN, max_new_tokens=LONGEST)


def test_the_second_prompt_contains_the_first_answer(speaker, monkeypatch):
    asked, answer = [], speaker.answer
    monkeypatch.setattr(speaker, "answer", lambda text, number: asked.append(text) or answer(text, number))
    first, _ = speaker.converse(Question(81, "writing", ("The dog sleeps.", "And the cat?")))
    assert asked == [
        "User: The dog sleeps.\nAssistant:",
        f"User: The dog sleeps.\nAssistant: {first.text}\nUser: And the cat?\nAssistant:",
    ]


def test_compilation_is_not_timed(speaker, monkeypatch):
    clock, calls, generate = [0.0], [], speaker.decoder.generate

    def slow_at_first(_, *arguments, **more):
        clock[0] += 1.0 if calls else 100.0
        calls.append(arguments)
        return generate(*arguments, **more)

    monkeypatch.setattr(Decoder, "generate", slow_at_first)
    monkeypatch.setattr(answering.time, "perf_counter", lambda: clock[0])
    assert [speaker.answer("The dog sleeps.").seconds for _ in range(3)] == [1.0, 1.0, 1.0]
    assert len(calls) == 4


def test_a_long_prompt_reaches_the_models_whole(speaker, monkeypatch):
    reached = []
    monkeypatch.setattr(Decoder, "generate", lambda decoder, prompt, *_, **__: reached.append(prompt))
    text = speaker.prompt(Question(81, "writing", ("The dog sleeps, and the cat is not at home. " * 15,)))
    ids = text_ids(speaker.pair, text)
    with pytest.raises(AttributeError):  # the fake generates nothing to read
        speaker.answer(text)
    assert 300 < len(ids) == reached[0].length[0]
    assert reached[0].tokens[0, : len(ids)].tolist() == ids


def test_generation_stops_at_a_turns_end_that_is_one_token(pair):
    token = next(t for t in range(40, text_pair.PIECES) if pair.vocabulary.encode(pair.vocabulary.piece(t))[-1] == t)
    ends = answering.Conversation(user="{text}", answer="{text}", stop=(pair.vocabulary.piece(token), "zzqq zzqq"))
    for conversation, end_ids in ((ends, (token,)), (PLAIN, ())):
        speaker = answering.Speaker(pair, Settings(method="autoregressive"), conversation)
        assert speaker.decoder.require_engine().stop_ids == (*pair.vocabulary.stop_ids, *end_ids)


def answers(speeds: dict[str, list[tuple[list[int], list[float], list[int]]]]) -> list[dict]:
    all_answers = []
    for category, choices in speeds.items():
        for number, (tokens, times, lengths) in enumerate(choices):
            choice = {"new_tokens": tokens, "wall_time": times, "accept_lengths": lengths, "turns": [str(number)]}
            all_answers.append({"question_id": number, "category": category, "choices": [choice]})
    return all_answers


def test_speeds_are_means_over_questions_and_accepted_tokens_over_rounds():
    ours = answers({"math": [([10, 20], [1.0, 2.0], [3, 3]), ([40], [1.0], [1])], "rag": [([6], [2.0], [2, 4])]})
    alone = answers({"math": [([10, 20], [3.0, 3.0], [1]), ([10], [1.0], [1])], "rag": [([6], [3.0], [1])]})
    alone[-1]["choices"][0]["turns"] = ["another"]
    first, second, overall = answering.table(ours, alone)
    assert (first.category, first.speed, first.target_speed) == ("mt_bench", 25.0, 7.5)
    assert first.accepted == pytest.approx(7 / 3) and first.speed_up == pytest.approx(25 / 7.5)
    assert (second.category, second.speed, second.same, first.same) == ("rag", 3.0, 0, 2)
    assert (overall.questions, overall.speed) == (3, pytest.approx(53 / 3))
    with pytest.raises(ValueError, match="different questions"):
        answering.table(ours, alone[:-1])


@pytest.mark.parametrize(("changes", "message"), [
    ({"categories": ("writing",)}, "categories: 'writing' is not one of mt_bench"),
    ({"categories": "qa"}, "is one value where a tuple is meant"),
    ({"categories": ("rag",)}, "there are no questions of rag: give other categories"),
    ({"conversation": "chat"}, "unknown conversation 'chat'"),
    ({"per_category": 0}, "per_category=0 is not a whole number >= 1"),
    ({"settings": Settings(method="autoregressive")}, "autoregressive is always measured as the baseline"),
    ({"settings": Settings(method="seq_cascade", alpha=-3.0)}, "decides about whole outputs"),
    ({"settings": Settings(method="chow")}, "rule 'chow' needs alpha"),
    ({"max_new_tokens": 0}, "max_new_tokens=0"),
])  # fmt: skip
def test_invalid_values_are_refused(run, changes, message):
    with pytest.raises(ValueError, match=message):
        run(**changes)


@pytest.mark.parametrize("content", ["hours of work\n", '{"question_id": 81}\n', '{"key": "another"}\n'])
@pytest.mark.parametrize("name", ["spec_decode", "autoregressive"])
def test_answers_of_other_runs_are_never_changed(run, tmp_path, name, content):
    file = tmp_path / f"answers/tiny-{name}.jsonl"
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(ValueError, match=rf"tiny-{name}.jsonl already holds answers of another run .*; remove it"):
        run()
    assert file.read_text() == content and len(list(file.parent.iterdir())) == 1


@pytest.mark.laws
def test_answers_under_another_head_belong_to_another_run(run, pair, tmp_path, monkeypatch):
    asked = {"categories": ("qa",), "settings": Settings(method="specdecpp", stop_threshold=0.5, temperature=1.0)}
    for seed, said in ((0, None), (1, "already holds answers of another run")):
        headed = replace(pair, head=head_for(pair, seed=seed))
        monkeypatch.setattr(answering, "load_source", lambda source, headed=headed: headed)
        with pytest.raises(ValueError, match=said) if said else nullcontext():
            assert run(**asked)


def lines(tmp_path) -> dict[str, list[str]]:
    return {file.stem: file.read_text().splitlines() for file in sorted((tmp_path / "answers").glob("*.jsonl"))}


def asked(monkeypatch, stop_at: int = 99) -> list[tuple[str, int]]:
    """Returns a list that logs each speaker and question from now on; question number `stop_at` ends the process."""
    said, converse = [], answering.Speaker.converse

    def noted(speaker, question):
        if len(said) == stop_at:
            raise KeyboardInterrupt
        said.append((speaker.settings.method, question.question_id))
        return converse(speaker, question)

    monkeypatch.setattr(answering.Speaker, "converse", noted)
    return said


def test_a_killed_run_resumes(run, tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        asked(patched, stop_at=3)
        run()
    before = lines(tmp_path)
    assert [len(file) for file in before.values()] == [1, 1]
    (tmp_path / "answers/tiny-spec_decode.jsonl").open("a").write('{"key": "half a li')
    said = asked(monkeypatch)
    with pytest.warns(UserWarning, match="1 damaged line"):
        rows = run()
    after = lines(tmp_path)
    assert [after[name][:1] for name in before] == list(before.values())
    assert said == [("autoregressive", 92), ("spec_decode", 92), ("spec_decode", 250), ("autoregressive", 250)]
    assert [[json.loads(line)["question_id"] for line in file] for file in after.values()] == [[81, 92, 250]] * 2
    said.clear()
    assert run() == rows and rows[-1].questions == 3 and not said and lines(tmp_path) == after
    one_side = tmp_path / "answers/tiny-autoregressive.jsonl"  # loses its last answer
    one_side.write_text("\n".join(after["tiny-autoregressive"][:2]) + "\n")
    assert run()[-1].questions == 3 and said == [("autoregressive", 250)]


def test_more_questions_keep_existing_answers_but_other_settings_or_rules_are_refused(run, monkeypatch):
    said = asked(monkeypatch)
    run(per_category=1)
    assert run()[-1].questions == 3
    assert run(per_category=1)[-1].questions == 2  # a run of fewer questions again: the file holds more
    run(per_category=1, seed=0.0, max_new_tokens=float(LONGEST))  # whole numbers of any type name the same run
    both_methods = ("autoregressive", "spec_decode")
    assert sorted(said) == sorted((name, question["question_id"]) for name in both_methods for question in QUESTIONS)
    plain = Settings(method="spec_decode", block_size=2)
    for changes in (
        {"seed": 1}, {"max_new_tokens": 8}, {"instruction": "Be kind."}, {"conversation": "vicuna"},
        {"settings": replace(plain, temperature=0.5)}, {"settings": replace(plain, block_size=3)},
        {"settings": Settings(method="opt", alpha=0.5)},  # the target was timed beside another method
    ):  # fmt: skip
        with pytest.raises(ValueError, match="already holds answers of another run"):
            run(**changes)
    rule = replace(RULES["spec_decode"], kept=None)  # the same distribution by other operations: the digest must differ
    monkeypatch.setitem(table.METHODS, "spec_decode", table.of_rule("spec_decode", rule))
    with pytest.raises(ValueError, match="already holds answers of another run"):
        run(per_category=1)


def turns(pair, question: dict) -> list[int]:
    """Returns the tokens of the first turn's prompt, and the fewest that the second's can have."""
    said = question["turns"]
    texts = [PLAIN.prompt(said[:n], [""] * (n - 1)) for n in range(1, len(said) + 1)]
    return [len(text_ids(pair, text)) for text in texts]


def test_a_too_long_first_turn_is_refused_before_any_answer(run, pair, tmp_path, monkeypatch):
    monkeypatch.setattr(Decoder, "generate", lambda *_, **__: pytest.fail("answered"))
    longest = max(turns(pair, question)[0] for question in QUESTIONS)
    limit = r"turn 1, has \d+ tokens, over the limit of {}; raise spec_bench.run.max_prompt_length"
    with pytest.raises(ValueError, match=limit.format(longest - 1)):
        run(max_prompt_length=longest - 1)
    monkeypatch.setattr(sc.Pair, "max_length", longest + LONGEST - 1)
    with pytest.raises(ValueError, match=rf"and max_new_tokens is {LONGEST}: .* the {longest + LONGEST - 1} positions"):
        run()
    assert not (tmp_path / "answers").exists()


def test_a_conversation_beyond_the_limit_is_left_out_and_named(run, pair, tmp_path, monkeypatch, capsys):
    longest = max(turns(pair, question)[0] for question in QUESTIONS)
    assert min(turns(pair, question)[1] for question in QUESTIONS[:2]) > longest
    rows = run(max_prompt_length=longest)
    assert [(row.category, row.questions) for row in rows] == [("qa", 1), ("overall", 1)]
    said = capsys.readouterr().out
    assert said.count("left out: question") == 2 and "turn 2, has " in said and "raise it and run again" in said
    assert [[json.loads(line)["question_id"] for line in file] for file in lines(tmp_path).values()] == [[250]] * 2
    already = asked(monkeypatch)
    assert run()[-1].questions == 3 and (len(already), ("spec_decode", 250) in already) == (4, False)


def test_the_number_of_positions_of_the_models_is_a_limit_too(run, pair, capsys, monkeypatch):
    longest = max(turns(pair, question)[0] for question in QUESTIONS)
    monkeypatch.setattr(sc.Pair, "max_length", longest + LONGEST)
    assert run()[-1].questions == 1 and f"the {longest + LONGEST} positions" in capsys.readouterr().out


def test_a_pair_without_a_vocabulary_is_refused(pair):
    bare = sc.Pair(target=pair.target, draft=pair.draft, name="bare")
    with pytest.raises(ValueError, match="pair 'bare' has no vocabulary"):
        answering.Speaker(bare, Settings(method="autoregressive"), PLAIN)


def test_half_of_the_questions_are_40_in_each_of_six_categories():
    try:
        questions = answering.read_questions()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert Counter(question.group for question in questions) == dict.fromkeys(answering.CATEGORIES, 40)
    assert {(question.group, len(question.turns)) for question in questions} == {
        (group, 2 if group == "mt_bench" else 1) for group in answering.CATEGORIES
    }


def test_sub_categories_count_as_one():
    assert {Question(1, name, ("x",)).group for name in answering.MT_BENCH} == {"mt_bench"}
    assert Question(1, "math_reasoning", ("x",)).group == "math_reasoning" and len(answering.MT_BENCH) == 8


@pytest.mark.parametrize(("category", "turns"), [("cooking", ["x"]), ("qa", [])])
def test_a_question_without_category_or_turn_is_refused(category, turns, tmp_path, monkeypatch):
    monkeypatch.setenv(directory.VARIABLE, str(tmp_path))
    (tmp_path / "q.jsonl").write_text(json.dumps({"question_id": 7, "category": category, "turns": turns}) + "\n")
    with pytest.raises(ValueError, match=f"question 7 has category '{category}' and {len(turns)} turns.*mt_bench"):
        answering.read_questions("q.jsonl")


def test_a_missing_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(directory.VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="q.jsonl does not exist"):
        answering.read_questions("q.jsonl")
    with pytest.raises(FileNotFoundError, match="^/no/such/q.jsonl does not exist"):
        answering.read_questions("/no/such/q.jsonl")


SAID = {
    "plain": "User: Hi\nAssistant: Hello\nUser: Bye\nAssistant:",
    "vicuna": "USER: Hi ASSISTANT: Hello</s>USER: Bye ASSISTANT:",
    "llama2": "[INST] Hi [/INST] Hello </s><s>[INST] Bye [/INST]",
    "gemma": "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    "chatml": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
}


@pytest.mark.parametrize("name", answering.CONVERSATIONS)
def test_the_second_turn_contains_the_first_answer(name):
    assert get_conversation(name).prompt(["Hi", "Bye"], ["Hello"]) == SAID[name]


@pytest.mark.parametrize(("name", "begin"), [
    ("plain", "Be {kind}.\n\nUser: Hi"),
    ("vicuna", "Be {kind}. USER: Hi ASSISTANT:"),
    ("llama2", "[INST] <<SYS>>\nBe {kind}.\n<</SYS>>\n\nHi [/INST]"),
    ("gemma", "<start_of_turn>user\nBe {kind}.\n\nHi<end_of_turn>"),
    ("chatml", "<|im_start|>system\nBe {kind}.<|im_end|>\n<|im_start|>user\nHi<|im_end|>"),
])  # fmt: skip
def test_an_instruction_appears_once_where_the_model_expects_it(name, begin):
    text = get_conversation(name).prompt(["Hi", "Bye"], ["Hello"], "Be {kind}.")
    assert text.startswith(begin) and text.count("Be {kind}.") == 1


def test_an_answer_ends_where_the_next_turn_begins():
    assert get_conversation("plain").postprocess(" Hello there. \nUser: more") == "Hello there."
    assert get_conversation("chatml").postprocess("Hello<|im_end|>\n<|im_start|>") == "Hello"
    assert get_conversation("gemma").postprocess("\nHello ") == "Hello"


def test_mismatched_turns_and_answers_are_refused():
    with pytest.raises(ValueError, match="2 turns and 2 answers"):
        get_conversation("plain").prompt(["a", "b"], ["c", "d"])
    with pytest.raises(ValueError, match="unknown conversation 'vicuña'; .*there are plain, vicuna"):
        get_conversation("vicuña")


def test_spec_bench_is_not_a_task():
    assert "spec_bench" not in TASKS
