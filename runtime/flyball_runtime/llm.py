"""The engine in this process, for scripts and notebooks: ``LLM("path").generate(["Hello"])``."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyball_runtime.core.beam_search import BeamSearch, EarlyStopping
from flyball_runtime.core.config import OFFLINE_BATCHED_TOKENS, OFFLINE_SCHEDULER_STEPS, EngineConfig
from flyball_runtime.core.errors import ConfigError, InvalidAdapter, InvalidRequest, RequestError
from flyball_runtime.core.generation_config import AUTO, default_sampling
from flyball_runtime.core.lora import LoraConfig
from flyball_runtime.core.request import Failed, Hypothesis, Request, TokenLogprobs, validate_request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.speculation import SpeculativeConfig
from flyball_runtime.engine.runner import start_engine
from flyball_runtime.model.hub import find_checkpoint
from flyball_runtime.text.bad_words import with_bad_words
from flyball_runtime.text.output import OutputText, whole_text
from flyball_runtime.text.tokenizer import load_tokenizer

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "LoRARequest",
    "SamplingParams",
]

PromptInput = str | list[int]


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter, under vLLM's names. It is read when it is first used.

    Attributes:
        lora_name: for messages.
        lora_int_id: tells it apart from others of its name and path, if its files have changed.
        lora_path: its folder.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class CompletionOutput:
    """One prompt's output.

    ``finish_reason``: stop (a stop token or string) or length. ``logprobs``: of each token, if the settings ask for them.
    ``prompt_logprobs``: likewise, of each prompt token; the first has none.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass
class BeamSearchParams:
    """Settings of ``beam_search``, with vLLM's names and those of transformers; see ``core.beam_search.BeamSearch``.

    ``logprobs``: as in SamplingParams.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def sampling(self) -> SamplingParams:
        """Return what the engine is asked for."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.logprobs,
            beam_search=BeamSearch(
                width=self.beam_width, length_penalty=self.length_penalty, early_stopping=self.early_stopping
            ),
        )


@dataclass
class BeamSearchSequence:
    """An output that a beam search has found.

    Attributes:
        tokens: of the prompt and the output, with the token that ended it, if one did.
        cum_logprob: of all output tokens together.
        score: that over the number of output tokens to the power of ``length_penalty``.
        logprobs: of each output token, if the settings ask for them.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float
    finish_reason: str
    logprobs: list[TokenLogprobs] | None = None


@dataclass
class BeamSearchOutput:
    """What the search for one prompt has found: ``beam_width`` outputs, the best first."""

    sequences: list[BeamSearchSequence]


class LLM:
    """A model and its engine, without processes or ports.

    Args:
        model: directory of a Hugging Face checkpoint, or a Hugging Face id.
        generation_config: where sampling defaults come from: ``auto`` (the checkpoint), ``none``, or a folder.
        speculative_config: the fields of SpeculativeConfig, e.g. ``{"method": "ngram", "num_speculative_tokens": 4}``.
        enable_lora: let calls have adapters (``LoRARequest``); ``max_loras``, ``max_lora_rank`` and ``max_cpu_loras`` are
            those of LoraConfig.
        settings: fields of EngineConfig, e.g. ``max_num_seqs=64, dtype="bfloat16"``.
    Attributes:
        default_sampling: used by ``generate`` and ``chat`` when they are given no settings.
    Raises:
        ConfigError: the model cannot be loaded, or a setting is out of range.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        generation_config: str = AUTO,
        speculative_config: dict[str, Any] | None = None,
        enable_lora: bool = False,
        max_loras: int = 1,
        max_lora_rank: int = 16,
        max_cpu_loras: int = 32,
        **settings: Any,
    ) -> None:
        if enable_lora:
            settings["lora"] = LoraConfig(max_loras=max_loras, max_lora_rank=max_lora_rank, max_cpu_loras=max_cpu_loras)
        if speculative_config is not None:
            settings["speculative_config"] = SpeculativeConfig.of(speculative_config)
        path = find_checkpoint(str(model), settings.pop("revision", None), settings.get("model_impl", "auto"))
        self.default_sampling = default_sampling(generation_config, path)
        self.tokenizer = load_tokenizer(path)
        self._max_adapters = max_cpu_loras if enable_lora else 0
        self._adapters: dict[LoRARequest, int] = {}
        if not settings.get("async_scheduling") and speculative_config is None:
            settings.setdefault("num_scheduler_steps", OFFLINE_SCHEDULER_STEPS)
        settings.setdefault("max_num_batched_tokens", max(OFFLINE_BATCHED_TOKENS, settings.get("max_num_seqs", 0)))
        self.engine = start_engine(EngineConfig(model=str(path), served_model_name=str(model), **settings))
        self._num_requests = 0

    def generate(
        self,
        prompts: PromptInput | Seq[PromptInput],
        sampling: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
    ) -> list[CompletionOutput]:
        """Generate for every prompt, batched continuously; results are in the prompts' order.

        Args:
            prompts: texts, or lists of token ids; one alone is taken as a list of one.
            sampling: settings for all prompts, or one for each; None takes ``default_sampling``.
            cache_salt: prefixes are reused only among calls with the same salt.
            lora_request: an adapter for all prompts, or one or None for each.
        Raises:
            RequestError: an adapter cannot be loaded, a prompt or setting can never run, or the model gave no usable logits
                for a prompt; the message names it. What was generated until then is dropped.
        """
        many = _as_list(prompts)
        settings = [self._checked(params) for params in self._settings_for(many, sampling)]
        adapters = self._adapters_for(many, lora_request)
        requests = [
            self._request(prompt, params, cache_salt, adapter)
            for prompt, params, adapter in zip(many, settings, adapters, strict=True)
        ]
        return [output.generation() for output in self._run(requests)]

    def beam_search(
        self,
        prompts: PromptInput | Seq[PromptInput],
        params: BeamSearchParams,
        *,
        cache_salt: str | None = None,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest outputs of every prompt; results are in the prompts' order.

        Sequences and scores are those of ``generate(num_beams=beam_width)`` in transformers.

        Raises:
            RequestError: as ``generate``.
        """
        sampling = self._checked(params.sampling())
        many = _as_list(prompts)
        adapters = self._adapters_for(many, lora_request)
        requests = [
            self._request(prompt, sampling, cache_salt, adapter) for prompt, adapter in zip(many, adapters, strict=True)
        ]
        return [output.found() for output in self._run(requests)]

    def _run(self, requests: list[Request]) -> list["_Output"]:
        outputs = {request.request_id: _Output(request, self.tokenizer) for request in requests}
        try:
            self._submit(requests)
            while any(output.finish_reason is None for output in outputs.values()):
                self._step(outputs)
            while self.engine.has_work():  # steps that were launched ahead of the last ending
                self.engine.step()
        finally:  # also when interrupted: the engine goes on clean
            for request in requests:
                self.engine.abort(request.request_id)
        return list(outputs.values())

    def chat(
        self,
        messages: list[dict[str, str]],
        sampling: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> CompletionOutput:
        """Answer one chat, rendered with the model's chat template."""
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return self.generate([prompt], sampling, lora_request=lora_request)[0]

    def _settings_for(
        self, prompts: list[PromptInput], sampling: SamplingParams | Seq[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling or self.default_sampling] * len(prompts)
        if len(sampling) != len(prompts):
            raise InvalidRequest(
                f"got {len(sampling)} sampling settings for {len(prompts)} prompts; give one, or one each."
            )
        return list(sampling)

    def _adapters_for(
        self, prompts: list[PromptInput], wanted: LoRARequest | Seq[LoRARequest | None] | None
    ) -> list[int | None]:
        if wanted is None or isinstance(wanted, LoRARequest):
            wanted = [wanted] * len(prompts)
        if len(wanted) != len(prompts):
            raise InvalidRequest(f"got {len(wanted)} adapters for {len(prompts)} prompts; give one, or one each.")
        return [None if one is None else self._loaded(one) for one in wanted]

    def _loaded(self, adapter: LoRARequest) -> int:
        """Return the number of an adapter, which is read if that has not been done."""
        if adapter not in self._adapters:
            if len(self._adapters) >= self._max_adapters:
                raise InvalidAdapter(
                    f"{adapter.lora_name}: {len(self._adapters)} adapters are loaded, and max_cpu_loras is "
                    f"{self._max_adapters} (0 without enable_lora). Make the LLM with enable_lora=True and a higher one."
                )
            number = len(self._adapters)
            try:
                self.engine.load_adapter(number, adapter.lora_path).result()
            except ConfigError as error:
                raise InvalidAdapter(f"{adapter.lora_name}: {error}") from None
            self._adapters[adapter] = number
        return self._adapters[adapter]

    def _checked(self, sampling: SamplingParams) -> SamplingParams:
        sampling.validate(self.engine.info.vocab_size)
        return with_bad_words(sampling, self.tokenizer.backend_tokenizer)

    def _request(
        self, prompt: PromptInput, sampling: SamplingParams, cache_salt: str | None, adapter: int | None
    ) -> Request:
        self._num_requests += 1
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return Request(
            request_id=str(self._num_requests),
            prompt_token_ids=token_ids,
            sampling=sampling,
            cache_salt=cache_salt,
            adapter=adapter,
        )

    def _submit(self, requests: list[Request]) -> None:
        info = self.engine.info
        for request in requests:
            validate_request(request, max_model_len=info.max_model_len, vocab_size=info.vocab_size)
        for request in requests:
            failed = self.engine.submit(request)
            if failed is not None:
                raise InvalidRequest(failed.message)

    def _step(self, outputs: dict[str, "_Output"]) -> None:
        step = self.engine.step()
        for request_id, scores in step.prompt_logprobs.items():
            if request_id in outputs:
                outputs[request_id].add_prompt_logprobs(scores)
        for request_id, token_id in zip(step.request_ids, step.token_ids, strict=True):
            if outputs[request_id].add(token_id, step.logprobs.get(request_id)):
                self.engine.abort(request_id)
        for request_id, hypotheses in step.hypotheses.items():
            outputs[request_id].hypotheses = hypotheses
        for ending in step.endings:
            if isinstance(ending, Failed):
                raise RequestError(f"prompt {list(outputs).index(ending.request_id)}: {ending.message}")
            outputs[ending.request_id].end(ending.reason)


class _Output:
    """One request's tokens as they come. Their text is needed as it comes where stop strings may end it."""

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self._prompt_token_ids = request.prompt_token_ids
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if request.sampling.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if request.sampling.prompt_logprobs is None else [None]
        )
        self._tokenizer, self._sampling = tokenizer.backend_tokenizer, request.sampling
        self._text = OutputText(self._tokenizer, self._sampling) if request.sampling.stop else None
        self.hypotheses: list[Hypothesis] = []
        self._pieces: list[str] = []
        self.finish_reason: str | None = None

    def add(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Take a token; True when its text completed a stop string."""
        if self.finish_reason is not None:
            return False
        self._token_ids.append(token_id)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)
        if self._text is None:
            return False
        self._pieces.append(self._text.add([token_id]))
        if self._text.stopped:
            self.finish_reason = "stop"
        return self._text.stopped

    def add_prompt_logprobs(self, scores: list[TokenLogprobs]) -> None:
        if self._prompt_logprobs is not None:
            self._prompt_logprobs += scores

    def end(self, reason: str) -> None:
        if self.finish_reason is None:
            self.finish_reason = reason
            if self._text is not None:
                self._pieces.append(self._text.finish())

    def found(self) -> BeamSearchOutput:
        return BeamSearchOutput([self._sequence(one) for one in self.hypotheses])

    def _sequence(self, one: Hypothesis) -> BeamSearchSequence:
        return BeamSearchSequence(
            tokens=self._prompt_token_ids + one.token_ids,
            text=self._whole_text(one.token_ids),
            cum_logprob=one.cum_logprob,
            score=one.score,
            finish_reason=one.reason,
            logprobs=None if self._logprobs is None else one.logprobs,
        )

    def _whole_text(self, token_ids: list[int]) -> str:
        return whole_text(self._tokenizer, self._sampling, token_ids)

    def generation(self) -> CompletionOutput:
        return CompletionOutput(
            self._prompt_token_ids,
            self._token_ids,
            self._whole_text(self._token_ids) if self._text is None else "".join(self._pieces),
            self.finish_reason or "",
            self._logprobs,
            self._prompt_logprobs,
        )


def _as_list(prompts: PromptInput | Seq[PromptInput]) -> list[PromptInput]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
