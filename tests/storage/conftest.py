"""A stand-in for the Hadoop client."""

from __future__ import annotations

import pytest


@pytest.fixture
def fake_hdfs(tmp_path, monkeypatch):
    """A command ``hdfs`` that keeps ``hdfs://cluster/...`` in a local folder; returns that folder."""
    root = tmp_path / "cluster"
    root.mkdir()
    script = tmp_path / "bin" / "hdfs"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\n"
        "shift\n"  # the word dfs
        "verb=$1; shift\n"
        'while case "$1" in -f|-p|-e|-r|-C|-skipTrash|%b) true;; *) false;; esac; do shift; done\n'
        f"a=$(echo $1 | sed 's#hdfs://cluster#{root}#'); b=$(echo $2 | sed 's#hdfs://cluster#{root}#')\n"
        'case $verb in -mkdir) mkdir -p "$a";; -test) test -e "$a";; -get|-put|-cp) cp -r "$a" "$b";;\n'
        ' -ls) for f in "$a"/*; do if test -e "$f"; then echo "$f"; fi; done;; -cat) cat "$a";; -rm) rm -rf "$a";;\n'
        ' -stat) for f in "$@"; do stat -c %s "$(echo $f | sed "s#hdfs://cluster#'
        f"{root}"
        '#")"; done;; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    return root
