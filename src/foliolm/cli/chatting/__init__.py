"""Parts of ``foliolm chat``: the conversation with its slash commands, and who answers."""
