"""The process that clients talk to: HTTP, TLS, keys, tokenizer and chat template; no weights, no bundle key.

One request goes down this page and its answer comes back up::

    server         bytes of a connection, with time limits            (uvicorn's h11 protocol, narrowed)
    app            front door: request id, banner, key check, routes  (Starlette's router)
    inference      one request from body to answer, whole or streamed
    limits         who may come in, how large a body, who hung up
    schema         JSON to typed requests; everything else is refused by name
    servedmodel    messages or text to token ids                      (template, tokenizer)
    engineclient   token ids to the engine, tokens back
    text           tokens to text, stop strings
    dialects       text to the shapes of OpenAI's two endpoints

Prompts and completions are the client's secret: they exist in this process's memory and nowhere else. No log line,
error text or file is made from them (quiet.py); docs/api.md tells clients the rest.
"""
