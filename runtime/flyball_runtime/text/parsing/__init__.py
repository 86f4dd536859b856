"""From the text that a model writes to the parts of a message: reasoning, content and tool calls.

Pure state machines: pieces of text in, events out. How the text is split into pieces changes only how the texts of events
are split. Text that does not have the expected form becomes content.
"""
