"""The explorers, driven as a browser drives them: a control's value is set, the figure and the line follow."""

from helpers import widgets


def test_memory_explorer_follows_its_controls():
    explorer = widgets.memory_explorer()
    picture, line = bytes(explorer.image.value), explorer.text
    assert picture.startswith(b"\x89PNG")
    explorer.controls["kv"].value = "fp8"
    assert bytes(explorer.image.value) != picture
    tokens = [int(text.split(" = ")[1].split(" tokens")[0]) for text in (line, explorer.text)]
    assert abs(tokens[1] / tokens[0] - 2) < 1e-3  # half the bytes a token, twice the tokens


def test_memory_explorer_says_what_does_not_fit():
    explorer = widgets.memory_explorer("Qwen2.5-72B", "A100-40GB")
    assert "does not fit" in explorer.text
    explorer.controls["scheme"].value = "awq"
    assert "does not fit" in explorer.text  # 41 GB of weights in 40 GB
    explorer.controls["model"].value = "Qwen2.5-32B"
    assert "Qwen2.5-32B fits" in explorer.text


def test_a_combination_that_cannot_be_drawn_becomes_a_line_of_text():
    def draw(size):
        if size == 2:
            raise ValueError("two is not possible")
        return widgets.plots.stacked({"a": {"b": size}}, "GiB", ""), f"size {size}"

    explorer = widgets.Explorer({"size": widgets._slider("size", [1, 2], 1)}, draw)
    picture = bytes(explorer.image.value)
    explorer.controls["size"].value = 2
    assert explorer.text == "two is not possible"
    assert bytes(explorer.image.value) == picture


def test_roofline_explorer_gives_the_bandwidth_bound():
    explorer = widgets.roofline_explorer("Llama-2-13B", "A100-80GB")
    explorer.controls["context"].value = 0
    # 26 GB over 2.04 TB/s is 12.8 ms a token, 78 tokens/s.
    assert "12.7" in explorer.text or "12.6" in explorer.text


def test_an_explorer_reads_without_widgets():
    bundle = widgets.roofline_explorer()._repr_mimebundle_()
    assert bundle["image/png"].startswith("iVBOR")
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/plain"].startswith("one stream")
