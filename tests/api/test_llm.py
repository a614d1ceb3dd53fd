"""The library's ``LLM`` on the embedded model."""

import gc
import weakref

import pytest

from foliolm import LLM, BeamSearchParams, SamplingParams
from foliolm.core.errors import QueueFullError, RequestError
from support.sure_answer import ANSWER, MESSAGES


@pytest.fixture(scope="module")
def llm(lean_settings):
    with LLM("smollm2-135m", **lean_settings, max_queued_requests=4) as made:
        yield made


def greedy(max_tokens=6, **more):
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


def test_texts_ids_and_lists_of_them(llm):
    ids = llm.model.tokenizer.encode("The capital of France is")
    (one,) = llm.generate("The capital of France is", greedy())
    assert one.prompt == "The capital of France is"
    assert one.prompt_token_ids == tuple(ids)
    assert one.outputs[0].text.startswith(" Paris")
    assert one.outputs[0].finish_reason == "length"
    assert len(one.outputs[0].token_ids) == 6
    (two,) = llm.generate(ids, greedy())
    assert two.outputs[0].token_ids == one.outputs[0].token_ids
    # More prompts than the queue holds: they are fed as room comes.
    many = llm.generate(["The capital of France is", ids, "1, 2, 3,"] * 3, greedy())
    assert len(many) == 9
    assert all(many[i].outputs[0].text == one.outputs[0].text for i in (0, 1, 3, 4, 6, 7))
    assert not llm.client.has_work
    assert llm.engine.check_invariants() == []


def test_one_sampling_a_prompt_n_stops_and_logprobs(llm):
    first, second = llm.generate(
        ["1, 2, 3, 4,", "The sea is"],
        [greedy(40, stop=(" 8,",)), SamplingParams(n=3, seed=5, max_tokens=5, temperature=1.2, logprobs=1)],
    )
    (stopped,) = first.outputs
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (" 5, 6, 7,", "stop", " 8,")
    assert stopped.logprobs is None
    assert [output.index for output in second.outputs] == [0, 1, 2]
    assert len({output.text for output in second.outputs}) > 1
    for output in second.outputs:
        assert len(output.logprobs) == len(output.token_ids)
        assert output.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in output.logprobs))


def test_chat(llm):
    (answer,) = llm.chat(MESSAGES, greedy(32))
    assert answer.outputs[0].text == ANSWER
    assert answer.outputs[0].finish_reason == "stop"
    assert answer.outputs[0].stop_reason in llm.model.eos_token_ids
    stamps = answer.outputs[0].stamps
    assert stamps.arrival_ns <= stamps.queued_ns <= stamps.admitted_ns < stamps.first_token_ns < stamps.last_token_ns


def test_prompt_logprobs(llm):
    (output,) = llm.generate("The capital of France is Paris", greedy(1, prompt_logprobs=0))
    entries = output.prompt_logprobs
    assert len(entries) == len(output.prompt_token_ids)
    assert entries[0] is None
    assert [entry.token_id for entry in entries[1:]] == list(output.prompt_token_ids[1:])
    assert all(entry.logprob <= 0 for entry in entries[1:])


def test_beam_search(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=1.0)
    one, two = llm.beam_search(["The capital of France is", [504, 3575, 282, 4649, 314]], params)
    assert [sequence.tokens for sequence in one.sequences] == [sequence.tokens for sequence in two.sequences]
    scores = [sequence.score for sequence in one.sequences]
    assert scores == sorted(scores, reverse=True)
    best = one.sequences[0]
    assert best.cum_logprob == pytest.approx(sum(entry.logprob for entry in best.logprobs))
    assert best.tokens[:5] == (504, 3575, 282, 4649, 314)
    assert "Paris" in best.text
    with pytest.raises(RequestError, match="best_of"):
        llm.beam_search("x", BeamSearchParams(beam_width=0, max_tokens=6))
    assert llm.engine.check_invariants() == []


@pytest.mark.parametrize(
    ("prompts", "sampling", "field"),
    [
        ([[]], None, "prompt"),
        ([[49152 + 100]], None, "prompt"),
        (["word " * 600], None, "prompt"),
        ([[7] * 512], None, "prompt"),
        (["a", "b"], [SamplingParams()], "sampling_params"),
        (["a"], SamplingParams(stop_token_ids=(10**6,)), "stop_token_ids"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(llm, prompts, sampling, field):
    steps = llm.engine.ledger.totals.num_steps
    with pytest.raises(RequestError) as error:
        llm.generate(prompts, sampling)
    assert error.value.field == field
    assert llm.engine.ledger.totals.num_steps == steps


def test_n_above_an_empty_queue_is_refused_and_leaves_nothing(llm):
    with pytest.raises(QueueFullError):
        llm.generate("a", SamplingParams(n=5, max_tokens=2))
    assert not llm.client.has_work


def test_an_error_in_the_middle_leaves_nothing_running(llm, monkeypatch):
    step = llm.client.step
    calls = []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(llm.client, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], greedy(50))
    monkeypatch.undo()
    assert not llm.client.has_work
    assert llm.engine.scheduler.stats().kv_blocks_used == 0


def test_garbage_collections_pass_over_what_start_up_made(lean_settings):
    """Hundreds of thousands of objects: to walk them took a tenth of a second in the middle of a step."""

    class Node:
        pass

    with LLM("smollm2-135m", **lean_settings) as made:
        assert gc.get_freeze_count() > 100_000
        assert len(gc.get_objects()) < gc.get_freeze_count() / 10
        made.generate("The sea", greedy(2))
        node = Node()
        node.itself, gone = node, weakref.ref(node)
        del node
        gc.collect()
        assert gone() is None, "later cycles are collected"
    assert gc.get_freeze_count() == 0
