"""Measure any OpenAI-compatible server.

From a shell: ``flyball bench``. From a script: ``await flyball_clients.bench.benchmark.run_benchmark(BenchSettings(...))``.
"""
