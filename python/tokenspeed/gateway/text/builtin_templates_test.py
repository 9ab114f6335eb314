# SPDX-License-Identifier: MIT
"""What the named templates write."""

from __future__ import annotations

import pytest

from tokenspeed.gateway.text.builtin_templates import BUILT_IN
from tokenspeed.gateway.text.template import ChatTemplate

TURNS = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
EXPECTED = {
    "alpaca": "S\n\n### Instruction:\na\n\n### Response:\nb</s>\n\n### Instruction:\nc\n\n### Response:\n",
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<s><start_of_turn>user\nS\n\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
    "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n",
    "llama-2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\na [/INST] b </s><s>[INST] c [/INST]",
    "llama-3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\na<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "c<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] S\n\na [/INST] b</s>[INST] c [/INST]",
    "phi-3": "<|system|>\nS<|end|>\n<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n<|user|>\nc<|end|>\n<|assistant|>\n",
    "vicuna": "S USER: a ASSISTANT: b</s>USER: c ASSISTANT:",
    "zephyr": "<|system|>\nS</s>\n<|user|>\na</s>\n<|assistant|>\nb</s>\n<|user|>\nc</s>\n<|assistant|>\n",
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_named_template_writes_the_turns_of_its_family(name: str) -> None:
    template = ChatTemplate(BUILT_IN[name], {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(TURNS, add_generation_prompt=True) == EXPECTED[name]
    assert EXPECTED[name].startswith(template.render(TURNS[:2], add_generation_prompt=False))
