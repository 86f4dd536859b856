"""/tokenize and /detokenize, in vLLM's shapes."""

from fastapi import Request, Response

from flyball_runtime.api.body import convert, decode, parse_object
from flyball_runtime.api.errors import json_response
from flyball_runtime.api.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from flyball_runtime.api.server import Server
from flyball_runtime.core.errors import TokenOutOfVocabulary


class TokenizeRoutes:
    def __init__(self, server: Server) -> None:
        self._server = server

    async def tokenize(self, request: Request) -> Response:
        """A text (``prompt``) or a chat (``messages``) as token ids."""
        fields = parse_object(await self._server.read_body(request))
        if "messages" in fields:
            body: TokenizeChatRequest | TokenizeTextRequest = convert(fields, TokenizeChatRequest)
        else:
            body = convert(fields, TokenizeTextRequest)
        self._server.check_model(body.model)
        token_ids = await self._encode(body)
        strings = self._server.codec.token_strings(token_ids) if body.return_token_strs else None
        max_model_len = self._server.engine_info().max_model_len
        return json_response(
            {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": strings}
        )

    async def detokenize(self, request: Request) -> Response:
        """Token ids as text, special tokens included."""
        body = decode(await self._server.read_body(request), DetokenizeRequest)
        self._server.check_model(body.model)
        vocab_size = self._server.engine_info().vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                raise TokenOutOfVocabulary(token_id, vocab_size)
        return json_response({"prompt": self._server.codec.decode(body.tokens)})

    async def _encode(self, body: TokenizeChatRequest | TokenizeTextRequest) -> list[int]:
        if isinstance(body, TokenizeTextRequest):
            return await self._server.codec.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        self._server.check_count("messages", len(body.messages), self._server.settings.max_messages)
        return await self._server.codec.encode_chat(body, add_special_tokens=bool(body.add_special_tokens))
