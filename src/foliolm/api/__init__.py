"""The OpenAI HTTP layer, and the library's ``LLM``."""
