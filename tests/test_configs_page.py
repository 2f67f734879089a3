"""configs/README.md has a line for each config, from the comment at its top."""

import runpy

from pages import ROOT

SCRIPT = runpy.run_path(str(ROOT / ".ci" / "docs" / "configs_page.py"))


def test_page_is_up_to_date():
    """The test fails after a change of a config: run python .ci/docs/configs_page.py."""
    assert (ROOT / "configs" / "README.md").read_text() == SCRIPT["page"]()


def test_summary_is_the_first_sentence_of_the_comment(tmp_path):
    config = tmp_path / "x.yaml"
    comment = (
        "# FedX (A et al. 2020), on top of any other config: a sentence that\n"
        "# is long enough to say everything about FedX. More.\n"
    )
    config.write_text(f"# python -m pl_fed fit\n#\n{comment}model: null\n# no comment of the top\n")
    assert SCRIPT["summary_of"](config) == (
        "FedX (A et al. 2020): a sentence that is long enough to say everything about FedX."
    )
    config.write_text("# python -m pl_fed fit\n#\n# FedX. Short. For any data:\nmodel: null\n")
    assert SCRIPT["summary_of"](config) == "FedX. Short. For any data"
