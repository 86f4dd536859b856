"""Compiled grammars of an engine, made in a thread beside its steps."""

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from weakref import WeakValueDictionary

from flyball_runtime.core.cpus import cores, stay_on
from flyball_runtime.core.grammar import Grammar
from flyball_runtime.grammar.compiler import CompiledGrammar, GrammarCompiler, no_vocabulary

MAX_CACHED_BYTES = 256 * 1024 * 1024
"""Of grammars that may be unused. A usual one takes less than 1 MB."""


class GrammarCache:
    """Keeps the grammars that somebody holds, and the latest of the others.

    Args:
        compiler: None if the checkpoint has no tokenizer that it could use; then every grammar is refused.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._lock = Lock()
        self._held: WeakValueDictionary[Grammar, CompiledGrammar] = WeakValueDictionary()
        self._latest: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._num_bytes = 0
        self._threads = ThreadPoolExecutor(
            1, thread_name_prefix="flyball-grammar", initializer=stay_on, initargs=(cores(),)
        )

    def compile(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """Return the grammar, or the promise of it; its ``result()`` raises InvalidRequest."""
        known = self._find(grammar)
        if known is None:
            return self._threads.submit(self.get, grammar)
        future: Future[CompiledGrammar] = Future()
        future.set_result(known)
        return future

    def get(self, grammar: Grammar) -> CompiledGrammar:
        """Return the grammar, compiled here and now if it has to be. Raises InvalidRequest."""
        if (known := self._find(grammar)) is not None:
            return known
        if self._compiler is None:
            raise no_vocabulary()
        compiled = self._compiler.compile(grammar)
        with self._lock:
            self._held[grammar] = self._latest[grammar] = compiled
            self._num_bytes += compiled.num_bytes
            while self._num_bytes > MAX_CACHED_BYTES and len(self._latest) > 1:
                self._num_bytes -= self._latest.popitem(last=False)[1].num_bytes
        return compiled

    def _find(self, grammar: Grammar) -> CompiledGrammar | None:
        with self._lock:
            known = self._held.get(grammar)
            if grammar in self._latest:
                self._latest.move_to_end(grammar)
        return known
