"""Glass Engine's page: `python app.py`, then open the address it prints.

The server is up at once; the model loads behind it, with its progress here and on the page.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys

ON_SPACE = "SPACE_ID" in os.environ  # a Hugging Face Space: strangers come, from all sides


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve the Glass Engine page.")
    parser.add_argument("--model", default="auto", help="folder, Hub id, GGUF file, or auto (default)")
    parser.add_argument("--mode", default="continuous", choices=["naive", "static", "continuous"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--quantization", choices=["int8"], help="8-bit weights: faster on a CPU, less exact")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="slots: requests that run at once")
    parser.add_argument("--num-blocks", type=int, default=128, help="KV blocks of 16 tokens")
    parser.add_argument("--max-model-len", type=int, default=512, help="tokens of prompt and answer together")
    parser.add_argument("--host", default="0.0.0.0" if ON_SPACE else "127.0.0.1")
    # As text, so that a bad PORT is refused like a bad --port.
    parser.add_argument("--port", type=port_number, default=os.environ.get("PORT") or "7860")
    return parser.parse_args(argv)


def port_number(text: str) -> int:
    """Raises ArgumentTypeError for what is no port."""
    if not text.isascii() or not text.isdigit() or len(text) > 5 or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: a number from 1 to 65535 (see also PORT)")
    return int(text)


def open_port(host: str, port: int) -> socket.socket:
    """A bound socket, or a clear end if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Naming the protocol matters: asyncio turns Nagle's delay (40 ms a poll) off only if it sees TCP.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sys.exit(
            f"Cannot serve on {host}:{port}: {error.strerror}. Choose another port: "
            f"PORT={port + 1} make run, or python app.py --port {port + 1}"
        )
    return sock


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    sock = open_port(args.host, args.port)

    import uvicorn

    from visualizer import EngineHost, build_app
    from visualizer.limits import PUBLIC, Limits

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # Open pages hold a stream each. Cutting them is no error worth a traceback.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            await super().shutdown(sockets)

    host = EngineHost(PUBLIC if ON_SPACE else Limits())

    def make_llm(progress):
        from engine import LLM

        return LLM(
            model=args.model,
            mode=args.mode,
            dtype=args.dtype,
            quantization=args.quantization,
            block_size=16,
            num_blocks=args.num_blocks,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=512,
            max_model_len=args.max_model_len,
            progress=progress,
        )

    stages: list[str] = []

    def report(stage: str, fraction: float) -> None:
        if stages[-1:] != [stage]:
            stages.append(stage)
            print(f"  {stage}", flush=True)

    app = build_app(host, os.environ.get("GRADIO_ROOT_PATH"))
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(args.host, args.host)
    if ":" in shown and not shown.startswith("["):
        shown = f"[{shown}]"
    print(f"Glass Engine: http://{shown}:{args.port}", flush=True)
    host.load(make_llm, report)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            Server(config).run(sockets=[sock])
    finally:
        host.close()


if __name__ == "__main__":
    main()
