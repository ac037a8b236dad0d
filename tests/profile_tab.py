"""A program: what torch-tb-profiler's own data API answers about a folder of runs, as JSON.

Its plugin is asked as a browser would ask it, without a browser. It reads files in processes of its own.
"""

from __future__ import annotations

import json
import sys
from threading import Event
from types import SimpleNamespace
from typing import Any

from torch_tb_profiler.plugin import TorchProfilerPlugin
from werkzeug.test import Client


def main(logdir: str) -> None:
    apps = TorchProfilerPlugin(SimpleNamespace(logdir=logdir)).get_plugin_apps()

    def ask(route: str, **query: str) -> Any:
        answer = Client(apps[route]).get("/", query_string=query)
        assert answer.status_code == 200, (route, query, answer.text)
        return answer.json

    while not ask("/runs")["runs"] or ask("/runs")["loading"]:
        Event().wait(0.05)
    found: dict[str, Any] = {}
    for run in ask("/runs")["runs"]:
        (worker,) = ask("/workers", run=run, view="Overview")
        for span in ask("/spans", run=run, worker=worker):
            asked = {"run": run, "worker": worker, "span": span}
            views = ask("/views", run=run)
            steps = ask("/overview", **asked, view="Overview")["steps"]["rows"]
            kernels = (
                ask("/kernel/table", **asked, view="Kernel", group_by="Kernel")["data"]["rows"]
                if "Kernel" in views
                else []
            )
            found.setdefault(run, []).append(
                {
                    "views": views,
                    # Of each step: its name, then the time of each kind and a text that shows it.
                    "steps": {row[0]: sum(row[1::2]) for row in steps},
                    "calls": {row[0]: row[2] for row in kernels},
                }
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
