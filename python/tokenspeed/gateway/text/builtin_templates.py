# SPDX-License-Identifier: MIT
"""Chat templates by name, for `--chat-template` with models whose files have none: the turns of well-known families.

They know text only. A system message of a family without a place for one stands before the first user's text, as the
families' own templates have it.
"""

from __future__ import annotations

_SYSTEM_FIRST = (
    "{%- set system = messages[0].content + '\\n\\n' if messages and messages[0].role == 'system' else '' -%}"
    "{%- set turns = messages[1:] if system else messages -%}"
)


def _turns(body: str, prompt: str, before: str = "") -> str:
    """A template: `before`, then `body` for each `m`, then `prompt` where an answer is to follow."""
    return (
        f"{before}{{%- for m in messages -%}}{body}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{{{{ {prompt!r} }}}}{{%- endif -%}}"
    )


# Pieces stand on lines of their own; white space between tags is nobody's.
_INST = f"""{_SYSTEM_FIRST}
{{{{- bos_token }}}}
{{%- for m in turns -%}}
{{%- if m.role == 'assistant' -%}}{{{{ ' ' + m.content + eos_token }}}}
{{%- else -%}}{{{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}}}
{{%- endif -%}}
{{%- endfor -%}}
"""
_LLAMA_2 = """
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- set turns = messages[1:] if has_system else messages -%}
{%- for m in turns -%}
{%- if m.role == 'assistant' -%}{{ ' ' + m.content + ' ' + eos_token }}
{%- else -%}{{ bos_token + '[INST] ' }}
{{- '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' if has_system and loop.first else '' }}
{{- m.content + ' [/INST]' }}
{%- endif -%}
{%- endfor -%}
"""
_GEMMA = f"""{_SYSTEM_FIRST}
{{{{- bos_token }}}}
{{%- for m in turns -%}}
{{{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}}}
{{{{- (system if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{ '<start_of_turn>model\n' }}}}{{%- endif -%}}
"""
_ALPACA = f"""{_SYSTEM_FIRST}
{{%- for m in turns -%}}
{{{{- system if loop.first else '' }}}}
{{%- if m.role == 'assistant' -%}}{{{{ '### Response:\n' + m.content + eos_token + '\n\n' }}}}
{{%- else -%}}{{{{ '### Instruction:\n' + m.content + '\n\n' }}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{ '### Response:\n' }}}}{{%- endif -%}}
"""
_VICUNA = """
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{ 'ASSISTANT: ' + m.content + eos_token }}
{%- elif m.role == 'user' -%}{{ 'USER: ' + m.content + ' ' }}
{%- else -%}{{ m.content + ' ' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""

BUILT_IN: dict[str, str] = {
    "alpaca": _ALPACA,
    "chatml": _turns("{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}", "<|im_start|>assistant\n"),
    "gemma": _GEMMA,
    "llama-2": _LLAMA_2,
    "llama-3": _turns(
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "{{- bos_token }}",
    ),
    "mistral": _INST,
    "phi-3": _turns("{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}", "<|assistant|>\n"),
    "vicuna": _VICUNA,
    "zephyr": _turns("{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}", "<|assistant|>\n"),
}
