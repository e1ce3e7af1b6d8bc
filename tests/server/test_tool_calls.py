"""Tools over HTTP and in the parser: formats, splits of the stream, choices, and messages that come back."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import Live, live
from scripted_engine import ScriptedEngine, compiler

from shotcast.server.tool_calls import (
    HERMES,
    LLAMA,
    MAX_CALLS,
    MISTRAL,
    MISTRAL_ARGUMENTS,
    Function,
    ToolFormat,
    ToolParser,
    calls_grammar,
    find_format,
)

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", 'a"{}\\']}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
SCHEMAS = {"weather": WEATHER, "time": TIME | {"additionalProperties": False}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "says it", "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
YES = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"], "additionalProperties": False}
FORMATS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "mistral arguments": MISTRAL_ARGUMENTS}
TEMPLATES = {
    # the lines by which published templates tell models how to call tools
    "hermes": """{%- if tools %}{{- "<tools>" }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{- "</tools>\\n
        For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML
        tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>" }}""",
    "llama": """{%- if tools is not none and not tools_in_user_message %}{{- "Environment: ipython\\n" }}{{- 'Respond in
        the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}{%- endif %}""",
    "mistral": """{%- if tools is not none %}{{- "[AVAILABLE_TOOLS] [" }}{%- elif message.tool_calls is defined %}{{-
        "[TOOL_CALLS] [" }}{{- ', "id": "' + tool_call.id + '"}' }}""",
    "mistral arguments": """{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}
        {{- "[TOOL_CALLS]" + tool_call.function.name + "[ARGS]" + arguments }}""",
}


def test_the_template_tells_the_format() -> None:
    assert {name: find_format(template) for name, template in TEMPLATES.items()} == FORMATS
    assert find_format("{{ messages[0].content }} <tool_call>") is None
    assert find_format("{% for tool in tools %}{{ tool.name }}{% endfor %}") is None
    assert find_format("{{ tools }} <tool_call><function=name><parameter=a>") is None
    assert find_format('{{ tools }} [{"tool_name": name, "parameters": {}}]') is None
    assert find_format("") is None


# -- the parser -------------------------------------------------------------------------------------------------------


def parse(form: ToolFormat, pieces: Sequence[str], several: bool = True) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser(form, frozenset(SCHEMAS), several)
    seen = ""
    for number, piece in enumerate(pieces):
        parser.push(piece, last=number == len(pieces) - 1)
        assert parser.content.startswith(seen), "content is never taken back"
        seen = parser.content
    assert len({call.id for call in parser.calls}) == len(parser.calls)
    return parser.content, [(call.name, call.arguments) for call in parser.calls]


def written(form: ToolFormat, calls: Sequence[tuple[str, str]], chance: random.Random) -> str:
    """Write calls as a model of the family does, with some freedom."""
    space = chance.choice(["", " ", "\n"])
    objects = []
    for name, arguments in calls:
        key = chance.choice([form.key, "arguments"])
        fields = [f'"name":{space}"{name}"', f'"{key}": {arguments}']
        if chance.random() < 0.2:
            fields.reverse()
        if chance.random() < 0.2:
            fields.append(f'"id":{space}"abc"')
        objects.append("{" + f",{space}".join(fields) + space + "}")
    if form.arguments:
        number = chance.choice(["", "[CALL_ID]a1b2c3d4e"])
        return "".join(f"[TOOL_CALLS]{name}{number}[ARGS]{space}{arguments}" for name, arguments in calls)
    if form.in_list:
        return f"[TOOL_CALLS]{space}[" + f",{space}".join(objects) + "]"
    if form.begin:
        return "\n".join(f"{form.begin}\n{one}{space}\n{form.end}" for one in objects)
    return chance.choice(["", form.tag]) + f";{space}".join(objects)


VALUES = st.recursive(
    st.one_of(st.integers(), st.booleans(), st.none(), st.text('ab"\\{}[]<|,; é', max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text("xy", max_size=2), inner, max_size=3)),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(sorted(SCHEMAS)), st.dictionaries(st.text("kl", max_size=3), VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(calls=CALLS, cuts=st.lists(st.integers(0, 400)), seed=st.integers(0, 10**6), several=st.booleans())
def test_calls_in_any_pieces(
    name: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int], seed: int, several: bool
) -> None:
    form, chance = FORMATS[name], random.Random(seed)
    texts = [(called, json.dumps(arguments)) for called, arguments in calls]
    before = chance.choice(["", "Let me look.\n"]) if form.begin else ""
    text = before + written(form, texts, chance) + chance.choice(["", "\n"])
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[first:last] for first, last in itertools.pairwise(places)]
    content, found = parse(form, pieces, several)
    assert content == before.strip()
    assert [(called, json.loads(arguments)) for called, arguments in found] == calls[: None if several else 1]
    assert parse(form, list(text), several) == (content, found)


MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
PIECES = [
    "{",
    "}",
    "[",
    "]",
    '"name"',
    ": ",
    '"time"',
    '"arguments"',
    ", ",
    "{}",
    "time",
    '\\"',
    "a",
    "\n",
    "é",
    "null",
    ";",
]
STARTS = ['{"name": "time", "arguments": {"a": 1}}', '{"name": "time", "parameters": ', '"x": "']
ODD = st.lists(st.sampled_from(MARKERS + PIECES + STARTS), max_size=12).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=300, deadline=None)
@given(text=ODD, cuts=st.lists(st.integers(0, 200), max_size=6))
def test_any_text_is_divided_alike_in_any_pieces(name: str, text: str, cuts: list[int]) -> None:
    form = FORMATS[name]
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[first:last] for first, last in itertools.pairwise(places)] or [""]
    whole = parse(form, [text])
    assert parse(form, pieces) == whole
    assert parse(form, [*text, ""]) == whole
    if not whole[1]:
        assert whole[0] == text, "an output without calls is all content"


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, "1 <tool_call> b", "1 <tool_call> b", []),
        (HERMES, '<tool_call>{"name": "time"', '<tool_call>{"name": "time"', []),
        (HERMES, '<tool_call>{"name": "time", "arguments": {"z', "", [("time", '{"z')]),
        (HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call> Ok', "Ok", [("other", "{}")]),
        (HERMES, '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("time", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "time", "arguments": null}</tool_call>', "", [("time", "{}")]),
        (LLAMA, '{"city": "Rome"}', '{"city": "Rome"}', []),
        (LLAMA, '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
        (LLAMA, 'See: {"name": "time", "parameters": {}}', 'See: {"name": "time", "parameters": {}}', []),
        (LLAMA, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (MISTRAL, "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    ],
)
def test_what_only_begins_like_a_call(form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse(form, [text]) == (content, calls)


def test_a_long_call_takes_time_in_proportion() -> None:
    parser = ToolParser(HERMES, frozenset(SCHEMAS))
    parser.push('<tool_call>{"name": "time", "arguments": {"a": "')
    for _ in range(20_000):
        parser.push("abcdefgh")
        assert len(parser._buffer) == 0, "what is known is not read again"
    parser.push('"}}</tool_call>', last=True)
    assert len(json.loads(parser.calls[0].arguments)["a"]) == 160_000


# -- grammars ---------------------------------------------------------------------------------------------------------


def sentence(form: ToolFormat, seed: int, several: bool, answer: dict[str, Any] | None = None) -> str:
    from shotcast.engine.sampling_params import SamplingParams

    functions = [Function(name, schema, True) for name, schema in SCHEMAS.items()]
    grammar = calls_grammar(form, functions, several, {}, answer)
    return ScriptedEngine()._sentence(SamplingParams(grammar=grammar, seed=seed), 300)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_what_a_grammar_allows_is_parsed(name: str, several: bool) -> None:
    counts = set()
    for seed in range(12):
        text = sentence(FORMATS[name], seed, several)
        content, calls = parse(FORMATS[name], list(text))
        assert content == ""
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[called])
        counts.add(len(calls))
    if several and not FORMATS[name].single:
        assert 1 < max(counts) <= MAX_CALLS
    else:
        assert counts == {1}


def test_an_answer_or_calls() -> None:
    found = [parse(HERMES, [sentence(HERMES, seed, True, YES)]) for seed in range(12)]
    assert {bool(calls) for _, calls in found} == {False, True}
    for content, calls in found:
        if not calls:
            jsonschema.validate(json.loads(content), YES)


def test_special_tokens_are_named_by_number() -> None:
    grammar = calls_grammar(HERMES, [Function("time", TIME, True)], True, {"<tool_call>": 7, "</tool_call>": 9})
    assert grammar.text.startswith("start: one")
    assert "<[7]>" in grammar.text
    assert "<[9]>" in grammar.text
    compiler().compile(grammar)


# -- the server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    engine = ScriptedEngine()
    engine.max_model_len = 4000
    with live(engine) as server:
        yield server


@pytest.fixture(autouse=True)
def fresh(server: Live) -> None:
    server.engine.answer, server.engine.piece = None, 1
    server.engine.tokenizer.chat_template = TEMPLATES["hermes"]


def ask(server: Live, **changes: Any) -> Any:
    return server.client().chat.completions.create(
        **{"model": "letters", "messages": HELLO, "tools": TOOLS, "seed": 3} | changes
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_required(server: Live, name: str, choice: Any, stream: bool) -> None:
    server.engine.tokenizer.chat_template = TEMPLATES[name]
    answer = ask(server, tool_choice=choice, stream=stream)
    if stream:
        content, calls, finish = collected(answer)
        assert content == ""
    else:
        (whole,) = answer.choices
        finish = whole.finish_reason
        assert whole.message.content is None
        calls = [(call.function.name, call.function.arguments, call.id) for call in whole.message.tool_calls]
    assert finish == "tool_calls"
    assert len(calls) == 1 or choice == "required"
    for called, arguments, number in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[called])
        assert called == "time" or choice == "required"
        assert len(number) == 9 if name.startswith("mistral") else number.startswith("call_")


def collected(stream: Any) -> tuple[str, list[tuple[str, str, str]], str | None]:
    """Put the deltas of a stream together as clients do."""
    content, calls, finish = "", dict[int, list[str]](), None
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            if part.index not in calls:
                assert part.type == "function"
                calls[part.index] = [part.function.name, "", part.id]
            else:
                assert part.id is part.function.name is None
            calls[part.index][1] += part.function.arguments
        finish = finish or choice.finish_reason
    assert sorted(calls) == list(range(len(calls)))
    return content, [(name, arguments, number) for name, arguments, number in calls.values()], finish


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
def test_an_automatic_call_in_a_stream(server: Live, piece: int) -> None:
    server.engine.answer = (
        'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>'
    )
    server.engine.piece = piece
    content, calls, finish = collected(ask(server, stream=True))
    assert (content, finish) == ("I look.", "tool_calls")
    assert [call[:2] for call in calls] == [("weather", '{"city": "Rome"}'), ("time", '{"zone": "UTC"}')]
    content, calls, _ = collected(ask(server, stream=True, parallel_tool_calls=False))
    assert [call[0] for call in calls] == ["weather"]
    (whole,) = ask(server).choices
    assert whole.message.content == "I look."
    assert [call.function.name for call in whole.message.tool_calls] == ["weather", "time"]
    (whole,) = ask(server, max_tokens=2).choices
    assert whole.finish_reason == ("length" if piece < 1000 else "tool_calls")


def test_arguments_are_streamed_as_they_come(server: Live) -> None:
    server.engine.answer = '<tool_call>{"name": "time", "arguments": {"zone": "a long zone"}}</tool_call>'
    deltas = [chunk.choices[0].delta.tool_calls for chunk in ask(server, stream=True)]
    pieces = [delta[0].function.arguments for delta in deltas if delta]
    assert len(pieces) > 15
    assert "".join(pieces) == '{"zone": "a long zone"}'


def test_no_tools_no_calls(server: Live) -> None:
    server.engine.answer = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    for changes in ({"tool_choice": "none"}, {"tools": None}):
        (choice,) = ask(server, **changes).choices
        assert choice.message.content == server.engine.answer
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
        assert "(time)" not in "".join(map(chr, server.engine.prompts[-1]))
        assert server.engine.params[-1].skip_special_tokens


def test_the_template_gets_tools_and_what_came_back(server: Live) -> None:
    called = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": '{"zone": "UTC"}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12:00"}]},
    ]
    ask(server, messages=messages, max_tokens=1)
    prompt = "".join(map(chr, server.engine.prompts[-1]))
    past = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": {"zone": "UTC"}}}
    assert prompt == f"(weather)(time)<system>be brief<user>hello<assistant>{{{[past]}}}<tool>12:00{{call_1}}"
    assert not server.engine.params[-1].skip_special_tokens


def test_an_answer_by_a_schema_or_a_call(server: Live) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": YES, "strict": True}}
    kinds = set()
    for seed in range(8):
        (choice,) = ask(server, response_format=form, seed=seed).choices
        kinds.add(choice.finish_reason)
        if choice.message.tool_calls is None:
            jsonschema.validate(json.loads(choice.message.content), YES)
    assert kinds == {"stop", "tool_calls"}


FUNCTION = {"name": "f"}


@pytest.mark.parametrize(
    ("wrong", "param", "says"),
    [
        ({"tools": [{"type": "web"}]}, "tools", "tools[0] must be an object with the type \"function\", not 'web'"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function must be an object"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "tools[0].function.name must be 1 to 64 letters"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "not 'a b'"),
        (
            {"tools": [{"type": "function", "function": FUNCTION | {"parameter": {}}}]},
            "tools[0].function.parameter",
            "did you mean tools[0].function.parameters?",
        ),
        ({"tools": [{"type": "function", "function": FUNCTION | {"strict": 1}}]}, "tools", "must be true or false"),
        (
            {"tools": [{"type": "function", "function": FUNCTION}] * 2},
            "tools",
            "tools[1].function.name is that",
        ),
        ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]}, "tools", "at most 128"),
        ({"tool_choice": "maybe"}, "tool_choice", '"none", "auto", "required"'),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "tool_choice needs tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "wether"}}},
            "tool_choice",
            "there is no tool 'wether'; did you mean weather?",
        ),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos", "cannot be combined with tool_choice"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "cannot be combined with tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "messages[0].tool_call_id must be the id"),
        (
            {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages",
            "messages[1].tool_calls[0] must be",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}, "strict": True}}],
            },
            "tool_choice",
            "cannot be compiled",
        ),
    ],
)
def test_what_is_refused(server: Live, wrong: dict[str, Any], param: str, says: str) -> None:
    response = server.post("/v1/chat/completions", {"model": "letters", "messages": HELLO, "tools": TOOLS, **wrong})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert says in response.json()["error"]["message"]


def test_a_model_whose_template_knows_no_format_gets_no_tools(server: Live) -> None:
    server.engine.tokenizer.chat_template = "{{ messages[0].content }}"
    body = {"model": "letters", "messages": HELLO, "tools": TOOLS}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert "tells it no format" in response.json()["error"]["message"]
    assert server.post("/v1/chat/completions", body | {"tool_choice": "none"}).status_code == 200
