"""From token ids to the text that a client sees; the API and the in-process LLM share it."""
