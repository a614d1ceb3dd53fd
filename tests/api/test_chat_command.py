"""``foliolm chat``: the conversation, its commands, a server and an engine of one's own."""

import json
import subprocess
import sys

import pytest

from foliolm.cli.chatting.backends import ChatError, RemoteBackend
from foliolm.cli.chatting.session import Session
from foliolm.core.errors import ConfigError
from support.sure_answer import ANSWER, MESSAGES, QUESTION


class Echo:
    """Answers with how many messages it was given, and the last one."""

    name = "echo"

    def __init__(self):
        self.asked = []
        self.closed = 0

    def stream(self, messages, options):
        self.asked.append(([dict(message) for message in messages], dict(options)))
        try:
            yield f"{len(messages)}:"
            if messages[-1]["content"] == "interrupt":
                raise KeyboardInterrupt
            if messages[-1]["content"] == "break":
                raise ChatError("it broke")
            yield messages[-1]["content"]
        finally:
            self.closed += 1

    def close(self):
        pass


@pytest.fixture
def session():
    said = []
    session = Session(Echo(), said.append, None, {})
    session.said = said
    return session


def text(session):
    whole = "".join(session.said)
    session.said.clear()
    return whole


def test_turns_are_kept(session):
    assert session.take("one")
    assert text(session) == "1:one\n"
    assert session.take("  two  ")
    assert text(session) == "3:two\n"
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2
    assert session.take("   ")
    assert text(session) == ""
    assert not session.take("/quit")


def test_system_reset_undo_retry_history(session):
    session.take("/system Be brief.")
    session.take("one")
    assert session.backend.asked[-1][0][0] == {"role": "system", "content": "Be brief."}
    session.take("two")
    session.take("/undo")
    assert [message["content"] for message in session.turns] == ["one", "2:one"]
    session.take("/retry")
    assert session.backend.asked[-1][0][-1] == {"role": "user", "content": "one"}
    text(session)
    session.take("/history")
    assert text(session) == "[system] Be brief.\n[user] one\n[assistant] 2:one\n"
    session.take("/reset")
    assert session.messages == [{"role": "system", "content": "Be brief."}]
    session.take("/system")
    assert session.messages == []
    text(session)
    session.take("/undo")
    session.take("/retry")
    session.take("/wat")
    assert text(session).splitlines() == [
        "there is nothing to take back",
        "there is nothing to answer yet",
        "there is no command /wat; /help lists them",
    ]


def test_options(session):
    for line in ("/set temperature 0.5", "/set max_tokens 9", "/set top_k many", "/set mood good", "/set"):
        session.take(line)
    said = text(session).splitlines()
    assert said[2].startswith("top_k cannot be 'many'")
    assert said[3].startswith("there is no option mood")
    assert said[4] == "temperature = 0.5, max_tokens = 9"
    session.take("/set max_tokens")
    session.take("x")
    assert session.backend.asked[-1][1] == {"temperature": 0.5}


def test_help_names_every_command(session):
    session.take("/help")
    listed = {line.split()[0].strip("/") for line in text(session).splitlines() if line.startswith("/")}
    assert listed == {*session._commands, "quit"}


def test_a_stopped_answer_stays_and_a_failed_one_does_not_spoil_the_conversation(session):
    session.take("interrupt")
    assert text(session) == "1:\n(stopped)\n"
    assert session.turns[-1] == {"role": "assistant", "content": "1:"}
    session.take("break")
    assert "error: it broke" in text(session)
    assert session.turns[-1]["role"] == "assistant"
    assert session.backend.closed == 2


def test_saved_conversations_come_back(session, tmp_path):
    session.take("/system S")
    session.take("one")
    path = tmp_path / "kept.json"
    session.take(f"/save {path}")
    kept = session.messages
    session.take("/system")
    session.take("/reset")
    session.take(f"/load {path}")
    assert session.messages == kept
    text(session)
    (tmp_path / "bad.json").write_text('{"a": 1}')
    for line in (f"/load {tmp_path / 'none'}", f"/load {tmp_path / 'bad.json'}", "/load", "/save", "/save /no/such/x"):
        session.take(line)
    assert len(text(session).splitlines()) == 5
    assert session.messages == kept


def test_against_a_server(real_server):
    backend = RemoteBackend(f"{real_server.url}/v1", None, None)
    assert backend.name == "smollm2-135m"
    pieces = list(backend.stream(MESSAGES, {"temperature": 0, "max_tokens": 20}))
    assert "".join(pieces) == ANSWER
    assert len(pieces) > 3
    with pytest.raises(ChatError, match=r"max_tokens.*HTTP 400"):
        list(backend.stream(MESSAGES, {"max_tokens": -1}))
    with pytest.raises(ConfigError, match="does not answer"):
        RemoteBackend("127.0.0.1:1", None, None)
    with pytest.raises(ConfigError, match="--url"):
        RemoteBackend("ftp://x", None, None)
    leaving = backend.stream(MESSAGES, {"max_tokens": 400, "ignore_eos": True})
    next(leaving)
    leaving.close()
    real_server.assert_all_free()


def foliolm_chat(lines, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "foliolm", "chat", *arguments],
        input="".join(f"{line}\n" for line in lines), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_the_command_against_a_server(real_server, tmp_path):
    path = tmp_path / "c.json"
    done = foliolm_chat(["/set temperature 0", QUESTION, f"/save {path}"], "--url", real_server.url)
    assert done.returncode == 0, done.stderr
    assert ANSWER in done.stdout
    assert json.loads(path.read_text())[1]["content"] == ANSWER
    wrong = foliolm_chat([], "--url", real_server.url, "--block-size", "8")
    assert wrong.returncode == 2
    assert "--block-size" in wrong.stderr


def test_the_command_with_an_engine_of_its_own(lean_flags):
    done = foliolm_chat([QUESTION, "/history"], "--temperature", "0", *lean_flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(ANSWER) == 2
