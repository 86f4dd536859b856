"""/tokenize and /detokenize, in vLLM's shapes."""

from fastapi import Request, Response

from flyball_runtime.api.body import Json, convert
from flyball_runtime.api.errors import json_response
from flyball_runtime.api.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from flyball_runtime.api.server import Server
from flyball_runtime.core.errors import InvalidRequest, PromptTooLong, TokenOutOfVocabulary

MAX_TOKENS = 65536


class TokenizeRoutes:
    """Both take as many tokens as the model does, and MAX_TOKENS in any case, so that too long a prompt can be measured."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def tokenize(self, request: Request) -> Response:
        """A text (``prompt``) or a chat (``messages``) as token ids."""
        _, answer = await self._server.read(request, self._tokenized)
        return answer

    async def detokenize(self, request: Request) -> Response:
        """Token ids as text, special tokens included."""
        _, answer = await self._server.read(request, self._detokenized)
        return answer

    def _tokenized(self, fields: Json) -> Response:
        self._server.check_messages(fields.get("messages"))
        if "messages" in fields:
            body: TokenizeChatRequest | TokenizeTextRequest = convert(fields, TokenizeChatRequest)
        else:
            body = convert(fields, TokenizeTextRequest)
        self._server.check_model(body.model)
        max_model_len = self._server.engine_info().max_model_len
        token_ids = self._encode(body)
        strings = self._server.codec.token_strings(token_ids) if body.return_token_strs else None
        return json_response(
            {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": strings}
        )

    def _detokenized(self, fields: Json) -> Response:
        tokens = fields.get("tokens")
        if isinstance(tokens, list) and len(tokens) > self._most_tokens():
            raise InvalidRequest(
                f"tokens has {len(tokens)} entries; at most {self._most_tokens()} are allowed. Send fewer.",
                param="tokens",
            )
        body = convert(fields, DetokenizeRequest)
        self._server.check_model(body.model)
        vocab_size = self._server.engine_info().vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                raise TokenOutOfVocabulary(token_id, vocab_size)
        return json_response({"prompt": self._server.codec.decode(body.tokens)})

    def _encode(self, body: TokenizeChatRequest | TokenizeTextRequest) -> list[int]:
        codec, most = self._server.codec, self._most_tokens()
        try:
            if isinstance(body, TokenizeChatRequest):
                adds = bool(body.add_special_tokens)
                return codec.encode_chat(body, add_special_tokens=adds, max_tokens=most)
            adds = body.add_special_tokens is not False
            (ids,) = codec.encode([body.prompt], add_special_tokens=adds, max_tokens=most)
            return ids
        except PromptTooLong:
            raise InvalidRequest(
                f"the prompt has more than {most} tokens, the most that are tokenized here. Send a shorter one.",
                param="messages" if isinstance(body, TokenizeChatRequest) else "prompt",
            ) from None

    def _most_tokens(self) -> int:
        return max(self._server.engine_info().max_model_len, MAX_TOKENS)
