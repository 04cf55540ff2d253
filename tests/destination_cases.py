"""What the tests of conversions' destinations share."""

import os


def names(path):
    return sorted(os.listdir(path))


def visible(folder, name):
    """Return the texts of the files of one name below a folder, but for those in hidden directories."""
    found = [path for path in folder.rglob(name) if not any(part.startswith(".") for part in path.parts)]
    return [path.read_text() for path in found]
