"""A conversation in the terminal: its turns, and the commands that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from foliolm.cli.chatting.backends import OPTIONS, Backend, ChatError, Messages

HELP = """\
/help            this list
/system TEXT     set the system message; without TEXT, remove it
/set NAME VALUE  set temperature, top_p, top_k, max_tokens or seed; without NAME, show what is set
/retry           answer the last message again
/undo            take back the last message and its answer
/history         show the conversation
/reset           begin a new conversation; the system message stays
/save FILE       keep the conversation as JSON
/load FILE       go on with a conversation that was saved
/quit            end (so does Ctrl-D)
Ctrl-C stops an answer; what was said of it stays."""


class Session:
    """The conversation so far, and what a line from the user does to it.

    Args:
        backend: answers.
        write: takes text for the terminal, without line ends of its own.
        system: the system message, or None.
        options: sampling options.
    """

    def __init__(
        self, backend: Backend, write: Callable[[str], None], system: str | None, options: dict[str, Any]
    ) -> None:
        self.backend = backend
        self.system = system
        self.options = options
        self.turns: Messages = []
        self._write = write
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda rest: self._say(HELP),
            "system": self._set_system,
            "set": self._set_option,
            "retry": self._retry,
            "undo": self._undo,
            "history": self._history,
            "reset": self._reset,
            "save": self._save,
            "load": self._load,
        }

    def take(self, line: str) -> bool:
        """Do what a line says: a command, or a message to answer.

        Returns:
            False where the user wants to end.
        """
        text = line.strip()
        if not text:
            return True
        if not text.startswith("/"):
            self._ask(text)
            return True
        name, _, rest = text[1:].partition(" ")
        if name in ("quit", "exit", "bye"):
            return False
        command = self._commands.get(name)
        if command is None:
            self._say(f"there is no command /{name}; /help lists them")
        else:
            command(rest.strip())
        return True

    @property
    def messages(self) -> Messages:
        """What is sent: the system message, then the turns."""
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, *self.turns]

    def _ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})
        self._answer()

    def _answer(self) -> None:
        said = ""
        try:
            with closing(self.backend.stream(self.messages, self.options)) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    said += piece
                    self._write(piece)
            self._write("\n")
        except KeyboardInterrupt:
            self._write("\n(stopped)\n")
        except ChatError as error:
            self._write("\n" if said else "")
            self._say(f"error: {error}")
            if not said:
                self.turns.pop()  # a message that has no answer would stand there twice after another try
                return
        self.turns.append({"role": "assistant", "content": said})

    def _say(self, text: str) -> None:
        self._write(text + "\n")

    def _set_system(self, rest: str) -> None:
        self.system = rest or None
        self._say("the system message is set" if rest else "the system message is removed")

    def _set_option(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name:
            self._say(", ".join(f"{key} = {self.options[key]}" for key in self.options) or "nothing is set")
        elif name not in OPTIONS:
            self._say(f"there is no option {name}; there are {', '.join(OPTIONS)}")
        elif not value.strip():
            self.options.pop(name, None)
            self._say(f"{name} is the model's default again")
        else:
            try:
                self.options[name] = OPTIONS[name](value)
            except ValueError:
                self._say(f"{name} cannot be {value.strip()!r}; it must be a number")
            else:
                self._say(f"{name} = {self.options[name]}")

    def _retry(self, rest: str) -> None:
        if not self.turns:
            self._say("there is nothing to answer yet")
            return
        if self.turns[-1]["role"] == "assistant":
            self.turns.pop()
        self._answer()

    def _undo(self, rest: str) -> None:
        if not self.turns:
            self._say("there is nothing to take back")
            return
        while self.turns and self.turns.pop()["role"] != "user":
            pass
        self._say(f"{len(self.turns)} messages are left")

    def _history(self, rest: str) -> None:
        for message in self.messages:
            self._say(f"[{message['role']}] {message['content']}")
        if not self.messages:
            self._say("nothing was said yet")

    def _reset(self, rest: str) -> None:
        self.turns.clear()
        self._say("a new conversation begins")

    def _save(self, rest: str) -> None:
        if not rest:
            self._say("/save needs a file's name")
            return
        try:
            Path(rest).expanduser().write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n", "utf-8")
        except OSError as error:
            self._say(f"{rest} cannot be written: {error.strerror}")
        else:
            self._say(f"{len(self.messages)} messages are kept in {rest}")

    def _load(self, rest: str) -> None:
        try:
            loaded = json.loads(Path(rest).expanduser().read_text("utf-8"))
            messages = [{"role": str(one["role"]), "content": str(one["content"])} for one in loaded]
        except OSError as error:
            self._say(f"{rest or '(no name)'} cannot be read: {error.strerror}")
        except (ValueError, KeyError, TypeError):
            self._say(f"{rest} holds no conversation")
        else:
            has_system = bool(messages) and messages[0]["role"] == "system"
            self.system = messages[0]["content"] if has_system else None
            self.turns = messages[1:] if has_system else messages
            self._say(f"{len(messages)} messages are back")
