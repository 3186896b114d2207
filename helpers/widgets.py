"""Explorers for a notebook: controls beside a figure that follows them.

An explorer shows its first figure as a plain image where widgets do not run (on a code host, in a printed page).
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable

import ipywidgets as widgets
from matplotlib.figure import Figure

from helpers import capacity, hardware, models, plots

Drawing = Callable[..., tuple[Figure, str]]


class Explorer(widgets.VBox):
    """Controls by the names of `draw`'s arguments; `draw` returns the figure and one line of text about it.

    A ValueError of `draw` (a model that does not divide over the GPUs, say) is shown as the line of text.
    """

    def __init__(self, controls: dict[str, widgets.ValueWidget], draw: Drawing):
        self.controls = controls
        self.image = widgets.Image(format="png", layout=widgets.Layout(max_width="100%"))
        self.text = ""
        self._line = widgets.HTML()
        self._draw = draw
        for control in controls.values():
            control.observe(self._update, "value")
        self._update()
        super().__init__([widgets.HBox(list(controls.values()), layout=_WRAP), self._line, self.image])

    def _update(self, _change=None) -> None:
        try:
            figure, self.text = self._draw(**{name: control.value for name, control in self.controls.items()})
        except ValueError as error:
            self.text = str(error)
        else:
            sink = io.BytesIO()
            figure.savefig(sink, format="png", bbox_inches="tight")
            self.image.value = sink.getvalue()
        self._line.value = f"<b>{html.escape(self.text)}</b>"

    def _repr_mimebundle_(self, **kwargs) -> dict:
        picture = {"image/png": base64.b64encode(self.image.value).decode(), "text/plain": self.text}
        return super()._repr_mimebundle_(**kwargs) | picture


_WRAP = widgets.Layout(flex_flow="row wrap")
_COMPUTED = "computed from shapes and datasheets, not measured"


def _choice(label: str, options: list, value) -> widgets.Dropdown:
    return widgets.Dropdown(description=label, options=options, value=value, layout=widgets.Layout(width="260px"))


def _slider(label: str, options: list, value) -> widgets.SelectionSlider:
    return widgets.SelectionSlider(description=label, options=options, value=value, continuous_update=False)


def memory_explorer(model: str = "Qwen2.5-7B", card: str = "A100-80GB") -> Explorer:
    """Where a card's memory goes when vLLM starts, by model, weights, KV dtype, length and utilization."""

    def draw(model, card, scheme, kv, length, utilization):
        plan = capacity.memory_plan(
            model, card, scheme, kv, gpu_memory_utilization=utilization, max_model_len=length
        )  # fmt: skip
        free = hardware.gpu(card).memory_bytes - plan.budget
        parts = {
            "weights": plan.weights,
            "activation": plan.activation + plan.non_torch,
            "KV cache": max(plan.kv, 0),
            "left free": free,
        }
        bars = {card: {name: size / hardware.GIB for name, size in parts.items()}}
        return plots.stacked(bars, "GiB", _COMPUTED, f"{model}, {scheme}, KV {kv}"), plan.explain()

    return Explorer(
        {
            "model": _choice("model", [m for m in models.known_models() if m != "course"], model),
            "card": _choice("GPU", hardware.known_gpus(), card),
            "scheme": _choice("weights", list(models.SCHEMES), "bf16"),
            "kv": _choice("KV cache", ["bfloat16", "fp8"], "bfloat16"),
            "length": _slider("max length", [2**n for n in range(10, 18)], 8192),
            "utilization": _slider("utilization", [round(0.5 + 0.02 * n, 2) for n in range(25)], 0.92),
        },
        draw,
    )


def roofline_explorer(model: str = "Qwen2.5-7B", card: str = "A100-80GB") -> Explorer:
    """Decode on the roofline of a card, for batches of 1 to 256, by model, weights and context."""

    def draw(model, card, scheme, kv, context):
        device = hardware.gpu(card)
        batches = [2**n for n in range(9)]
        points = capacity.decode_points(model, card, batches, context, scheme, kv)
        line = [(point["intensity"], point["flops"]) for point in points]
        roofs = {card: (device.bandwidth, capacity.peak_flops(device, scheme))}
        first, last = points[0], points[-1]
        text = (
            f"one stream: at most {first['tokens_per_second']:,.0f} tokens/s, {1e3 * first['step']:.2f} ms a token; "
            f"batch {last['batch']}: at most {last['tokens_per_second']:,.0f} tokens/s"
        )
        return plots.roofline(roofs, {"decode, batch 1 to 256": line}, _COMPUTED), text

    return Explorer(
        {
            "model": _choice("model", [m for m in models.known_models() if m != "course"], model),
            "card": _choice("GPU", hardware.known_gpus(), card),
            "scheme": _choice("weights", list(models.SCHEMES), "bf16"),
            "kv": _choice("KV cache", ["bfloat16", "fp8"], "bfloat16"),
            "context": _slider("context", [0, *(2**n for n in range(7, 16))], 1024),
        },
        draw,
    )
