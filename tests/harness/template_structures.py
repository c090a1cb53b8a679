"""What the chat templates of published model families do with a conversation, each as a small Jinja template.

They are written from what their makers document: which roles and fields a template writes, in which form, what it
drops, and how a turn ends. Wording, dates and defaults are left out. The templates that are stored with their models
are in ``families.py``.
"""

from __future__ import annotations

import re
from typing import Any

SIGN = re.compile(
    r"<[|｜][^<>\s]+[|｜]>|<bos>|<eos>|</?s>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|\[/?[A-Z]+_?[A-Z]*\]"
)
"""The special tokens in a template."""
ROLES = ("user", "assistant", "system", "tool", "USER_TOKEN", "SYSTEM_TOKEN", "TOOL_TOKEN")
"""The signs that a template makes of a role."""
STRUCTURES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "command-r": (
        "<|BOS_TOKEN|>{% for m in messages %}{% if m.role == 'assistant' %}"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>"
        "{% elif m.role in ('user', 'system') %}<|START_OF_TURN_TOKEN|>"
        "{{ '<|USER_TOKEN|>' if m.role == 'user' else '<|SYSTEM_TOKEN|>' }}{{ m.content }}<|END_OF_TURN_TOKEN|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
        "{% endif %}"
    ),
    "command-r7b": (
        "<|BOS_TOKEN|>{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'assistant' %}"
        '<|CHATBOT_TOKEN|>{% if m.tool_calls %}<|START_ACTION|>[{% for c in m.tool_calls %}{"tool_name": "'
        '{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
        "]<|END_ACTION|>{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
        "{% elif m.role == 'tool' %}<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>{{ m.content }}<|END_TOOL_RESULT|>"
        "{% else %}<|{{ m.role | upper }}_TOKEN|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
    ),
    "deepseek-r1": (
        "<｜begin▁of▁sentence｜>{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'assistant' and m.tool_calls %}<｜Assistant｜>{{ m.content }}"
        "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>"
        "{{ c['type'] + '<｜tool▁sep｜>' + c['function']['name'] + '\\n```json\\n' + "
        "c['function']['arguments'] + '\\n```' }}<｜tool▁call▁end｜>{% endfor %}<｜end▁of▁sentence｜>"
        "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
        "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
    ),
    "deepseek-v3": (
        "<｜begin▁of▁sentence｜>{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'assistant' and m.tool_calls %}<｜Assistant｜>{{ m.content }}"
        "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>"
        "{{ c['type'] + '<｜tool▁sep｜>' + c['function']['name'] + '\\n```json\\n' + "
        "c['function']['arguments'] + '\\n```' }}<｜tool▁call▁end｜>{% endfor %}<｜end▁of▁sentence｜>"
        "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
        "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
    ),
    "gemma-2": (
        "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n"
        "{% endif %}"
    ),
    "gemma-3": (
        "<bos>{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first }}"
        "{% if m.content is string %}{{ m.content | trim }}{% else %}"
        "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endif %}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "glm-4": (
        "[gMASK]<sop>{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}"
        "<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
        "{% endif %}"
    ),
    "glm-4.5": (
        "[gMASK]<sop>{% if tools %}<|system|>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}"
        "<|observation|>\n<tool_response>{{ m.content }}</tool_response>{% elif m.role == 'assistant' %}"
        "<|assistant|>\n{% set r = m.reasoning_content or '' %}{% set c = m.content %}{% if '</think>' in c %}"
        "{% set r = c.split('</think>')[0].split('<think>')[-1] %}{% set c = c.split('</think>')[-1] %}"
        "{% endif %}{% if loop.index0 > ns.last and r %}<think>{{ r | trim }}</think>{% else %}<think></think>"
        "{% endif %}\n{{ c | trim }}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
        "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
        "{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}{% else %}<|"
        "{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
        "{% endif %}"
    ),
    "gpt-oss": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}{% if m.thinking %}"
        "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
        "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% else %}{% if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>"
        "{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% elif m.role == 'tool' %}"
        "{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
        "<|start|>functions.x to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% for t in tools or [] %}<|start|>developer<|message|>{{ t.function.name }}: "
        "{{ t.function.parameters | tojson }}<|end|>{% endfor %}{% if add_generation_prompt %}"
        "<|start|>assistant{% endif %}"
    ),
    "granite-3": (
        "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"
        "{% endfor %}{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>\n"
        "{% endif %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
    ),
    "hermes-3": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "idefics3": (
        "<|begin_of_text|>{% for m in messages %}{{ m.role | capitalize }}:"
        "{% if m.content[0].type == 'image' %}{% else %} {% endif %}{% for p in m.content %}"
        "{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image' %}<image>{% endif %}{% endfor %}"
        "<|end_of_utterance|>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    "internlm2": (
        "<s>{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "lfm2": (
        "<|startoftext|>{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
        "<|im_end|>\n{% endif %}{% for m in messages %}{% set c = m.content %}"
        "{% if m.role == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
        "<|im_start|>assistant\n{% endif %}"
    ),
    "llama-2": (
        "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
        "{% elif m.role == 'system' %}<<SYS>>{{ m.content }}<</SYS>>{% elif m.role == 'assistant' %} "
        "{{ m.content }} </s>{% endif %}{% endfor %}"
    ),
    "llama-3.1": (
        "<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n{% for t in tools %}"
        "{{ t | tojson }}{% endfor %}<|eot_id|>{% endif %}{% for m in messages %}{% if m.tool_calls %}"
        "{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
        '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "{{ m.tool_calls[0].function.name }}'
        '", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>'
        "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
        "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        "{% endif %}"
    ),
    "llava": (
        "{% for m in messages %}{{ m.role | upper }}: "
        "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}"
        "{{ '</s>' if m.role == 'assistant' else ' ' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT: "
        "{% endif %}"
    ),
    "magistral": (
        "<s>{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
        "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]"
        "{{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]"
        "{{ c.function.name }}[ARGS]"
        "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
        "{% endfor %}</s>{% endif %}{% endfor %}"
    ),
    "mistral-v3": (
        "<s>{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == users[-1] %}[AVAILABLE_TOOLS] "
        "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}"
        "[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]</s>"
        "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% elif m.role == 'tool' %}[TOOL_RESULTS] "
        "{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
    ),
    "olmo-2": (
        "<|endoftext|>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}"
        "<|endoftext|>{% endif %}{% if not loop.last %}\n{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "<|assistant|>\n{% endif %}"
    ),
    "phi-3": (
        "{% for m in messages %}{% if m.role in ('user', 'assistant', 'system') %}<|{{ m.role }}|>\n"
        "{{ m.content }}<|end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}"
        "<|endoftext|>{% endif %}"
    ),
    "qwen2.5-vl": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "qwen3-2507": (
        "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
        "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
        "{{ m.content }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "qwen3-thinking-2507": (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}{% set r = m.reasoning_content or '' %}{% set c = m.content %}"
        "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1] %}"
        "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
        "{% if loop.index0 > ns.last %}<think>\n{{ r.strip('\n') }}\n</think>\n\n{% endif %}{{ c }}"
        '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% else %}<|im_start|>"
        "{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "<|im_start|>assistant\n<think>\n{% endif %}"
    ),
    "vicuna": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }} {% else %}{{ m.role | upper }}: "
        "{{ m.content }}{{ '</s>' if m.role == 'assistant' else ' ' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
    ),
    "zephyr": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
}


def structure_tokenizer(template: str) -> Any:
    """A tokenizer of bytes in which the signs of a template are special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    signs = list(dict.fromkeys(["<pad>", *SIGN.findall(template), *(f"<|{role}|>" for role in ROLES)]))
    vocab = {token: number for number, token in enumerate((*signs, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", additional_special_tokens=signs[1:], chat_template=template
    )
