#!/usr/bin/env python3
"""Checks a server with the `openai` client: does everything a program written against OpenAI's API relies on hold?

    python3 tests/python/openai_conformance.py http://127.0.0.1:8000/v1

Prints a line a check and exits with 1 if one fails. The checks hold for any model: they compare answers with each
other and with the rules of the API, never with fixed texts.
"""

import argparse
import concurrent.futures
import json
import math
import sys
import traceback
from collections.abc import Callable

import openai

PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
# No model ends an answer before this, so lengths are certain.
NO_END = {"ignore_eos": True}

# Chooses how a router serves a request, and tells how it was served.
PATTERN_HEADER = "x-microserving-pattern"

CHECKS: list[Callable[["Server"], None]] = []


class Server:
    """The server under test and the model to ask."""

    def __init__(self, base_url: str, model: str | None, pattern: str | None, timeout: float) -> None:
        self.pattern = pattern
        self.client = openai.OpenAI(
            base_url=base_url,
            api_key="none",
            timeout=timeout,
            max_retries=0,
            default_headers={PATTERN_HEADER: pattern} if pattern else None,
        )
        self.model = model or self.client.models.list().data[0].id

    def complete(self, **fields):
        fields = {"model": self.model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0} | fields
        return self.client.completions.create(**fields)

    def chat(self, **fields):
        fields = {"model": self.model, "messages": MESSAGES, "max_tokens": 16, "temperature": 0} | fields
        return self.client.chat.completions.create(**fields)


def check(function: Callable[[Server], None]) -> Callable[[Server], None]:
    """Adds a check; the first line of its description is what is printed."""
    CHECKS.append(function)
    return function


def equal(found, expected, what: str) -> None:
    assert found == expected, f"{what}: {found!r}, not {expected!r}"


def check_usage(usage, completion_tokens: int | None = None) -> None:
    assert usage is not None, "there is no usage"
    assert usage.prompt_tokens > 0, f"prompt_tokens: {usage.prompt_tokens}"
    equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens, "total_tokens")
    if completion_tokens is not None:
        equal(usage.completion_tokens, completion_tokens, "completion_tokens")
    cached = usage.prompt_tokens_details.cached_tokens
    assert 0 <= cached <= usage.prompt_tokens, f"cached_tokens: {cached}"


def refused(call: Callable[[], object], kind: type[openai.APIStatusError], param: str | None = None) -> None:
    """Checks that a request is refused with OpenAI's error body, naming the field."""
    try:
        call()
    except kind as error:
        body = error.body
        assert isinstance(body, dict), f"the error body is {body!r}"
        missing = {"message", "type", "param", "code"} - body.keys()
        assert not missing, f"the error body lacks {missing}: {body}"
        assert body["message"], "the error has no message"
        if param:
            named = f"{body['param']} {body['message']}"
            assert param in named, f"the error does not name `{param}`: {body}"
    else:
        raise AssertionError(f"the request was accepted, not refused with {kind.status_code}")


# --- Models -----------------------------------------------------------------------------------------------------------


@check
def models_are_listed(server: Server) -> None:
    """Models are listed and the asked one is among them."""
    models = server.client.models.list()
    equal(models.object, "list", "object")
    assert server.model in [model.id for model in models.data], f"{models.data}"
    for model in models.data:
        equal(model.object, "model", "object of a model")
        assert model.owned_by and isinstance(model.created, int), f"{model}"


# --- Completions ------------------------------------------------------------------------------------------------------


@check
def completion(server: Server) -> None:
    """A completion has as many tokens as asked for and says so."""
    answer = server.complete(max_tokens=5, extra_body=NO_END)
    equal(answer.object, "text_completion", "object")
    equal(answer.model, server.model, "model")
    assert answer.id and isinstance(answer.created, int), f"{answer}"
    equal(len(answer.choices), 1, "choices")
    choice = answer.choices[0]
    equal((choice.index, choice.finish_reason), (0, "length"), "index and finish_reason")
    assert choice.text, "the text is empty"
    check_usage(answer.usage, completion_tokens=5)


@check
def completion_of_token_ids(server: Server) -> None:
    """A prompt may be token ids."""
    answer = server.complete(prompt=[40, 41, 42], max_tokens=2, extra_body=NO_END)
    equal(answer.usage.prompt_tokens, 3, "prompt_tokens")


@check
def greedy_is_repeatable(server: Server) -> None:
    """Greedy answers are equal, one by one and all at once."""
    expected = server.complete().choices[0].text
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        texts = [answer.choices[0].text for answer in pool.map(lambda _: server.complete(), range(4))]
    equal(texts, [expected] * 4, "texts")


@check
def seeds(server: Server) -> None:
    """A seed repeats its answer and other seeds give others."""

    def text(seed: int) -> str:
        return server.complete(temperature=1, seed=seed, extra_body=NO_END).choices[0].text

    equal(text(7), text(7), "the text of a seed")
    assert len({text(seed) for seed in range(6)}) > 1, "six seeds gave one text"


@check
def several_choices(server: Server) -> None:
    """With n=2 there are two choices, the same with and without streaming."""
    fields = {"n": 2, "temperature": 1, "seed": 11, "max_tokens": 8, "extra_body": NO_END}
    answer = server.complete(**fields)
    equal([choice.index for choice in answer.choices], [0, 1], "indices")
    check_usage(answer.usage, completion_tokens=16)
    texts = ["", ""]
    reasons = [None, None]
    for chunk in server.complete(stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    equal(texts, [choice.text for choice in answer.choices], "streamed texts")
    equal(reasons, ["length", "length"], "finish_reasons")


@check
def stop_strings(server: Server) -> None:
    """A stop string ends the text just before it, also across chunks."""
    whole = server.complete(max_tokens=24, extra_body=NO_END).choices[0].text
    assert len(whole) > 6, f"the text {whole!r} is too short to stop inside"
    stop = whole[3:6]
    expected = whole[: whole.index(stop)]
    for given in (stop, ["\0never\0", stop]):
        choice = server.complete(max_tokens=24, stop=given, extra_body=NO_END).choices[0]
        equal((choice.text, choice.finish_reason), (expected, "stop"), f"with stop={given!r}")
        chunks = [
            choice
            for chunk in server.complete(max_tokens=24, stop=given, stream=True, extra_body=NO_END)
            for choice in chunk.choices
        ]
        equal("".join(chunk.text for chunk in chunks), expected, "the streamed text")
        equal(chunks[-1].finish_reason, "stop", "the streamed finish_reason")


@check
def completion_stream(server: Server) -> None:
    """A streamed completion says the same and sends no usage unasked."""
    expected = server.complete()
    text, reasons = "", []
    for chunk in server.complete(stream=True):
        assert chunk.usage is None, f"usage was not asked for: {chunk.usage}"
        equal(chunk.object, "text_completion", "object")
        for choice in chunk.choices:
            text += choice.text
            reasons += [choice.finish_reason] if choice.finish_reason else []
    equal(text, expected.choices[0].text, "the text")
    equal(reasons, [expected.choices[0].finish_reason], "finish_reasons")


@check
def completion_logprobs(server: Server) -> None:
    """Legacy log-probabilities are aligned with the text."""
    choice = server.complete(max_tokens=6, logprobs=2, extra_body=NO_END).choices[0]
    logprobs = choice.logprobs
    lengths = {
        len(logprobs.tokens),
        len(logprobs.token_logprobs),
        len(logprobs.top_logprobs),
        len(logprobs.text_offset),
    }
    equal(lengths, {6}, "lengths of the lists")
    if choice.text.isascii():
        equal("".join(logprobs.tokens), choice.text, "the tokens put together")
        first = logprobs.text_offset[0]
        at = first
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            equal(offset, at, f"text_offset of {token!r}")
            at += len(token)
    for logprob, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert logprob <= 0 and math.isfinite(logprob), f"{logprob}"
        assert len(top) in (2, 3), f"{top}"
        assert math.isclose(max(top.values()), logprob, abs_tol=1e-4), f"greedy chose {logprob} of {top}"


@check
def echo(server: Server) -> None:
    """With echo the text begins with the prompt."""
    answer = server.complete(max_tokens=4).choices[0].text
    equal(server.complete(max_tokens=4, echo=True).choices[0].text, PROMPT + answer, "the text")


@check
def logit_bias(server: Server) -> None:
    """A token biased away is not chosen."""
    ids = {}
    for sign in (100, -100):
        choice = server.complete(max_tokens=1, logit_bias={"65": sign}, logprobs=1, extra_body=NO_END).choices[0]
        ids[sign] = choice.logprobs.tokens[0]
    assert ids[100] != ids[-100], f"the bias changed nothing: {ids}"


# --- Chat -------------------------------------------------------------------------------------------------------------


@check
def chat(server: Server) -> None:
    """A chat is answered by the assistant."""
    answer = server.chat(max_tokens=5, extra_body=NO_END)
    equal(answer.object, "chat.completion", "object")
    equal(answer.model, server.model, "model")
    choice = answer.choices[0]
    equal((choice.index, choice.finish_reason, choice.message.role), (0, "length", "assistant"), "the choice")
    assert choice.message.content, "the answer is empty"
    check_usage(answer.usage, completion_tokens=5)


@check
def chat_limits(server: Server) -> None:
    """max_completion_tokens limits as max_tokens does."""
    answer = server.chat(max_tokens=openai.omit, max_completion_tokens=3, extra_body=NO_END)
    equal(answer.usage.completion_tokens, 3, "completion_tokens")


@check
def chat_parts(server: Server) -> None:
    """Contents may come in parts of text."""
    content = MESSAGES[0]["content"]
    parts = [{"type": "text", "text": content[:10]}, {"type": "text", "text": content[10:]}]
    found = server.chat(messages=[{"role": "user", "content": parts}])
    expected = server.chat()
    equal(found.choices[0].message.content, expected.choices[0].message.content, "the answer")
    equal(found.usage.prompt_tokens, expected.usage.prompt_tokens, "prompt_tokens")


@check
def chat_history(server: Server) -> None:
    """A second turn is a longer prompt."""
    first = server.chat()
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And of Italy?"},
    ]
    second = server.chat(messages=messages)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens, f"{second.usage}"


@check
def chat_stream(server: Server) -> None:
    """A streamed chat says the same, begins with the role and sends no usage unasked."""
    expected = server.chat()
    chunks = list(server.chat(stream=True))
    equal({chunk.object for chunk in chunks}, {"chat.completion.chunk"}, "objects")
    equal(len({chunk.id for chunk in chunks}), 1, "number of ids")
    assert all(chunk.usage is None for chunk in chunks), "usage was not asked for"
    equal(chunks[0].choices[0].delta.role, "assistant", "the role of the first chunk")
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    equal(text, expected.choices[0].message.content, "the text")
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    equal(reasons, [expected.choices[0].finish_reason], "finish_reasons")


@check
def chat_stream_usage(server: Server) -> None:
    """With include_usage one last chunk without choices carries the usage."""
    chunks = list(server.chat(stream=True, max_tokens=5, stream_options={"include_usage": True}, extra_body=NO_END))
    with_usage = [index for index, chunk in enumerate(chunks) if chunk.usage]
    equal(with_usage, [len(chunks) - 1], "the chunks with usage")
    equal(chunks[-1].choices, [], "choices of the last chunk")
    check_usage(chunks[-1].usage, completion_tokens=5)
    equal(chunks[-1].usage.prompt_tokens, server.chat().usage.prompt_tokens, "prompt_tokens")


@check
def chat_choices(server: Server) -> None:
    """A chat may have two answers."""
    answer = server.chat(n=2, temperature=1, seed=3, max_tokens=6, extra_body=NO_END)
    equal([choice.index for choice in answer.choices], [0, 1], "indices")
    check_usage(answer.usage, completion_tokens=12)


@check
def chat_logprobs(server: Server) -> None:
    """Chat log-probabilities come with the most probable tokens, best first."""
    choice = server.chat(max_tokens=5, logprobs=True, top_logprobs=3, extra_body=NO_END).choices[0]
    equal(len(choice.logprobs.content), 5, "entries")
    for entry in choice.logprobs.content:
        equal(len(entry.top_logprobs), 3, "top_logprobs")
        values = [top.logprob for top in entry.top_logprobs]
        equal(values, sorted(values, reverse=True), "the order of top_logprobs")
        equal(entry.token, entry.top_logprobs[0].token, "the token that greedy chose")
        assert math.isclose(entry.logprob, values[0], abs_tol=1e-4), f"{entry}"
        equal(bytes(entry.bytes).decode(errors="replace"), entry.token, "the bytes of a token")
    said = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    if choice.message.content.isascii():
        equal(said.decode(errors="replace"), choice.message.content, "the bytes put together")


@check
def chat_stream_logprobs(server: Server) -> None:
    """A streamed chat has the same log-probabilities."""
    fields = {"max_tokens": 5, "logprobs": True, "top_logprobs": 1, "extra_body": NO_END}
    expected = [entry.token for entry in server.chat(**fields).choices[0].logprobs.content]
    found = [
        entry.token
        for chunk in server.chat(stream=True, **fields)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or []
    ]
    equal(found, expected, "the tokens")


@check
def structured_output(server: Server) -> None:
    """An answer held to a JSON schema satisfies it."""
    schema = {
        "type": "object",
        "properties": {"answer": {"enum": ["yes", "no"]}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    choice = server.chat(max_tokens=400, response_format=response_format).choices[0]
    equal(choice.finish_reason, "stop", "finish_reason")
    answer = json.loads(choice.message.content)
    assert answer in ({"answer": "yes"}, {"answer": "no"}), f"{answer}"


@check
def request_ids(server: Server) -> None:
    """A request's id comes back, and one without gets one."""
    create = server.client.chat.completions.with_raw_response.create
    fields = {"model": server.model, "messages": MESSAGES, "max_tokens": 1}
    answer = create(**fields, extra_headers={"x-request-id": "conformance-1"})
    equal(answer.headers.get("x-request-id"), "conformance-1", "x-request-id")
    assert create(**fields).headers.get("x-request-id"), "no x-request-id"


@check
def pattern(server: Server) -> None:
    """The pattern asked for is the one that served."""
    for create, fields in (
        (server.client.chat.completions.with_raw_response.create, {"messages": MESSAGES}),
        (server.client.completions.with_raw_response.create, {"prompt": PROMPT}),
    ):
        answer = create(model=server.model, max_tokens=1, **fields)
        if server.pattern:
            equal(answer.headers.get(PATTERN_HEADER), server.pattern, PATTERN_HEADER)


# --- Refusals ---------------------------------------------------------------------------------------------------------


@check
def unknown_model(server: Server) -> None:
    """An unknown model is 404."""
    refused(lambda: server.chat(model="no/such-model"), openai.NotFoundError, "model")
    refused(lambda: server.complete(model="no/such-model"), openai.NotFoundError, "model")
    refused(lambda: server.complete(model="no/such-model", stream=True), openai.NotFoundError, "model")


@check
def bad_sampling(server: Server) -> None:
    """Numbers out of bounds are 400 and named."""
    for fields in (
        {"temperature": -1},
        {"top_p": 1.5},
        {"n": 0},
        {"max_tokens": -1},
        {"frequency_penalty": 3},
        {"presence_penalty": -3},
        {"logit_bias": {"1": 101}},
        {"stop": ""},
    ):
        (param,) = fields
        refused(lambda fields=fields: server.complete(**fields), openai.BadRequestError, param)
        refused(lambda fields=fields: server.chat(**fields), openai.BadRequestError, param)
    refused(lambda: server.complete(logprobs=-1), openai.BadRequestError, "logprobs")
    refused(lambda: server.chat(logprobs=True, top_logprobs=1000), openai.BadRequestError, "top_logprobs")


@check
def bad_prompts(server: Server) -> None:
    """Prompts that say nothing, or what the model cannot read, are 400 and named."""
    refused(lambda: server.complete(prompt=""), openai.BadRequestError, "prompt")
    refused(lambda: server.complete(prompt=[]), openai.BadRequestError, "prompt")
    refused(lambda: server.complete(prompt=[2**31]), openai.BadRequestError, "prompt")
    refused(lambda: server.chat(messages=[]), openai.BadRequestError, "messages")
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    refused(lambda: server.chat(messages=[{"role": "user", "content": image}]), openai.BadRequestError, "messages")


@check
def bad_schema(server: Server) -> None:
    """A schema that cannot be enforced is 400 and named."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    refused(lambda: server.chat(response_format=schema), openai.BadRequestError, "response_format")


@check
def still_serving(server: Server) -> None:
    """After all refusals the server still answers."""
    assert server.complete().choices[0].text, "the text is empty"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check a server with the openai client.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("base_url", nargs="?", help="where the API is, e.g. http://127.0.0.1:8000/v1")
    where.add_argument("--base-url", dest="base_url_option", metavar="URL", help="the same as an option")
    parser.add_argument("--model", help="the model to ask (the first one served)")
    parser.add_argument("--pattern", help="the pattern a router is asked to serve every request by")
    parser.add_argument("--timeout", type=float, default=60, help="seconds a request may take (%(default)s)")
    parser.add_argument("--only", default="", help="run only the checks whose name contains this")
    parser.add_argument("--trace", action="store_true", help="print where a check failed")
    arguments = parser.parse_args()

    base_url = arguments.base_url or arguments.base_url_option
    try:
        server = Server(base_url, arguments.model, arguments.pattern, arguments.timeout)
    except openai.APIConnectionError as error:
        print(f"no server answers at {base_url}: {error.__cause__ or error}", file=sys.stderr)
        return 1
    checks = [function for function in CHECKS if arguments.only in function.__name__]
    if not checks:
        print(f"no check is named like {arguments.only!r}", file=sys.stderr)
        return 2
    failures = 0
    for function in checks:
        description = (function.__doc__ or "").splitlines()[0]
        try:
            function(server)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong is this check's failure
            failures += 1
            print(f"FAIL {function.__name__}: {description} -- {type(error).__name__}: {error}", flush=True)
            if arguments.trace:
                traceback.print_exc()
        else:
            print(f"ok   {function.__name__}: {description}", flush=True)
    print(f"{len(checks) - failures} of {len(checks)} checks hold for {server.model} at {base_url}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
