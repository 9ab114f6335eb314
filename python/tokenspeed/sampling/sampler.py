# SPDX-License-Identifier: MIT
"""The sampler: one call a step turns logits into tokens, by the parameters of each row's slot.

The runner calls it, in step order, on the thread that launches. Nothing in it waits for the device: tokens feed the
next step and the counts of penalties as tensors, so results are exact however many steps are in flight; only rows
with rules (grammars, barred sequences) wait for tokens of the step before, see `host_rules`. A batch that is all
greedy without extras costs one argmax. Noise depends on (seed, position, token) only, never on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.sampling.chosen import ChosenTokens
from tokenspeed.sampling.custom import load_processor
from tokenspeed.sampling.host_rules import HostRules, Masked
from tokenspeed.sampling.rules import (
    BadSequences,
    FixedRule,
    Grammar,
    GrammarRule,
    RequestRules,
    RowFailure,
    Rule,
    bits_of,
)
from tokenspeed.sampling.slot_params import Feature, SlotParams
from tokenspeed.sampling.token_lists import TokenLists
from tokenspeed_kernel import api

_FAR_AWAY = 2**62
"""A sequence length that nothing reaches."""


@dataclass(frozen=True)
class SamplerConfig:
    """eos_token_ids: tokens that end a request unless it ignores them; barred while `min_new_tokens` lasts.
    detects_nan: look for NaN in the model's logits."""

    num_slots: int
    vocab_size: int
    device: torch.device
    eos_token_ids: tuple[int, ...]
    detects_nan: bool = False


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """Of S rows, on the device.

    tokens: int32 [S]. token_logprobs: float32 [S], None when not asked for; top_values float32 and top_ids int32
    [S, n], likeliest first. chosen: float32 [S, m], of the tokens that a row's request names, in its order, from the
    first column on; None where none names any. Log-probabilities are of the model's own logits, before any of the
    request's changes.
    nan_rows: bool [S], whose logits held a NaN; None when nobody looked. failures: (row, why) of rows that the host
    knows to have no token. What these rows have as a token means nothing.
    """

    tokens: torch.Tensor
    token_logprobs: torch.Tensor | None
    top_values: torch.Tensor | None
    top_ids: torch.Tensor | None
    chosen: torch.Tensor | None
    nan_rows: torch.Tensor | None
    failures: list[tuple[int, RowFailure]]


class Sampler:
    """State of every slot's request. A slot is set when a request gets it and stays until the next one does."""

    def __init__(self, config: SamplerConfig) -> None:
        self._eos = config.eos_token_ids
        self._vocab_size = config.vocab_size
        self._device = config.device
        self._detects_nan = config.detects_nan
        self._params = SlotParams(config.num_slots, config.device)
        self._biases = TokenLists(config.num_slots, config.device)
        self._stops = TokenLists(config.num_slots, config.device)
        self._chosen = ChosenTokens(config.device)
        self._rules = HostRules(config.num_slots, config.vocab_size, config.device)
        self._one = torch.ones((), dtype=torch.int32, device=config.device)
        table = (config.num_slots, config.vocab_size)
        # Zero pages that only penalised requests ever touch: on a CPU they cost nothing before that.
        self._output_counts = torch.zeros(table, dtype=torch.int32, device=config.device)
        self._prompt_mask = torch.zeros(table, dtype=torch.bool, device=config.device)

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: NDArray[np.int32],
        output_ids: NDArray[np.int32],
        grammar: Grammar | None,
    ) -> None:
        """Give `slot` to a request.

        params: validated, with a seed unless greedy. prompt_ids: int32 [P]. output_ids: int32 [O], what the request
        has produced before (when it comes back after a retraction). grammar: what its constraint was compiled to.
        Raises ValueError when a draw has no seed.
        """
        if params.seed is None and not params.greedy:
            raise ValueError("a request that draws tokens needs a seed; admission gives one to those without")
        rules = self._request_rules(params, grammar)
        # A grammar's end is the output's end, so an end token that is ignored may come there and nowhere else.
        held_back = grammar is not None and params.ignore_eos
        min_length = _FAR_AWAY if held_back else len(prompt_ids) + params.min_new_tokens
        features = self._params.set(slot, params, params.seed or 0, min_length, rules is not None, held_back)
        if Feature.BIAS in features:
            bias = params.logit_bias or {}
            self._biases.set(slot, list(bias), list(bias.values()))
        else:
            self._biases.set(slot, (), ())
        stops: Sequence[int] = []
        if Feature.MIN_TOKENS in features:
            stops = sorted(self._eos) if held_back else self._barred_tokens(params)
        self._chosen.set(slot, params.token_ids_logprob)
        self._stops.set(slot, stops, [float("-inf")] * len(stops))
        self._rules.set(slot, rules, output_ids.tolist())
        if Feature.PENALTIES in features:
            self._count(slot, prompt_ids, output_ids)

    def prepare(self, slots: NDArray[np.int64]) -> None:
        """Call before the forward of a step that samples for these slots: what the host has to work out begins."""
        self._rules.begin(slots)

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        num_logprobs: int | None,
        host_slots: NDArray[np.int64] | None = None,
    ) -> SampleOutput:
        """Draw one token for each row.

        logits: float32 [S, V]; may be overwritten. slots: int64 [S], distinct. positions: int64 [S], the index that
        each new token will have in its sequence. num_logprobs: likeliest tokens to report beside the drawn one; None
        for no log-probabilities. host_slots: the values of `slots`; needed where the host cannot read them.
        """
        at_host = slots.numpy() if host_slots is None else host_slots
        features = self._params.features(at_host)
        self._params.refresh()
        masked = self._rules.finish()
        nan_rows = None
        if self._detects_nan:
            nan_rows = logits.isnan().any(dim=1)
            logits = logits.masked_fill(nan_rows[:, None], 0.0)
        if features == 0:
            tokens = logits.argmax(dim=1).int()
            return self._reported(logits, tokens, at_host, num_logprobs, nan_rows, [])
        changes_logits = features & ~Feature.NOISE
        raw = logits.clone() if changes_logits and num_logprobs is not None else logits
        tokens = self._draw(logits, slots, positions, at_host, features, masked)
        self._rules.sampled(at_host, tokens)
        if Feature.PENALTIES in features:
            # Every row is counted; only penalised requests, whose counts were cleared when they came, read theirs.
            self._output_counts.index_put_((slots, tokens.long()), self._one, accumulate=True)
        failures = [] if masked is None else masked.failures()
        return self._reported(raw, tokens, at_host, num_logprobs, nan_rows, failures)

    def plain_draw(self, host_slots: NDArray[np.int64], num_logprobs: int | None) -> bool | None:
        """How `draw` serves a batch of these slots: with noise (True) or without; None when it takes `sample`.

        Sends changed parameters to the device, so what follows may be a step captured earlier.
        """
        features = self._params.features(host_slots)
        if num_logprobs is not None or features > Feature.NOISE or self._detects_nan:  # noise is the lowest bit
            return None
        self._params.refresh()
        return bool(features)

    def draw(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, noise: bool) -> torch.Tensor:
        """Tokens int32 [S] of rows without extras; without `noise` all take the largest logit.

        Arguments as `sample` has them. Reads the device alone, so that a graph may hold it.
        """
        if not noise:
            return logits.argmax(dim=1).int()
        temperature, top_p, min_p, *_ = self._params.floats(slots)
        seeds, _ = self._params.ints(slots)
        return api.sample(logits, temperature, self._params.top_k(slots), top_p, min_p, seeds, positions)

    def _draw(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        host_slots: NDArray[np.int64],
        features: Feature,
        masked: Masked | None,
    ) -> torch.Tensor:
        temperature, top_p, min_p, repetition, frequency, presence = self._params.floats(slots)
        seeds, min_lengths = self._params.ints(slots)
        if Feature.MIN_TOKENS in features:
            barred = positions < min_lengths
            self._stops.add_to(logits, slots, host_slots, barred if masked is None else barred & ~masked.ends)
        if Feature.BIAS in features:
            self._biases.add_to(logits, slots, host_slots, None)
        if Feature.PENALTIES in features:
            api.apply_penalties(logits, slots, self._output_counts, self._prompt_mask, repetition, frequency, presence)
        if masked is not None:
            logits = _ruled(logits, masked)
        if Feature.NOISE not in features:
            return logits.argmax(dim=1).int()
        return api.sample(logits, temperature, self._params.top_k(slots), top_p, min_p, seeds, positions)

    def _reported(
        self,
        raw: torch.Tensor,
        tokens: torch.Tensor,
        host_slots: NDArray[np.int64],
        num_logprobs: int | None,
        nan_rows: torch.Tensor | None,
        failures: list[tuple[int, RowFailure]],
    ) -> SampleOutput:
        if num_logprobs is None:
            return SampleOutput(tokens, None, None, None, None, nan_rows, failures)
        chosen = self._chosen.logprobs(raw, host_slots)
        return SampleOutput(tokens, *api.logprobs(raw, tokens, num_logprobs), chosen, nan_rows, failures)

    def _barred_tokens(self, params: SamplingParams) -> Sequence[int]:
        """What would end the request."""
        eos = () if params.ignore_eos else self._eos
        return sorted({*params.stop_token_ids, *eos})

    def _request_rules(self, params: SamplingParams, grammar: Grammar | None) -> RequestRules | None:
        rules: list[Rule] = []
        stops = bits_of([*params.stop_token_ids, *self._eos], self._vocab_size)
        if params.allowed_token_ids:
            rules.append(FixedRule(bits_of(params.allowed_token_ids, self._vocab_size)))
        singles = [sequence[0] for sequence in params.bad_token_ids if len(sequence) == 1]
        if singles:
            rules.append(FixedRule(~bits_of(singles, self._vocab_size)))
        longer = [sequence for sequence in params.bad_token_ids if len(sequence) > 1]
        if longer:
            rules.append(BadSequences(longer))
        if grammar is not None:
            rules.append(GrammarRule(grammar.matcher([*params.stop_token_ids, *self._eos]), stops))
        processor = params.logits_processor
        if params.custom_logit_processor is not None:
            processor = load_processor(params.custom_logit_processor, params.custom_params)
        return RequestRules(rules, stops, processor) if rules or processor is not None else None

    def _count(self, slot: int, prompt_ids: NDArray[np.int32], output_ids: NDArray[np.int32]) -> None:
        mask, counts = self._prompt_mask[slot], self._output_counts[slot]
        mask.zero_()
        mask.index_fill_(0, self._send(prompt_ids), True)
        counts.zero_()
        if len(output_ids):
            ids = self._send(output_ids)
            counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def _send(self, ids: NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self._device, non_blocking=True)


def _ruled(logits: torch.Tensor, masked: Masked) -> torch.Tensor:
    for row, output_ids, rules in masked.processors:
        logits[row] = rules.process(output_ids, logits[row])
    api.token_mask(logits, masked.mask, masked.rows)
    return logits
