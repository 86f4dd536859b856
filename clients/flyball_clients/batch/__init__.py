"""``flyball batch``: the requests of a file in OpenAI's batch format, answered by a server or by an engine of its own."""
