# SPDX-License-Identifier: MIT
"""What the gateway knows of the model that its workers serve: tokenizer, chat template, parsers, the cache of tokens.

Read once at start, from the files that the configuration names; what is wrong with them is a `StartError`.
"""

from __future__ import annotations

from pathlib import Path

from tokenspeed.config.gateway import GatewayConfig
from tokenspeed.config.gateway_http import TokenizerCacheConfig
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import resolve_model
from tokenspeed.gateway.chat.model import ServedModel
from tokenspeed.gateway.route.router import Router
from tokenspeed.gateway.start_error import StartError
from tokenspeed.gateway.text.builtin_templates import BUILT_IN
from tokenspeed.gateway.text.parse.names import Parsers, UnknownParser, parsers_named
from tokenspeed.gateway.text.template import ChatTemplate, TemplateError
from tokenspeed.gateway.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from tokenspeed.gateway.text.tokenizer_cache import CacheSizes, TokenizerCache
from tokenspeed.observability.gateway_metrics import GatewayMetrics


def load_model(config: GatewayConfig, router: Router, metrics: GatewayMetrics) -> ServedModel:
    """The tokenizer and the template that the configuration names. Raises `StartError`."""
    try:
        source = resolve_model(config.model_path)
        path = source.path if config.tokenizer_path is None else resolve_model(config.tokenizer_path).path
        tokenizer = load_tokenizer(path)
        tokenizer.prefer(config.preferred_sampling)
    except (ModelError, TokenizerError) as error:
        raise StartError(str(error), 2) from None
    names = [source.name, *config.model_aliases]
    if config.model_path is not None:
        names.append(config.model_path)
    template = _template(config, tokenizer)
    cache = _tokenizer_cache(config.tokenizer_cache, tokenizer, metrics)
    model = ServedModel(names, tokenizer, template, _parsers(config, template), router, cache)
    model.keep_reasoning = config.keep_reasoning
    return model


def _tokenizer_cache(
    config: TokenizerCacheConfig, tokenizer: Tokenizer, metrics: GatewayMetrics
) -> TokenizerCache | None:
    if not (config.exact_bytes or config.prefix_bytes):
        return None
    sizes = CacheSizes(config.exact_entries, config.exact_bytes, config.prefix_bytes)
    return TokenizerCache(tokenizer, sizes, metrics.tokenizer_lookup)


def _parsers(config: GatewayConfig, template: ChatTemplate | None) -> Parsers:
    source = template.source if template is not None else ""
    try:
        return parsers_named(config.reasoning_parser, config.tool_call_parser, source)
    except UnknownParser as error:
        raise StartError(str(error), 2) from None


def _template(config: GatewayConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    source = tokenizer.facts.chat_template
    if config.chat_template in BUILT_IN:
        source = BUILT_IN[config.chat_template]
    elif config.chat_template is not None:
        try:
            source = Path(config.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            names = ", ".join(BUILT_IN)
            message = f"--chat-template: {config.chat_template} is none of {names}, and no file: {error.strerror}"
            raise StartError(message, 2) from None
    if source is None:
        return None
    specials = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    try:
        return ChatTemplate(source, {name: token for name, token in specials.items() if token is not None})
    except TemplateError as error:
        raise StartError(str(error), 2) from None
