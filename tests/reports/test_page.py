"""The page of a report: its contents, and that it opens offline."""

import html
import json
import os
import re
import shutil
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import (
    CONFIG,
    draw_only,
    read_table,
    with_changes,
    without_accuracy,
    write_run,
    write_table,
)

from pl_fed.reports import page, tables
from pl_fed.reports.group import group_runs
from pl_fed.reports.run import find_runs, read_run

pytestmark = pytest.mark.slow

VOID = {"meta", "img", "br", "link", "input"}
ATTACK = {"class_path": "pl_fed.attacks.RandomLabels"}


class Reader(HTMLParser):
    """Reads a page, and sees that every element is closed in its turn."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.tags, self.cells, self.labels = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.cells.append([])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open[-1:] == ["title"]:
            self.labels.append((self.open[-2], data))
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1].append(data)

    def attributes_of_tag(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def write_page(folder, *descriptions, skipped=()):
    """Write runs, given by changes of the config and by results, and a page; return its path."""
    for number, (changes, results) in enumerate(descriptions):
        write_run(folder / "runs" / f"run{number}", with_changes(changes), **results)
    runs, _ = find_runs([folder / "runs"])
    return page.write(runs, folder / "out", skipped)


TWO_SEEDS = [({"seed_everything": seed}, {"accuracy": (0.5, 0.25 * seed)}) for seed in (1, 2)]
OTHERS = [
    (
        {"federation.adversary.attack": ATTACK, "federation.adversary.fraction": 0.25},
        {"byzantine": [1]},
    ),
    ({"model.init_args.lam": 1.0}, {"tested": False, "rounds": 3, "extra": {"train/forged": 1}}),
]


@pytest.fixture(scope="module")
def shared_page(tmp_path_factory):
    """The path of a page about four runs, shared because pictures take seconds."""
    return write_page(tmp_path_factory.mktemp("page"), *TWO_SEEDS, *OTHERS)


@pytest.fixture
def undrawn(monkeypatch):
    """Leaves the pictures out of pages, which take a second each, for tests of their texts."""
    chapters = page._pictures
    monkeypatch.setattr(page, "_pictures", lambda groups: dict.fromkeys(chapters(groups), ()))


without_pictures = pytest.mark.usefixtures("undrawn")


def test_page_opens_offline(shared_page):
    text = shared_page.read_text(encoding="utf-8")
    reader = Reader(text)
    tags = {tag for tag, _ in reader.tags}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form", "img"}
    for _, attributes in reader.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert not attributes.keys() & {"src", "srcset", "data", "action"}
        assert "xlink:href" not in attributes
        assert not re.search(r"url\((?!#)|https?:|//", attributes.get("style", ""))
    assert all(use["href"].startswith("#") for use in reader.attributes_of_tag("use"))
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert not re.search(r"https?://", text)
    (policy,) = [
        tag_attributes
        for tag_attributes in reader.attributes_of_tag("meta")
        if "http-equiv" in tag_attributes
    ]
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_links_have_targets(shared_page):
    reader = Reader(shared_page.read_text(encoding="utf-8"))
    places = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(places) == len(set(places))
    links = [attributes["href"] for attributes in reader.attributes_of_tag("a")]
    for link in links:
        assert link[1:] in places if link.startswith("#") else (shared_page.parent / link).is_file()
    chapters = {link for link in links if link.startswith("#")}
    assert {"#runs", "#classes", "#robustness", "#uploads", "#configs"} <= chapters


def test_each_picture_has_a_description_and_files(shared_page):
    path = shared_page
    reader = Reader(path.read_text(encoding="utf-8"))
    names = [figure["id"].removeprefix("picture-") for figure in reader.attributes_of_tag("figure")]
    pictures = reader.attributes_of_tag("svg")
    assert len(names) == len(pictures) == 12
    assert all(picture["role"] == "img" for picture in pictures)
    assert len([text for tag, text in reader.labels if tag == "svg" and len(text) > 30]) == 12
    for name in names:
        assert (path.parent / f"{name}.png").stat().st_size > 2000
        assert read_table(path.parent / f"{name}.csv")
    assert len(read_table(path.parent / "runs.csv")) == 4


def test_report_replaces_a_previous_report(shared_page, tmp_path, monkeypatch):
    """It removes all files of the previous report, and no others."""
    draw_only(monkeypatch, "Training loss")
    folder = shutil.copytree(shared_page.parent, tmp_path / "out")
    assert (folder / "uploads.png").is_file()
    for name in ("mine.png", "uploads_mine.csv"):
        (folder / name).write_text("mine")
    run = read_run(shared_page.parents[1] / "runs" / "run0")
    own = [path.name for path in page.write([run], tmp_path / "alone").parent.iterdir()]
    page.write([run], folder)
    assert {path.name for path in folder.iterdir()} == {*own, "mine.png", "uploads_mine.csv"}


def test_tables_have_the_results_and_settings_of_the_runs(shared_page):
    reader = Reader(shared_page.read_text(encoding="utf-8"))
    rows = {tuple(cells) for cells in reader.cells}
    by_name = {row[:3]: row for row in rows}
    group = by_name["1", "Ditto, lam=0.1 (2 seeds)", "personal"]
    assert group[3:] == (
        "0.4375 ± 0.0884",
        "0.0625 ± 0.0884",
        "0.3750 ± 0.1768",
        "0.5000 ± 0.0000",
        "0.1250 ± 0.0000",
    )
    result = ("run0, seed 1", "personal", "0.3750", "0.1250", "0.2500", "0.5000", "0.1250")
    assert ("1", *result) in rows, "folded below the table"
    attacked = ("2", "Ditto, lam=0.1, RandomLabels, fraction=0.25", "4", "RandomLabels", "0.25")
    assert attacked in rows, "only settings that differ are columns"
    assert ("2", "run2", "0", "4", "stacked", "2.0 s") in {tuple(filter(None, row)) for row in rows}
    facts = [text for text in reader.texts if text in ("net", "MLP", "cohort", "Digits")]
    assert facts[:4] == ["net", "MLP", "Digits", "cohort"], "all runs share them"
    (differences,) = [cells for cells in reader.cells if "seed_everything" in cells]
    assert sorted(differences) == [
        "federation.adversary.attack",
        "federation.adversary.fraction",
        "model.lam",
        "run",
        "seed_everything",
    ]
    assert not {"RandomLabels", "–", "0", "0.25"} - {cell for row in rows for cell in row}


@without_pictures
def test_page_names_unfinished_and_skipped_runs(tmp_path):
    path = write_page(tmp_path, *OTHERS, skipped=["elsewhere/run: only evaluated, not a fit."])
    text = "".join(Reader(path.read_text(encoding="utf-8")).texts)
    assert "Unfinished runs, shown with their results so far: run1." in text
    assert "Not shown: elsewhere/run: only evaluated, not a fit." in text
    assert "All numbers are over benign clients; Byzantine clients are left out." in text
    assert {row["state"] for row in read_table(path.parent / "runs.csv")} == {"", "unfinished"}


@without_pictures
def test_page_of_a_run_without_results_says_so(tmp_path):
    path = write_page(tmp_path, ({}, {"tested": False, "rounds": 1}))
    reader = Reader(path.read_text(encoding="utf-8"))
    assert "No run has test results." in reader.texts
    assert "1 of 4" in reader.texts


@without_pictures
def test_run_of_all_rounds_without_a_test_is_finished(tmp_path):
    path = write_page(tmp_path, ({}, {"tested": False}))
    assert "Unfinished" not in path.read_text(encoding="utf-8")
    (row,) = read_table(path.parent / "runs.csv")
    assert (row["state"], row["rounds"]) == ("", "4")


@without_pictures
def test_page_names_runs_without_results_by_class(tmp_path):
    path = write_page(tmp_path, ({}, {"classes": False}))
    reader = Reader(path.read_text(encoding="utf-8"))
    assert "Not shown here, without per_class.csv: run0." in reader.texts


def test_page_names_runs_without_accuracy_beside_runs_with_accuracy(tmp_path, monkeypatch):
    draw_only(monkeypatch, page._SPREAD, page._CLIENTS)
    for name in ("classes", "values"):
        write_run(tmp_path / name)
    without_accuracy(tmp_path / "values")

    def chapters_with_note(*names):
        path = page.write([read_run(tmp_path / name) for name in names], tmp_path / "out")
        chapters = path.read_text(encoding="utf-8").split('<section id="')
        return {
            text.partition('"')[0]: "Not shown here, without test accuracy: values." in text
            for text in chapters
        }

    together = chapters_with_note("classes", "values")
    assert [name for name, has_note in together.items() if has_note] == [
        "mean-against-spread",
        "clients",
    ]
    assert not any(chapters_with_note("values").values()), "their losses are shown"


def test_error_while_drawing_leaves_the_previous_report(shared_page, tmp_path, monkeypatch):
    folder = shutil.copytree(shared_page.parent, tmp_path / "out")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def fails(groups):
        raise RuntimeError

    monkeypatch.setattr(page.times, "draw_round_times", fails)
    with pytest.raises(RuntimeError):
        page.write([read_run(shared_page.parents[1] / "runs" / "run0")], folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@without_pictures
def test_folder_with_an_undecodable_name_is_escaped(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    path = page.write([read_run(write_run(folder))], tmp_path / "out")
    assert "caf\\udce9" in path.read_text(encoding="utf-8")
    (row,) = read_table(path.parent / "runs.csv")
    assert row["run"] == "caf\\udce9"


@without_pictures
def test_run_without_config_has_no_defence_in_the_table(tmp_path):
    folder = write_run(tmp_path / "mine")
    (folder / "config.yaml").unlink()
    text = page.write([read_run(folder)], tmp_path / "out").read_text(encoding="utf-8")
    assert "<h1>1 run: mine</h1>" in text
    (row,) = read_table(tmp_path / "out" / "runs.csv")
    assert (row["defence"], row["byzantine"]) == ("–", "0"), "as in per_client.csv"


@without_pictures
def test_run_without_config_and_results_has_unknown_settings_in_the_table(tmp_path):
    folder = write_run(tmp_path / "mine", tested=False)
    (folder / "config.yaml").unlink()
    page.write([read_run(folder)], tmp_path / "out")
    (row,) = read_table(tmp_path / "out" / "runs.csv")
    assert {row[name] for name in ("clients", "byzantine", "attack", "defence")} == {"–"}
    assert row["state"] == "", "no file says that it is unfinished"


@without_pictures
def test_page_has_complete_configs(tmp_path):
    path = write_page(tmp_path, ({"federation.adversary.attack": ATTACK}, {}))
    text = path.read_text(encoding="utf-8")
    (config,) = re.findall(r"<details>.*?<pre>(.*?)</pre></details>", text, flags=re.DOTALL)
    assert "class_path: pl_fed.attacks.RandomLabels" in html.unescape(config)
    assert "cohort_size: 3" in config


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_values_of_a_config_add_no_markup(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    config = with_changes({"data.dataset": {"class_path": "a.Npz", "init_args": {"path": text}}})
    runs = [read_run(write_run(folder / "a", config)), read_run(write_run(folder / "b"))]
    groups = group_runs(runs)
    for table in (
        tables.render_constants,
        tables.render_runs,
        tables.render_results,
        tables.render_differences,
        tables.render_configs,
    ):
        reader = Reader(table(groups))
        allowed = {"div", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre"}
        allowed |= {"span", "dl", "dt", "dd", "strong"}
        assert {tag for tag, _ in reader.tags} <= allowed
    rendered = "".join(Reader(tables.render_differences(groups)).texts)
    assert text in rendered


def test_markup_in_names_is_escaped(tmp_path):
    odd = '<script>alert("&")</script>'
    config = with_changes({"model.class_path": f"a.{odd}", "model.init_args.lam": odd})
    runs = [read_run(write_run(tmp_path / name, changes), f"{odd}{name}")
            for name, changes in (("a", config), ("b", CONFIG))]  # fmt: skip
    text = page.write(runs, tmp_path / "out", [odd]).read_text(encoding="utf-8")
    assert "<script" not in text
    reader = Reader(text)
    assert odd in "".join(reader.texts)
    assert any(odd in text for tag, text in reader.labels if tag == "svg")


def test_same_runs_give_the_same_page(shared_page, tmp_path):
    runs, _ = find_runs([shared_page.parents[1] / "runs"])
    assert page.write(runs, tmp_path / "again").read_bytes() == shared_page.read_bytes()


@without_pictures
def test_page_has_the_guarantee_of_each_private_run(tmp_path):
    statement = "Privacy: ε = 3 at δ = 0.0123 after 4 rounds. It covers the global models."
    folder = write_run(tmp_path / "private", with_changes({}), extra={"privacy/epsilon": 3})
    (folder / "summary.json").write_text(json.dumps({"privacy": statement}))
    write_run(tmp_path / "plain", with_changes({"model.init_args.lam": 0.5}))
    runs, _ = find_runs([tmp_path])
    text = page.write(runs, tmp_path / "out").read_text(encoding="utf-8")
    assert text.count(html.escape(statement)) == 1
    assert f"private: {html.escape(statement)}" in text


@without_pictures
@pytest.mark.parametrize("seeds", [(None, None), (1, 2), (1, 1)], ids=str)
def test_private_runs_add_up_unless_they_share_their_noise(tmp_path, seeds):
    for number, seed in enumerate(seeds):
        config = with_changes({})
        config["federation"]["privacy"] = {"delta": 0.01 * (number + 1), "noise_seed": seed}
        write_run(tmp_path / str(number), config, extra={"privacy/epsilon": 3})
    runs, _ = find_runs([tmp_path])
    text = html.unescape(page.write(runs, tmp_path / "out").read_text(encoding="utf-8"))
    assert ("together have ε = 6 at δ = 0.03" in text) == (seeds != (1, 1))
    assert ("together they have no guarantee" in text) == (seeds == (1, 1))


@pytest.mark.parametrize("cohort", [7, "broken"])
def test_table_has_the_expected_cohort(tmp_path, cohort):
    folder = write_run(tmp_path / "run", with_changes({}), extra={"train/cohort": 3})
    (folder / "summary.json").write_text(json.dumps({"counts": {"cohort": cohort}}))
    run = read_run(folder)
    (group,) = group_runs([run])
    assert tables.describe_run(group, run)["cohort"] == ("7" if cohort == 7 else "3")


def test_table_has_durations_in_words():
    config = with_changes({"trainer.max_epochs": 400})

    def duration(seconds, tmp):
        run = read_run(write_run(tmp, config, rounds=1, extra={"time/round": seconds}))
        (group,) = group_runs([run])
        return tables.describe_run(group, run)["time of rounds"]

    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        durations = [duration(s, Path(folder) / str(s)) for s in (0.24, 59, 61, 3599, 3601, 9000)]
    assert durations == ["0.2 s", "59.0 s", "1 min", "1 h 0 min", "1 h 0 min", "2 h 30 min"]


def with_rounds(folder, rounds):
    """Write each client's number of rounds."""
    table = read_table(folder / "per_client.csv")
    write_table(folder / "per_client.csv", [{**r, "rounds": n} for r, n in zip(table, rounds)])
    return folder


@without_pictures
@pytest.mark.parametrize("models", [("global", "personal"), ("global",)])
def test_page_counts_clients_that_never_took_part_if_models_are_personal(tmp_path, models):
    folder = write_run(tmp_path / "mine", byzantine=[1], models=models)
    runs = [read_run(with_rounds(folder, [0, 0, 5, 0])), read_run(write_run(tmp_path / "old"))]
    texts = Reader(page.write(runs, tmp_path / "out").read_text(encoding="utf-8")).texts
    notes = [text for text in texts if text.startswith("Benign clients that never took part: ")]
    assert len(notes) == ("personal" in models)
    assert all("part: 2 of 3 in mine. Personal models" in text for text in notes)


def test_metrics_on_the_servers_samples_have_a_row_and_a_picture(tmp_path, monkeypatch):
    draw_only(monkeypatch, "Validation over rounds")
    folder = write_run(tmp_path / "mine", extra={"val/central/accuracy": 0.4})
    table = read_table(folder / "metrics.csv")
    last = {"test/central/accuracy": 0.375, "test/central/class_std": 0.1}
    changed = {"test/global/accuracy_weighted": 0.75}
    write_table(folder / "metrics.csv", [*table[:-1], {**table[-1], **last, **changed}])
    out = page.write([read_run(folder)], tmp_path / "out")
    reader = Reader(out.read_text(encoding="utf-8"))
    (header,) = [cells for cells in reader.cells if "over all samples" in cells]
    (server,) = [cells for cells in reader.cells if "global, on the server's samples" in cells]
    values = dict(zip(header[header.index("model") :], server[server.index(_SERVER) :]))
    assert values["over all samples"] == "0.3750"
    assert values["mean over clients"] == "–"
    assert "class_std" not in header
    assert (out.parent / "curves_central.csv").is_file()


_SERVER = "global, on the server's samples"


def test_page_names_runs_that_the_robustness_chapter_excludes(shared_page):
    reader = Reader(shared_page.read_text(encoding="utf-8"))
    assert "Not shown here: 3 Ditto, lam=1 (no test results)." in reader.texts


def test_names_of_models_cannot_add_markup_or_leave_the_folder(tmp_path):
    """Names of models come from files of unknown origin, and become parts of file names."""
    odd = ('"><img src=x onerror=1>', "..", "a b", "a_b", "x" * 130)
    path = page.write([read_run(write_run(tmp_path / "run", models=odd))], tmp_path / "out")
    reader = Reader(path.read_text(encoding="utf-8"))
    assert not [image for image in reader.attributes_of_tag("img") if "onerror" in image]
    places = [figure["id"] for figure in reader.attributes_of_tag("figure")]
    assert len(places) == len(set(places))
    assert all(re.fullmatch(r"[\w-]+", p) for p in places)
    files = [
        link["href"] for link in reader.attributes_of_tag("a") if not link["href"].startswith("#")
    ]
    assert files
    assert all((path.parent / file).is_file() for file in files)
    assert {link.parent for link in tmp_path.rglob("*.png")} == {path.parent}


def test_results_have_a_column_for_a_number_that_the_user_logs(tmp_path):
    write_run(tmp_path / "a")
    *rounds, test = read_table(tmp_path / "a" / "metrics.csv")
    write_table(tmp_path / "a" / "metrics.csv", [*rounds, {**test, "test/personal/gini": 0.0625}])
    text = tables.render_results(group_runs(find_runs([tmp_path])[0]))
    assert "gini" in text
    assert "0.0625" in text


def test_pictures_show_as_many_groups_as_there_are_kinds_of_lines(tmp_path, monkeypatch):
    draw_only(monkeypatch, page._CLIENTS)
    monkeypatch.setattr(page, "_MAX_DRAWN", 2)
    for lam in (1, 2, 3):
        write_run(tmp_path / f"run{lam}", with_changes({"model.init_args.lam": lam}))
    text = page.write(find_runs([tmp_path])[0], tmp_path / "out").read_text(encoding="utf-8")
    assert "Pictures show the first 2 of 3 groups" in text
    rows = read_table(tmp_path / "out" / "clients_personal.csv")
    assert {row["group"] for row in rows} == {"1", "2"}
    assert {row["run"] for row in read_table(tmp_path / "out" / "runs.csv")} == {
        "run1",
        "run2",
        "run3",
    }


def test_repeated_runs_of_one_seed_are_named(tmp_path):
    for number in range(3):
        write_run(tmp_path / f"run{number}", with_changes({"seed_everything": number // 2}))
    groups = group_runs(find_runs([tmp_path])[0])
    (note,) = [text for text in page._notes(groups, []) if text.startswith("Repeated runs")]
    assert "1 Ditto (3 runs of 2 seeds). Means" in note
    groups = group_runs(find_runs([tmp_path / "run1", tmp_path / "run2"])[0])
    assert not any(text.startswith("Repeated runs") for text in page._notes(groups, []))
