"""The files for people who report, contribute and cite: forms, citation, release rules."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from horovod_runner import __version__

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FORMS = sorted(ROOT.glob(".github/ISSUE_TEMPLATE/[!c]*.yml"))  # without config.yml


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_what_the_issue_tracker_requires(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in asked)
    ids = [field["id"] for field in asked]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", ["bug", "tried"])
def test_reports_ask_for_what_the_doctor_finds(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    (field,) = (field for field in form["body"] if field.get("id") == "doctor")
    assert "horovod-runner doctor --json" in field["attributes"]["label"]
    assert field["validations"]["required"]


def test_the_citation_is_of_this_version_and_names_no_person() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert {*citation} >= {"cff-version", "message", "title", "authors"}
    assert citation["authors"] == [{"name": "The horovod_runner developers"}]


def test_the_security_contact_is_a_placeholder() -> None:
    addresses = re.findall(r"\S+@\S+", (ROOT / "SECURITY.md").read_text())
    assert addresses
    assert all(address.endswith(".example") for address in addresses)


# Versions that were published with malicious code, or that run code which is in the data they read.
_REFUSED = {
    # GHSA-w37p-236h-pfx3: both were uploaded by an attacker, and steal credentials when imported.
    "lightning": ["2.6.2", "2.6.3"],
    # CVE-2023-47248: a Parquet or Arrow file can run code.
    "pyarrow": ["13.0.0", "14.0.0"],
}


def test_no_extra_admits_a_version_that_is_known_to_do_harm() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].splitlines()
    for extra in setup["options.extras_require"].values():
        lines += extra.splitlines()
    wanted = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    assert {each.name for each in wanted} >= {*_REFUSED}
    for each in wanted:
        assert not list(each.specifier.filter(_REFUSED.get(each.name, []))), each


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "RELEASING.md"])
def test_files_and_targets_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)`", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for name in re.findall(r"`((?:tests|docs|examples|benchmarks|docker)/[\w/.-]+\.\w+)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"^\| \d+ \| (.*?) \|", text, re.MULTILINE):  # of the tour
        parts = re.findall(r"`([\w/]+(?:\.py|/))`", name)
        folder = (ROOT / "horovod_runner" / parts[0]).parent
        assert all(
            (ROOT / "horovod_runner" / part).exists() or (folder / part).exists() for part in parts
        ), name
