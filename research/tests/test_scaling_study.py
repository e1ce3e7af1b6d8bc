"""The tables and pictures of the note about layouts and strong scaling."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import external_answers
import measured_layouts
import published_layouts
import pytest
import scaling_over_nodes
import scaling_pictures
import scaling_study
import sums_on_a_node
import sums_over_nodes
from markdown_table import paragraph, table

from shotcast.errors import ConfigError
from shotcast.planner.calibration import load
from shotcast.planner.plan import Limits
from shotcast.planner.step import Layout

ROOT = Path(__file__).parent.parent.parent
NOTE = ROOT / "research" / "reports" / "strong_scaling.md"
IMAGES = ROOT / "docs" / "images"


@cache
def study() -> scaling_study.Study:
    return scaling_study.study()


def cells(section: str) -> Iterator[list[str]]:
    """Yield the rows of every table of a section of the note."""
    page = NOTE.read_text()
    begin = page.index(f"<!-- research/scaling_study.py {section} -->")
    for line in page[begin : page.index(f"<!-- end of {section} -->")].splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_eight_gpus_by_constants_of_two_and_four() -> None:
    """NCCL's published times on 8 H200 are external figures: nothing was fitted to them."""
    (row,) = [row for row in study_of_sums() if row.name == "NCCL, predicted"]
    for nbytes in (32 << 10, 256 << 10):
        assert row.times_us[nbytes, 8] == pytest.approx(external_answers.sums("NCCL", 8)[nbytes], rel=0.25)


def test_published_tables_count_elements() -> None:
    """By bytes, NCCL's published long messages are those measured here; by half or twice of them they are not."""
    published, measured = external_answers.sums("NCCL", 4), study_of_sums()
    (here,) = [row for row in measured if row.name == "NCCL, measured here"]
    assert published[64 << 20] == pytest.approx(here.times_us[64 << 20, 4], rel=0.03)


def study_of_sums() -> list[sums_on_a_node.SumRow]:
    return sums_on_a_node.sum_rows(load("NVIDIA H200"))


@pytest.mark.full
def test_the_note_has_these_tables_and_pictures() -> None:
    page, found = NOTE.read_text(), study()
    assert scaling_study.filled(page, scaling_study.tables(found)) == page
    for name, picture in scaling_study.pictures(found).items():
        assert scaling_pictures.kept_data(IMAGES / f"{name}.svg") == picture.data(), name
        assert f"(../../docs/images/{name}.svg)" in page


@pytest.mark.full
def test_what_the_note_says_in_words() -> None:
    found = study()
    rows = {row.layout: row for row in found.layouts}
    for layout in (Layout(8, 1), Layout(1, 8)):  # one sequence: ours is nearer, AIConfigurator is too slow
        published = published_layouts.PUBLISHED_LAYOUTS[layout][0]
        assert abs(rows[layout].alone / published - 1) < 1 - rows[layout].external[0] / published
    ratios = {row.name: row for row in found.ratios}
    published, ours, theirs = (ratios[name] for name in ("published", "predicted", "AIConfigurator"))
    assert abs(theirs.one - published.one) < abs(ours.one - published.one)
    assert abs(ours.many - published.many) < abs(theirs.many - published.many)
    assert ratios[published_layouts.SUMS_OF_NCCL].one < published.one < ours.one
    assert ours.many < ratios[published_layouts.BOTH].many == pytest.approx(published.many, rel=0.1)
    for model, nearer in (("llama-3.1-405b", 3), ("llama-3.1-70b", 1), ("llama-3.1-8b", 1)):
        errors = published_layouts.mean_errors(found.tokens, model)
        assert min(errors[1], errors[3]) == errors[nearer], model
        for bfloat16, fp8 in (errors[:2], errors[2:]):
            assert (bfloat16 > 1.5 * fp8) == (model != "llama-3.1-405b")  # the type matters on one GPU
    last = found.stages[-1]
    assert last.published < last.served < last.predicted < last.stages
    assert last.few_served < last.served
    assert min(last.external) > 0.97 * last.stages
    for row, other in measured_layouts.layouts_beside_tensor_parallel(found.measured):
        ratio, *predicted = (own / whole for own, whole in zip(row.tokens_per_s, other.tokens_per_s, strict=True))
        assert abs(ratio - 1) < 0.05 or all((each < 1) == (ratio < 1) for each in predicted), row
    for alone in (True, False):
        runs = [row.tokens_per_s for row in found.measured if (row.run.sequences == 1) == alone]
        ours_off, theirs_off = measured_layouts.mean_errors(runs)
        assert ours_off < theirs_off
    for name in sums_over_nodes.CLUSTERS:
        forms = scaling_over_nodes.TP, scaling_over_nodes.TP_NARROW
        gains = [scaling_over_nodes.most_gain(found.scaling, name, "llama-3.1-405b", form) for form in forms]
        assert scaling_over_nodes.PUBLISHED_GAIN < gains[0] < gains[1]
    for cluster, model, wins_from in (
        ("h200-x4-ndr", "llama-3.1-405b", 8),
        ("h200-x4-ndr", "llama-3.1-70b", 1),
        ("a100-x4-slingshot", "llama-3.1-405b", math.inf),
        ("a100-x4-slingshot", "llama-3.1-70b", 16),
    ):
        both = [
            row
            for row in scaling_over_nodes.case(found.scaling, cluster, model, "prefill-heavy")
            if {scaling_over_nodes.TP, scaling_over_nodes.HYBRID} <= row.seconds.keys()
        ]
        assert both
        for row in both:
            assert (row.best == scaling_over_nodes.HYBRID) == (row.nodes >= wins_from), row


def test_tables_of_eight_gpus_are_those_of_the_note() -> None:
    calibration = load("NVIDIA H200")
    page = NOTE.read_text()
    rows = published_layouts.layout_rows(published_layouts.plan_of_405b(calibration, Limits()))
    ratios = published_layouts.ratio_rows(rows, calibration)
    made = {
        "layouts": published_layouts.layouts_table(rows, ratios, calibration),
        "tokens": published_layouts.tokens_table(published_layouts.tokens_rows(calibration)),
        "external": sums_on_a_node.sums_on_a_node_table(study_of_sums()),
        "sums": sums_over_nodes.node_sums_tables(sums_over_nodes.node_sum_rows(calibration)),
    }
    assert scaling_study.filled(page, made) == page
    with pytest.raises(ConfigError, match=r"the page has no .*scaling_study\.py layouts"):
        scaling_study.filled("a page", made)


def same(cell: str, value: float) -> bool:
    """Return whether a cell of two decimals is a value of five digits."""
    return abs(float(cell) - value) < 0.0051 + 1e-4 * value


def test_committed_pictures_have_the_figures_of_the_tables() -> None:
    """Seconds and gains by nodes, and throughputs by layout and stages, as both are committed."""
    tables: list[dict[str, list[str]]] = []
    for row in cells("scaling"):
        if row[0] == "nodes":
            tables.append({})
        elif tables:
            tables[-1][row[0]] = row
    panels = [
        panel
        for picture in ("strong_scaling_ndr", "strong_scaling_slingshot")
        for panel in scaling_pictures.kept_data(IMAGES / f"{picture}.svg")["panels"]
    ]
    for panel, found in zip(panels, tables, strict=True):
        for curve, column in zip(panel["curves"], (1, 2, 4, 5), strict=True):
            assert len(curve["points"]) == sum(bool(row[column]) for row in found.values())
            assert all(same(found[f"{nodes:g}"][column], value) for nodes, value in curve["points"]), panel["title"]
    gains = {(row[0], row[1], row[2]): row[-1] for row in cells("sums") if len(row) > 4}
    panels = scaling_pictures.kept_data(IMAGES / "nvrar_gain.svg")["panels"]
    for cluster, panel in zip(sums_over_nodes.CLUSTERS, panels, strict=True):
        for curve in panel["curves"]:
            if not curve["dashed"]:
                found_gains = [gains[cluster, f"{nodes:g}", curve["name"]] for nodes, _ in curve["points"]]
                assert all(same(cell, gain) for cell, (_, gain) in zip(found_gains, curve["points"], strict=True))
    stages = {row[0]: row[1:] for row in cells("stages")}
    (panel,) = scaling_pictures.kept_data(IMAGES / "stages_70b.svg")["panels"]
    for number, curve in enumerate(panel["curves"]):
        assert all(same(stages[f"{x:g}"][number], x * y) for x, y in curve["points"]), curve["name"]
    layouts = {row[0]: row for row in cells("layouts")}
    (panel,) = scaling_pictures.kept_data(IMAGES / "pareto_405b.svg")["panels"]
    most = {curve["name"]: 8 * max(y for _, y in curve["points"]) for curve in panel["curves"]}
    for layout in ("TP8", "TP4 x PP2", "TP2 x PP4", "PP8"):
        assert abs(float(layouts[layout][5].split()[0]) - most[layout]) < 0.6
    one, many = scaling_pictures.kept_data(IMAGES / "layouts_405b.svg")["panels"]
    for panel, column, error in ((one, 2, 0.051), (many, 5, 0.51)):
        predicted = [y for _, y in panel["curves"][1]["points"]]
        shown = [float(layouts[layout][column].split()[0]) for layout in panel["places"]]
        assert all(abs(cell - value) < error for cell, value in zip(shown, predicted, strict=True))


def test_a_picture_draws_its_data_and_keeps_them(tmp_path: Path) -> None:
    lines = (
        scaling_pictures.Curve("ours", "#000000", ((1.0, 1 / 3), (2.0, 0.5))),
        scaling_pictures.Curve("others", scaling_pictures.OTHERS, ((1.0, 2.0),), dashed=True),
    )
    bars = scaling_pictures.Panel("bars", "", "y", lines, places=("a", "b", "c"))
    panels = (scaling_pictures.Panel("lines", "x", "y", lines, band=(0.1, 0.2), log="xy"), bars)
    picture = scaling_pictures.Picture("both", "both kinds", 2, panels)
    left, right = scaling_pictures.figure(picture).axes
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in left.lines] == [
        ([1.0, 2.0], [1 / 3, 0.5]),
        ([1.0], [2.0]),
    ]
    assert [patch.get_height() for patch in right.patches] == [1 / 3, 0.5, 2.0]
    scaling_pictures.write({"both": picture}, tmp_path)
    kept = scaling_pictures.kept_data(tmp_path / "both.svg")
    assert kept["panels"][0]["curves"][0]["points"] == [[1.0, 0.33333], [2.0, 0.5]]
    assert kept == picture.data()
    again = (tmp_path / "both.svg").read_bytes()
    scaling_pictures.write({"both": picture}, tmp_path)
    assert (tmp_path / "both.svg").read_bytes() == again


def test_answers_and_tabled_sums() -> None:
    with pytest.raises(KeyError, match="AIConfigurator was not asked"):
        external_answers.answer("layouts", "batch", Layout(3, 1))
    sums = external_answers.sums("TensorRT-LLM", 8)
    own = sums_over_nodes.costs_on("h200-x4-ndr", load("NVIDIA H200"))
    costs = external_answers.TabledSums(own.link, own.network, 8, "TensorRT-LLM")
    assert costs.all_reduce(32 << 10, 8, 2).time_us == sums[32 << 10]
    between = costs.all_reduce(48 << 10, 8, 2).time_us
    assert math.isclose(between, (sums[32 << 10] + sums[64 << 10]) / 2)
    assert costs.all_reduce(1, 8, 2).time_us == min(sums[256], sums[min(sums)])
    assert costs.all_reduce(2 * max(sums), 8, 2).time_us > 1.5 * sums[max(sums)]


def test_tables_and_paragraphs() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |\n"
    with pytest.raises(ValueError, match="1 cells under a header of 2"):
        table(["a", "b"], [["1"]])
    assert max(map(len, paragraph("word " * 100).splitlines())) <= 118
    assert not re.search(r"^\|.*\|$", paragraph("word " * 3))
