"""Model folders after the layouts of published models: how each family writes templates, tokens and files.

The templates are written for these tests after the layouts that the models' pages describe; they are no copies.
"""
# ruff: noqa: E501

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

Files = dict[str, Any]

_L3_TURN = "{{ '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' ~ m.content | trim ~ '<|eot_id|>' }}"
_L3_ASK = "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
LLAMA3 = f"{{{{ bos_token }}}}{{% for m in messages %}}{_L3_TURN}{{% endfor %}}{_L3_ASK}"
LLAMA31 = (
    """{%- if tools_in_user_message is not defined %}{% set tools_in_user_message = true %}{% endif %}
{%- if date_string is not defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- bos_token ~ '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{ 'Environment: ipython\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' ~ date_string ~ '\n\n' ~ system ~ '<|eot_id|>' }}
{%- if tools_in_user_message and tools %}
    {%- if not messages %}{{ raise_exception('no user message to put the tools into') }}{% endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nRespond with {"name": ..., "parameters": ...}.\n\n' }}
    {%- for t in tools %}{{ t | tojson(indent=4) ~ '\n\n' }}{% endfor %}
    {{- messages[0].content | trim ~ '<|eot_id|>' }}{% set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set f = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' ~ f.name ~ '", "parameters": ' }}
        {{- f.arguments | tojson ~ '}<|eot_id|>' }}
    {%- elif m.role in ['tool', 'ipython'] %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {{- m.content | tojson if m.content is mapping or m.content is iterable else m.content }}{{ '<|eot_id|>' }}
    {%- else %}"""
    + _L3_TURN
    + "{%- endif %}{%- endfor %}"
    + _L3_ASK
)
LLAMA32 = LLAMA31.replace('"26 Jul 2024"', 'strftime_now("%d %b %Y")')
VISION = (
    """{{- bos_token }}{% for m in messages %}{{ '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' }}
{%- if m.content is string %}{{ m.content }}{% else %}
{%- for part in m['content'] %}{% if part.type == 'image' %}{{ '<|image|>' }}{% elif part.type == 'text' %}{{ part.text }}
{%- endif %}{% endfor %}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"""
    + _L3_ASK
)
LLAMA4 = """{{- bos_token }}{% for m in messages %}{{ '<|header_start|>' ~ m.role ~ '<|header_end|>\n\n' }}
{%- if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{{ c.text | trim }}{% endfor %}{% endif %}
{%- for call in m.tool_calls %}{{ '<|python_start|>[' ~ call.function.name ~ '(' }}
{%- for k, v in call.function.arguments.items() %}{{ k ~ '=' ~ v | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}
{{- ')]<|python_end|>' }}{% endfor %}{{ '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}"""
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}
{% else %}{% set rest = messages %}{% set system = false %}{% endif %}
{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must take turns') }}{% endif %}
{% set said = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] if loop.index0 == 0 and system else m['content'] %}
{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + said.strip() + ' [/INST]' }}
{% elif m['role'] == 'assistant' %}{{ ' ' + said.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' ~ m['content'] ~ ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}{{ ' ' ~ m['content'] ~ eos_token }}
{%- else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"""
MISTRAL3 = """{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and m == asked[-1] %}{{ '[AVAILABLE_TOOLS] ' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST] ' ~ m.content ~ '[/INST]' }}
    {%- elif m.tool_calls is defined and m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for c in m.tool_calls %}{% set out = c.function | tojson %}{{ out[:-1] ~ ', "id": "' ~ c.id ~ '"}' }}
        {{- ', ' if not loop.last else ']' ~ eos_token }}{% endfor %}
    {%- elif m.role == 'assistant' %}{{ ' ' ~ m.content | trim ~ eos_token }}
    {%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' ~ m.content | string ~ '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helper.<|im_end|>\n' }}{% endif %}",
)
HERMES_TOOLS = """{{- bos_token ~ '<|im_start|>system\nYou call functions. <tools>' }}
{%- for t in tools %}{{ ' ' ~ t.function | tojson }}{% endfor %}{{ ' </tools><|im_end|>\n' }}
{%- for m in messages %}
    {%- if m.role in ('user', 'system') or (m.role == 'assistant' and m.tool_calls is not defined) %}
        {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}{{ '<|im_start|>' ~ m.role }}
        {%- for c in m.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' ~ c.function.name ~ '", "arguments": ' ~ c.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>\n' }}
    {%- else %}{{ '<|im_start|>tool\n<tool_response>\n' ~ m.content ~ '\n</tool_response><|im_end|>\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
QWEN25 = (
    (
        "{%- if tools %}{{ '<|im_start|>system\n' }}{{ messages[0]['content'] if messages[0]['role'] == 'system' else "
        "'You are Q.' }}{{ '\n\n# Tools\n<tools>' }}{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}"
        "{{ '\n</tools><|im_end|>\n' }}{% elif messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are Q.<|im_end|>\n' }}{% endif %}"
    )
    + """{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- elif m.role != 'system' or not (tools and loop.first) %}
        {{- '<|im_start|>' + m.role }}{% if m.content %}{{ '\n' + m.content }}{% endif %}
        {%- for c in m.tool_calls %}
            {%- if c.function is defined %}{% set c = c.function %}{% endif %}
            {{- '\n<tool_call>\n{"name": "' + c.name + '", "arguments": ' + (c.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
)
QWEN3 = """{%- set ns = namespace(searching=true, last=messages | length - 1) %}
{%- for m in messages[::-1] %}{% set at = messages | length - 1 - loop.index0 %}
    {%- if ns.searching and m.role == 'user' and m.content is string and not m.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}{% set ns.last = at %}{% endif %}
{%- endfor %}
{%- if tools %}{{ '<|im_start|>system\n# Tools' }}
{%- for t in tools %}{{ '\n' ~ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{% set content = m.content if m.content is string else '' %}
    {%- if m.role == 'assistant' %}{% set thought = '' %}
        {%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' }}{% endif %}{{ content }}
        {%- for c in m.tool_calls or () %}{% set f = c.function or c %}
            {{- '\n<tool_call>\n{"name": "' ~ f.name ~ '", "arguments": ' }}
            {{- f.arguments if f.arguments is string else f.arguments | tojson }}{{ '}\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>\n' }}
    {%- else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ content ~ '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
QWEN3_THINKING = QWEN3.replace("enable_thinking is defined and enable_thinking is false", "true").replace(
    "<think>\n\n</think>\n\n' }}{% endif %}\n{%- endif", "<think>\n' }}{% endif %}\n{%- endif"
)
SMOLLM3 = """{%- set mode = '/no_think' if enable_thinking is defined and not enable_thinking else '/think' %}
{{- '<|im_start|>system\nToday: ' ~ strftime_now('%d %B %Y') ~ '\nMode: ' ~ mode ~ '\n' }}
{%- if xml_tools or tools %}{% for t in xml_tools or tools %}{{ t | string }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}
{%- for m in messages %}{% set content = m.content if m.content is string else '' %}
    {%- if m.role == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\n' ~ content.lstrip('\n') ~ '<|im_end|>\n' }}
    {%- endgeneration %}
    {%- else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ content ~ '<|im_end|>\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
R1 = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(system='', first=true) %}
{%- for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% endif %}{% endfor %}
{{- bos_token ~ ns.system }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}
    {%- elif m['role'] == 'assistant' %}{% set content = m['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<|Assistant|>' + content + eos_token }}
    {%- endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""
ZEPHYR = """{% for m in messages %}
{% if m['role'] == 'user' %}
{{ '<|user|>\n' + m['content'] + eos_token }}
{% elif m['role'] == 'system' %}
{{ '<|system|>\n' + m['content'] + eos_token }}
{% elif m['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + m['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
PARTS = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + ':' }}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ ' ' ~ part['text'] }}{% endfor %}
{{- '<end>\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
MACRO = """{%- macro said(content) %}{% if content is string %}{{ content }}{% else %}
{%- for item in content %}{{ item.text if 'text' in item else '' }}{% if not loop.last %}|{% endif %}{% endfor %}
{%- endif %}{% endmacro %}
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ said(m.content) ~ '<|im_end|>\n' }}{% endfor %}"""

L3_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
L3_TOKENS += ("<|eom_id|>", "<|python_tag|>", "<|image|>")
L3 = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "tokenizer_class": "PreTrainedTokenizerFast"}
L3 |= {"clean_up_tokenization_spaces": True, "model_input_names": ["input_ids", "attention_mask"]}
L4_TOKENS = ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|python_start|>", "<|python_end|>")
L4 = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot|>", "tokenizer_class": "PreTrainedTokenizer"}
SP_TOKENS = ("<unk>", "<s>", "</s>")
SP = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": {"__type": "AddedToken", "content": "</s>"}}
SP |= {"unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False, "sp_model_kwargs": {}}
IM_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QW = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
QW |= {"add_prefix_space": False, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def byte_level(special: Sequence[str], text: Sequence[str] = (), *, bos: str | None = None) -> Tokenizer:
    """Return a byte-level BPE as Llama 3 and Qwen have, without merges but for a few."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("h", "e"), ("l", "l"), ("Ġ", "t"), ("Ġt", "he")]
    vocabulary = letters | {a + b: len(letters) + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    split = pre_tokenizers.Split(Regex(r"\s?\p{L}+|\s?\p{N}{1,3}|\s+|[^\s\p{L}\p{N}]+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    _add(tokenizer, special, text)
    if bos is not None:
        single = processors.TemplateProcessing(f"{bos} $A", None, [(bos, tokenizer.token_to_id(bos))])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), single])
    return tokenizer


def sentence_piece(text: Sequence[str] = (), *, bos: bool = True) -> Tokenizer:
    """Return a BPE with byte fallback as Llama 2 and Mistral have it."""
    pieces = [
        *SP_TOKENS,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnoprstuvwyINST[]/.",
        "▁t",
        "he",
    ]
    merges = [("▁", "t"), ("h", "e")]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _add(tokenizer, SP_TOKENS, text)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", [("<s>", 1)])
    return tokenizer


def _add(tokenizer: Tokenizer, special: Sequence[str], text: Sequence[str]) -> None:
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in text])


def _l3(template: str, **more: Any) -> tuple[Tokenizer, Files]:
    return byte_level(L3_TOKENS, bos="<|begin_of_text|>"), {
        "tokenizer_config.json": L3 | {"chat_template": template} | more
    }


def _qwen(template: str, **more: Any) -> tuple[Tokenizer, Files]:
    config = QW | {"chat_template": template, "tokenizer_class": "Qwen2Tokenizer"} | more
    return byte_level(IM_TOKENS, TAGS), {"tokenizer_config.json": config}


def _sp(template: str, *, text: Sequence[str] = (), bos: bool = True, **more: Any) -> tuple[Tokenizer, Files]:
    config = SP | {"chat_template": template, "tokenizer_class": "LlamaTokenizer", "legacy": False} | more
    return sentence_piece(text, bos=bos), {"tokenizer_config.json": config}


def _listed(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return `added_tokens_decoder` as transformers wrote it until version 5."""
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {str(i): {flag: getattr(token, flag) for flag in flags}
            for i, token in tokenizer.get_added_tokens_decoder().items()}  # fmt: skip


def layouts() -> dict[str, tuple[Tokenizer, Files]]:
    """Return a tokenizer and the other files of a folder for each layout."""
    qwen, config = _qwen(QWEN25)
    without_tags = byte_level(IM_TOKENS)
    l4 = byte_level(L4_TOKENS, bos="<|begin_of_text|>")
    hermes = byte_level(("<|begin_of_text|>", "<|im_end|>", "<|im_start|>"), TAGS[:2], bos="<|begin_of_text|>")
    hermes_config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"}
    smol = byte_level(IM_TOKENS)
    smol_config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    r1 = byte_level(("<|begin▁of▁sentence|>", "<|end▁of▁sentence|>"), ("<|User|>", "<|Assistant|>", "<think>", "</think>"),
                    bos="<|begin▁of▁sentence|>")  # fmt: skip
    r1_tokens = {"bos_token": "<|begin▁of▁sentence|>", "eos_token": "<|end▁of▁sentence|>"}
    mistral_tags = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
                    "[/TOOL_RESULTS]")  # fmt: skip
    return {
        "llama 2": _sp(LLAMA2),
        "llama 2, older": _sp(LLAMA2, bos_token="<s>", eos_token="</s>", legacy=True),
        "llama 3": _l3(LLAMA3),
        "llama 3, listed tokens": _l3(LLAMA3, added_tokens_decoder=_listed(_l3("")[0])),
        "llama 3.1": _l3(LLAMA31),
        "llama 3.1 in a file": (_l3("")[0], {"tokenizer_config.json": L3, "chat_template.jinja": LLAMA31}),
        "llama 3.2": _l3(LLAMA32),
        "llama 3.2 vision": (
            _l3("")[0], {"tokenizer_config.json": L3, "chat_template.jinja": VISION, "chat_template.json": {"x": 1}}),
        "llama 3.3": _l3(LLAMA31, additional_special_tokens=["<|eom_id|>"]),
        "llama 4": (l4, {"tokenizer_config.json": L4, "chat_template.jinja": LLAMA4}),
        "hermes 2": (hermes, {"tokenizer_config.json": hermes_config | {"chat_template": [
            {"name": "default", "template": "{{bos_token}}" + CHATML}, {"name": "tool_use", "template": HERMES_TOOLS}]}}),
        "hermes 3 in files": (hermes, {"tokenizer_config.json": hermes_config, "chat_template.jinja": CHATML,
                                       "additional_chat_templates/tool_use.jinja": HERMES_TOOLS}),
        "qwen 2.5": (qwen, config),
        "qwen 2.5, tags listed only": _with_listed(without_tags, config),
        "qwen 3": _qwen(QWEN3),
        "qwen 3 in a file": (_qwen("")[0], {"tokenizer_config.json": QW, "chat_template.jinja": QWEN3}),
        "qwen 3, thinking": _qwen(QWEN3_THINKING),
        "mistral 0.1": _sp(MISTRAL, legacy=True),
        "mistral 0.3": _sp(MISTRAL3, text=mistral_tags),
        "mistral, special tokens apart": (
            sentence_piece(), {"tokenizer_config.json": {"chat_template": MISTRAL, "tokenizer_class": "LlamaTokenizer"},
                               "special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}}}),
        "smollm": (smol, {"tokenizer_config.json": smol_config | {"chat_template": CHATML}}),
        "smollm 2": (smol, {"tokenizer_config.json": smol_config | {"chat_template": SMOLLM}}),
        "smollm 3": (smol, {"tokenizer_config.json": smol_config, "chat_template.jinja": SMOLLM3}),
        "deepseek r1 distill": (r1, {"tokenizer_config.json": r1_tokens | {
            "chat_template": R1, "tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}}),
        "zephyr": _sp(ZEPHYR),
        "parts": (smol, {"tokenizer_config.json": smol_config | {"chat_template": PARTS}}),
        "parts in a macro": (smol, {"tokenizer_config.json": smol_config | {"chat_template": MACRO}}),
        "no bos in the processor": _sp(ZEPHYR, bos=False),
        "no bos in the config": _sp(ZEPHYR, add_bos_token=False),
    }  # fmt: skip


def _with_listed(tokenizer: Tokenizer, files: Files) -> tuple[Tokenizer, Files]:
    """Return a folder whose tags are in tokenizer_config.json alone."""
    first = tokenizer.get_vocab_size()
    tags = {str(first + i): {"content": tag, "lstrip": False, "normalized": False, "rstrip": False,
                             "single_word": False, "special": False} for i, tag in enumerate(TAGS)}  # fmt: skip
    config = files["tokenizer_config.json"] | {"added_tokens_decoder": _listed(tokenizer) | tags}
    return tokenizer, files | {"tokenizer_config.json": config}


def write_layout(folder: Path, tokenizer: Tokenizer, files: Files) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder
