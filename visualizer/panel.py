"""The page: Gradio components for what a visitor does, empty mounts for what the scripts draw.

Gradio holds the prompt box, the sliders, the buttons and the mode. Everything that moves is drawn by
the scripts in `static/`, which poll routes of their own (see `routes.py`): a chart that is redrawn seven
times a second does not belong in a queue.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from typing import Any

import gradio as gr

from engine import SamplingParams
from engine.events import Mode
from visualizer.examples import EXAMPLES, Example
from visualizer.host import EngineHost, LiveEngine
from visualizer.limits import Refused
from visualizer.visitors import MAX_PROMPT_CHARS, Prompt

NOT_READY = "The model is not ready yet. Please wait until it is loaded."
MODES = ("naive", "static", "continuous")

# The hub is the one component through which Python and the scripts speak: its value carries the token
# and notices to the page; its events ask for a new token, or let the mode shown follow the engine's.
_HUB_JS = """
const inbox = [];
let deliver = (value) => inbox.push(value);
watch('value', () => deliver(props.value));
const base = location.origin + location.pathname.replace(/\\/?$/, '/') + 'gradio_api/glass/';
const links = {
  base,
  plotly: base + 'plotly/%(plotly)s/plotly.min.js',
  renew: () => trigger('renew'),
  follow: () => trigger('follow'),
};
import(base + 'static/%(version)s/main.js').then(async (page) => {
  deliver = await page.start(element, links);
  if (props.value) deliver(props.value);
  inbox.forEach((value) => deliver(value));
});
"""

# Empties the box in the moment of sending, so that the next prompt can be typed at once. If this one is
# refused, the hub brings it back; if no answer comes, the page itself does.
_TAKE_PROMPT_JS = """
(text, ...options) => {
  const box = document.querySelector('#glass-prompt textarea');
  (window.glassSent ||= []).push({ text, at: performance.now() });
  box.value = '';
  box.dispatchEvent(new Event('input', { bubbles: true }));
  return [text, ...options];
}
"""


def build_page(host: EngineHost, version: str, plotly_version: str) -> gr.Blocks:
    """The Gradio app. `version` names the scripts, so that a browser never mixes two releases."""
    serial = itertools.count(1)

    def hub_value(
        request: gr.Request, notice: str = "", refused: str = "", took: bool = False
    ) -> dict[str, Any]:
        """What the hub tells one page. The serial makes each value new, so that none is overlooked.

        took: this is the answer to a prompt that was sent from the box.
        """
        token = host.live.visitors.open(session_of(request)) if host.live else ""
        return {
            "token": token, "notice": notice, "refused": refused, "took": took, "serial": next(serial)
        }  # fmt: skip

    def ask(request: gr.Request, make_prompts: Callable[[LiveEngine], list[Prompt]]) -> str:
        """Submit prompts; the notice to show, empty if all went well."""
        if host.live is None:
            return NOT_READY
        try:
            host.live.visitors.submit(session_of(request), make_prompts(host.live), client_of(request))
        except (ValueError, RuntimeError) as error:  # refused, or the engine is not healthy
            return str(error)
        return ""

    def send(text: str, max_tokens: int, temperature: float, request: gr.Request):
        def prompts(live: LiveEngine) -> list[Prompt]:
            if not text.strip():
                raise Refused("Please type a prompt first.")
            if len(text) > MAX_PROMPT_CHARS:
                raise Refused(
                    f"This prompt has {len(text):,} characters and {MAX_PROMPT_CHARS:,} is the most. "
                    "Please shorten it."
                )
            params = SamplingParams(max_tokens=int(max_tokens), temperature=float(temperature))
            return [Prompt(text, live.chat_ids(text), params)]

        notice = ask(request, prompts)
        return hub_value(request, notice, refused=text.strip() if notice else "", took=True)

    def send_examples(examples: tuple[Example, ...]):
        def handler(temperature: float, request: gr.Request):
            def prompts(live: LiveEngine) -> list[Prompt]:
                return [
                    Prompt(
                        example.text,
                        live.chat_ids(example.text),
                        SamplingParams(max_tokens=example.max_tokens, temperature=float(temperature)),
                    )
                    for example in examples
                ]

            return hub_value(request, ask(request, prompts))

        return handler

    def set_mode(mode: Mode, request: gr.Request):
        if host.live is None:
            return hub_value(request, NOT_READY)
        try:
            host.live.modes.ask(mode)
        except (ValueError, RuntimeError) as error:
            return hub_value(request, str(error))
        return hub_value(request)

    def stop_all(request: gr.Request) -> None:
        if host.live:
            host.live.visitors.stop_all(session_of(request))

    def clear_finished(request: gr.Request) -> None:
        if host.live:
            host.live.visitors.clear_finished(session_of(request))

    def hello(request: gr.Request):
        return hub_value(request)

    def goodbye(request: gr.Request) -> None:
        if host.live:
            host.live.visitors.close(session_of(request))

    with gr.Blocks(title="Glass Engine", analytics_enabled=False, fill_width=True) as demo:
        with gr.Row(elem_id="glass-top"):
            _mount("header")
            mode = gr.Radio(
                MODES,
                value="continuous",
                label="Batching mode of the engine, for everyone",
                elem_id="glass-mode",
                container=False,
                interactive=True,
            )
            _mount("live")
        _mount("strip")
        with gr.Row(elem_id="glass-time"):
            _mount("transport")
            _mount("lab")
        _mount("sandbox")
        with gr.Row(elem_id="glass-body"):
            with gr.Column(elem_id="glass-left", min_width=280):
                with gr.Column(elem_id="glass-ask", elem_classes="glass-panel"):
                    prompt = gr.Textbox(
                        label="Prompt",
                        show_label=False,
                        placeholder="Ask something; Enter sends it",
                        lines=1,
                        max_lines=5,
                        container=False,
                        elem_id="glass-prompt",
                        max_length=MAX_PROMPT_CHARS + 1,
                    )
                    with gr.Row(elem_id="glass-buttons"):
                        send_button = gr.Button("Send", variant="primary", size="sm", elem_id="glass-send")
                        eight = gr.Button("8 examples", size="sm", elem_id="glass-eight")
                        all_of_them = gr.Button("32 examples", size="sm", elem_id="glass-all")
                    with gr.Row(elem_id="glass-sliders"):
                        max_tokens = gr.Slider(
                            1, 400, 120, step=1, label="Max tokens", elem_id="glass-max-tokens", buttons=[]
                        )
                        temperature = gr.Slider(
                            0, 1.5, 0.7, step=0.1, label="Temperature", elem_id="glass-heat", buttons=[]
                        )
                    hub = gr.HTML(
                        value={},
                        html_template='<div id="glass-notice" role="alert"></div>',
                        js_on_load=_HUB_JS % {"version": version, "plotly": plotly_version},
                        elem_id="glass-hub",
                        apply_default_css=False,
                    )
                with gr.Column(elem_id="glass-answers", elem_classes="glass-panel"):
                    with gr.Row(elem_id="glass-answers-top"):
                        _mount("answers-head")
                        stop = gr.Button("Stop all", size="sm", elem_id="glass-stop-all")
                        clear = gr.Button("Clear finished", size="sm", elem_id="glass-clear")
                    _mount("cards")
            with gr.Column(elem_id="glass-right", min_width=300):
                _mount("timeline", panel=True)
                _mount("blocks", panel=True)
                with gr.Row(elem_id="glass-charts"):
                    _mount("throughput", panel=True)
                    _mount("anatomy", panel=True)

        quick: dict[str, Any] = {
            "queue": False,
            "show_progress": "hidden",
            "api_visibility": "private",
            "trigger_mode": "multiple",
        }
        sending = {
            "fn": send,
            "inputs": [prompt, max_tokens, temperature],
            "outputs": [hub],
            "js": _TAKE_PROMPT_JS,
            **quick,
        }
        prompt.submit(**sending)
        send_button.click(**sending)
        eight.click(send_examples(EXAMPLES[:8]), [temperature], [hub], **quick)
        all_of_them.click(send_examples(EXAMPLES), [temperature], [hub], **quick)
        mode.input(set_mode, [mode], [hub], **quick)
        stop.click(stop_all, None, None, **quick)
        clear.click(clear_finished, None, None, **quick)
        hub.renew(hello, None, [hub], **quick)
        hub.follow(None, None, [mode], js="() => window.glassMode", **quick)
        demo.load(hello, None, [hub], **quick)
        demo.unload(goodbye)
    return demo


def session_of(request: gr.Request) -> str:
    """The page's session. A call from no page has none, and gets one that nobody can come back to."""
    return request.session_hash or secrets.token_hex()


def client_of(request: gr.Request) -> str:
    """The address that a request comes from. Behind a proxy, the one that the proxy says it had from."""
    forwarded = (request.headers or {}).get("x-forwarded-for", "")
    return forwarded.partition(",")[0].strip()[:64] or (request.client.host if request.client else "")


def _mount(name: str, panel: bool = False) -> gr.HTML:
    """An empty place on the page that a script fills."""
    return gr.HTML(
        html_template=f'<div id="glass-{name}"></div>',
        js_on_load=None,
        apply_default_css=False,
        elem_id=f"glass-{name}-mount",
        elem_classes="glass-panel" if panel else "glass-mount",
    )
