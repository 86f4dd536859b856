"""The real engine and tuner on a clock of their own: a run of an hour takes a minute, and the same seed gives the same run.

Only the clock and the executor are replaced. ``flyball simulate`` is its command.
"""
