import pytest
from changelog import released, sections, with_entry, with_release
from packaging.version import Version

TEXT = """# Changelog

## Unreleased

- One entry
  on two lines.
- Another.

## 0.2.0 - 2026-01-02

### Added

- A thing.

### Removed

- Another thing.

## 0.1.0

- The first.
"""


def test_entries_are_read_by_version_with_their_continuation_lines():
    unreleased, second, first = sections(TEXT)
    assert unreleased.version is None
    assert unreleased.entries == ("One entry on two lines.", "Another.")
    assert (second.version, second.entries) == (Version("0.2.0"), ("A thing.", "Another thing."))
    assert (first.version, first.entries) == (Version("0.1.0"), ("The first.",))


def test_a_release_takes_the_unreleased_entries_and_leaves_an_empty_section():
    text = with_release(TEXT, Version("0.2.1"), "2026-02-03")
    unreleased, newest, *older = sections(text)
    assert unreleased.entries == ()
    assert (newest.version, newest.entries) == (Version("0.2.1"), sections(TEXT)[0].entries)
    assert older == sections(TEXT)[1:]
    assert "## Unreleased\n\n## 0.2.1 - 2026-02-03\n\n- One entry\n" in text


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        "# Changelog\n\n## Unreleased\n",
        TEXT.replace("- One", "### Fixed\n\n- One"),
        TEXT.replace("- One", "### Changed\n\n- One"),
    ],
)
def test_an_added_entry_is_the_first_under_changed_and_changes_no_other(text):
    added = with_entry(text, "Needs rl-core>=0.2.1,<0.3.")
    assert "### Changed\n\n- Needs rl-core>=0.2.1,<0.3.\n" in added
    assert added.count("### Changed") == 1
    before, after = sections(text), sections(added)
    assert sorted(after[0].entries) == sorted(["Needs rl-core>=0.2.1,<0.3.", *before[0].entries])
    assert after[1:] == before[1:]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("## Unreleased", "## Next", "the first section is not `## Unreleased`"),
        ("## 0.2.0 - 2026-01-02", "## 0.2.0, in January", "is not `## VERSION - YYYY-MM-DD`"),
        ("## 0.2.0 - 2026-01-02", "## 0.0.9", "section 0.1.0 is below section 0.0.9"),
        ("## 0.2.0 - 2026-01-02", "## 0.1.0", "section 0.1.0 is below section 0.1.0"),
    ],
)
def test_a_malformed_changelog_is_refused_by_its_heading(old, new, message):
    with pytest.raises(ValueError, match=message):
        released(TEXT.replace(old, new))
