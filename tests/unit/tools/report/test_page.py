"""The files of a report."""

import base64
import csv
import os
from html.parser import HTMLParser
from io import BytesIO

import pytest
from PIL import Image

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.tools.report.figures import learning_curves
from hts_torchrl.tools.report.groups import grouped
from hts_torchrl.tools.report.page import improvement_table, write_report
from hts_torchrl.tools.report.run_folder import Run

PONG = {"class_path": "hts_torchrl.AtariEnvs", "init_args": {"game": "pong"}}
PICTURES = ["score.png", "training_return.png", "waiting.png"]
TABLES = ["groups.csv", "improvement.csv", "report.csv", "settings.csv"]


class Page(HTMLParser):
    """Tags that are open at the end, all text, and what pictures refer to."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.sources = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        assert "href" not in named
        if "src" in named:
            self.sources.append(named["src"])
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def output(tmp_path):
    return tmp_path / "made" / "report"


def test_is_one_page_with_its_pictures_in_it(write_run, output):
    evil = "<script>alert(1)</script>"
    train = [{"train/frames": 1, "train/minutes": 1, "episode/return": 3, "wait/actors": 0.4}]
    folders = [write_run(f"{seed}", [1, 2], seed=seed, name=evil, rows=train) for seed in (1, 2)]
    told = write_report(folders, output)
    assert told == [("report", str(output / "report.html"))]
    assert sorted(path.name for path in output.iterdir()) == sorted(
        [*PICTURES, *TABLES, "report.html"]
    )
    text = (output / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert evil in page.texts
    assert "<script" not in text
    assert len(page.sources) == 3
    for source, name in zip(page.sources, PICTURES, strict=True):
        picture = base64.b64decode(source.removeprefix("data:image/png;base64,"))
        assert picture == (output / name).read_bytes()
        assert Image.open(BytesIO(picture)).width == 1200


def test_has_a_row_for_each_run_and_each_group(write_run, output):
    good = [write_run(f"g{seed}", [0, 10 * seed], seed=seed, name="good") for seed in range(1, 9)]
    bad = [write_run(f"b{seed}", [9, seed], seed=seed, name="bad") for seed in (1, 2)]
    write_report([*good, *bad], output)
    runs = rows(output / "report.csv")
    assert [row["score"] for row in runs[:2]] == ["10.0", "20.0"]
    assert [row["best_score"] for row in runs[-2:]] == ["9.0", "9.0"]
    assert {(row["frames"], row["minutes"]) for row in runs} == {("200", "2.0")}
    first, second = rows(output / "groups.csv")
    assert (first["group"], first["runs"], first["seeds"]) == ("good", "8", "1 2 3 4 5 6 7 8")
    assert float(first["score_iqm"]) == (30 + 40 + 50 + 60) / 4
    assert float(first["score_low"]) < 45 < float(first["score_high"])
    assert (second["score_least"], second["score_most"]) == ("1.0", "2.0")
    (pair,) = rows(output / "improvement.csv")
    assert (pair["group"], pair["over"], pair["probability"]) == ("good", "bad", "1.0")


def test_a_run_that_is_left_out_is_named_in_a_warning_and_on_the_page(write_run, output, tmp_path):
    write_run("all/a", [1])
    write_run("all/b", [])
    told = write_report([tmp_path / "all"], output)
    text = f"{tmp_path}/all/b has no finished evaluation: it is left out"
    assert told[0] == ("warning", text)
    assert text in (output / "report.html").read_text()


def test_tells_which_runs_are_one_curve(write_run, output):
    stopped, resumed = write_run("a", [1, 2]), write_run("b", [3], begin=1)
    notes = [text for _, text in write_report([stopped, resumed], output)]
    assert f"{resumed} continues {stopped}: one curve" in notes
    assert [row["folder"] for row in rows(output / "report.csv")] == [str(resumed)]


def test_tells_what_makes_a_comparison_weak(write_run, output):
    short = write_run("short", [1, 2], name="short")
    text = (short / "config.yaml").read_text().replace("total_frames: 200", "total_frames: 900")
    (short / "config.yaml").write_text(text)
    notes = [text for _, text in write_report([short, write_run("p", [1], env=PONG)], output)]
    assert notes[0].startswith("2 environments (GymEnvs(CartPole-v1), AtariEnvs(pong)): ")
    assert "none is normalised" in notes[0]
    assert notes[1] == "one run has no interval: short, mine"
    assert notes[2] == f"not evaluated at the end of its total_frames: {short}"
    assert notes[2] in Page((output / "report.html").read_text()).texts


def test_shows_names_in_pictures_as_they_are_written(write_run, output):
    names = ["_mine", "$x^$", r"$\frac$", "a_b$c"]
    folders = [write_run(str(place), [1, 2], name=name) for place, name in enumerate(names)]
    write_report(folders, output)
    groups = grouped([Run.read(folder) for folder in folders])
    legend = learning_curves(groups, "evaluations").axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [f"{name} (1 run)" for name in names]


@pytest.mark.parametrize(("scores", "marker"), [([1], "o"), ([1, 2], "None")])
def test_a_single_evaluation_is_a_dot(scores, marker, write_run):
    groups = grouped([Run.read(write_run("a", scores))])
    (line,) = learning_curves(groups, "evaluations").axes[0].lines
    assert line.get_marker() == marker


def test_compares_no_scores_of_different_environments(write_run):
    folders = [
        write_run(f"{name}{seed}", [1], seed=seed, name=name, env=env)
        for name, env in (("a", PONG), ("b", {"class_path": "Own"}))
        for seed in (1, 2)
    ]
    groups = grouped([Run.read(folder) for folder in folders])
    assert [group.environment for group in groups] == ["AtariEnvs(pong)", "Own"]
    assert improvement_table(groups).empty


def test_names_the_settings_that_differ(write_run, output):
    write_report([write_run("a", [1]), write_run("b", [1], clip=0.3)], output)
    assert rows(output / "settings.csv") == [
        {"group": "mine, clip=0.1", "setting": "model.init_args.clip", "value": "0.1"},
        {"group": "mine, clip=0.3", "setting": "model.init_args.clip", "value": "0.3"},
    ]


def test_a_folder_that_cannot_be_made_is_named(write_run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"--output=.*file: "):
        write_report([write_run("a", [1])], tmp_path / "file")


def test_a_folder_whose_name_is_no_text_is_shown_with_escapes(write_run, output):
    folder = write_run(os.fsdecode(b"latin-\xfc"), [1.0])
    write_report([folder], output)
    assert r"latin-\udcfc" in (output / "report.html").read_text()
    assert rows(output / "report.csv")[0]["folder"].endswith(r"latin-\udcfc")
