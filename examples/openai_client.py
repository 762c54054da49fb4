#!/usr/bin/env python3
"""Talks to a router or an engine with the `openai` package: a streamed chat, then a completion.

    pip install openai
    python3 examples/openai_client.py
    python3 examples/openai_client.py --base-url http://127.0.0.1:8000/v1 --prompt "Name three rivers."

The servers check no key, so any will do; the model defaults to the first one served.
"""

import argparse
import sys

import openai


def chat(client: openai.OpenAI, model: str, prompt: str, max_tokens: int) -> None:
    """Prints an answer as it is generated, then what it cost."""
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            details = chunk.usage.prompt_tokens_details
            cached = details.cached_tokens if details else 0
            print(
                f"\n[{chunk.usage.prompt_tokens} tokens in, {cached or 0} of them cached, "
                f"{chunk.usage.completion_tokens} out]"
            )


def complete(client: openai.OpenAI, model: str, prompt: str, max_tokens: int) -> None:
    """Prints what the model would write next."""
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=max_tokens, temperature=0)
    print(f"{prompt}{answer.choices[0].text}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Chat with a server and let it complete a sentence.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="where the API is (%(default)s)")
    parser.add_argument("--model", help="the model to ask (the first one served)")
    parser.add_argument("--prompt", default="What is the capital of France?", help="what to ask (%(default)s)")
    parser.add_argument("--complete", default="The capital of France is", help="what to complete (%(default)s)")
    parser.add_argument("--pattern", help="how a router serves it: data_parallel, prefill_decode, balanced:0.25 …")
    parser.add_argument("--max-tokens", type=int, default=64, help="the longest answer, in tokens (%(default)s)")
    arguments = parser.parse_args()

    headers = {"x-microserving-pattern": arguments.pattern} if arguments.pattern else None
    client = openai.OpenAI(base_url=arguments.base_url, api_key="none", default_headers=headers)
    try:
        model = arguments.model or client.models.list().data[0].id
        print(f"== {model} is asked: {arguments.prompt}")
        chat(client, model, arguments.prompt, arguments.max_tokens)
        print(f"\n== {model} completes: {arguments.complete}")
        complete(client, model, arguments.complete, arguments.max_tokens)
    except openai.APIConnectionError as error:
        print(f"no server answers at {arguments.base_url}: {error.__cause__ or error}", file=sys.stderr)
        return 1
    except openai.APIStatusError as error:
        print(f"the server refused: {error.status_code} {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
