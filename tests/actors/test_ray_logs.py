"""What is quoted of Ray's logs when it does not start."""

from __future__ import annotations

from pathlib import Path

from kvcluster.actors.ray_view import errors_in_logs, with_errors

GCS = """[2026-01-01 00:00:00,000 I 7 7] (gcs_server) gcs_server_main.cc:98: Ray cluster metadata ray_version=2.60.0
[2026-01-01 00:00:00,001 W 7 7] (gcs_server) event.cc:1: a warning
[2026-01-01 00:00:00,002 C 7 7] (gcs_server) gcs_server.cc:951: Unsupported GCS storage type: nonsense
*** StackTrace Information ***
/ray/gcs/gcs_server(+0x2b4c66) [0x56279f2a1c66] main
"""
AGENT = """Traceback (most recent call last):
  File "agent.py", line 1, in <module>
OSError: [Errno 98] Address already in use
"""


def logged(folder: Path, **texts: str) -> Path:
    logs = folder / "session_latest" / "logs"
    logs.mkdir(parents=True)
    for name, text in texts.items():
        (logs / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def test_errors_are_quoted_once_with_the_name_of_their_log(tmp_path: Path) -> None:
    folder = logged(tmp_path, gcs_server__out=GCS, gcs_server__err=GCS, dashboard_agent__err=AGENT, raylet__out="")
    assert errors_in_logs(folder).splitlines() == [
        "dashboard_agent: OSError: [Errno 98] Address already in use",
        "gcs_server: gcs_server.cc:951: Unsupported GCS storage type: nonsense",
    ]


def test_of_many_the_last_are_quoted_and_of_long_lines_the_beginning(tmp_path: Path) -> None:
    folder = logged(tmp_path, raylet__out="\n".join(f"[now E 1 1] (raylet) {n} {'x' * 1000}" for n in range(50)))
    lines = errors_in_logs(folder).splitlines()
    assert [line.split()[1] for line in lines] == [str(n) for n in range(44, 50)]
    assert max(map(len, lines)) < 320


def test_without_logs_the_problem_stands_alone(tmp_path: Path) -> None:
    assert with_errors("no Ray", tmp_path) == "no Ray"
    logged(tmp_path, raylet__out="[now E 1 1] (raylet) a.cc:1: no room\n")
    assert with_errors("no Ray", tmp_path) == "no Ray; in its logs:\nraylet: a.cc:1: no room"
