"""What crosses processes arrives as it was sent."""

from foliolm.core.errors import ConfigError, EngineDeadError, ModelError, QueueFullError, RequestError
from foliolm.core.plan import Closed, Decision, DecisionKind
from foliolm.core.record import StepRecord
from foliolm.core.request import EngineRequest, FinishReason, RequestStamps, TokenLogprobs, TokenOutput
from foliolm.core.result import StepSeconds
from foliolm.core.sampling import SamplingParams
from foliolm.engine.engine import EngineInfo
from foliolm.engine.messages import (
    Abort,
    Add,
    EngineStats,
    Failure,
    Progress,
    Ready,
    StepOutputs,
    Stop,
    decode_from_engine,
    decode_to_engine,
    encode,
)


def test_messages_to_an_engine():
    sampling = SamplingParams(
        max_tokens=3, seed=2**64 - 1, stop=("é", "b"), logit_bias=((3, -1.5),), allowed_token_ids=(1, 2), logprobs=0,
        bad_words_token_ids=((1, 2), (3,)),
    )  # fmt: skip
    request = EngineRequest(2**40, (1, 2, 3), sampling, (7, 8), 2**62, -3, "label", None, "salt")
    for message in (Add((request, request)), Abort((1, 2)), Stop()):
        assert decode_to_engine(encode(message)) == message


def test_messages_from_an_engine():
    decision = Decision(DecisionKind.WAIT, 4, "kv_blocks", 3, 2, 9, (("swap", 0.5),))
    record = StepRecord(0, 5, 6, 3, 2, 7, 3, 70, StepSeconds(0.1, 0.01, 0.08, 0.01), Closed.KV, (decision,))
    logprobs = (TokenLogprobs(4, -0.25, 1, ((4, -0.25), (5, float("-inf")))),)
    outputs = [
        TokenOutput(1, (4,)),
        TokenOutput(2, (5,), logprobs),
        TokenOutput(2, (6,)),
        TokenOutput(3, (), finish_reason=FinishReason.ERROR, error="broken", stamps=RequestStamps(1, 2, 3, 4, 5, 6, 7)),
        TokenOutput(4, (1, 2), prompt_logprobs=(None, logprobs[0])),
    ]
    refused = [(9, Failure.of(RequestError("too long", "prompt", "context")))]
    step = StepOutputs.of(outputs, [8], refused, EngineStats(1, 2, 3, 4), record, [], [])
    assert step.plain_ids == [1]
    back = decode_from_engine(encode(step))
    assert back == step
    assert list(back.outputs()) == outputs
    info = EngineInfo("m", 128, 256, 16, 64, "float32", ("a", "b"))
    for message in (Progress("half"), Ready(info), Failure("config", "no")):
        assert decode_from_engine(encode(message)) == message


def test_errors_come_back_as_what_they_were():
    request = Failure.of(RequestError("n is 0", "n", "range")).error()
    assert isinstance(request, RequestError)
    assert (str(request), request.field, request.code) == ("n is 0", "n", "range")
    full = Failure.of(QueueFullError("full", 7)).error()
    assert isinstance(full, QueueFullError)
    assert full.retry_after_s == 7
    assert isinstance(Failure.of(ConfigError("x")).error(), ConfigError)
    assert isinstance(Failure.of(ModelError("x")).error(), ModelError)
    odd = Failure.of(KeyError("x")).error()
    assert isinstance(odd, EngineDeadError)
    assert "KeyError" in str(odd)
