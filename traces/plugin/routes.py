"""What TensorBoard asks the plugin for: the page's files, and runs, plans and rounds as the page needs them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import Request, Response

from specstream.traces.plugin import answers
from specstream.traces.run_reader import RunReader, find_runs

STATIC = Path(__file__).parent / "static"
TYPES = {".js": "text/javascript", ".css": "text/css"}
"""Of the page's files; nothing else is served."""


class SpecStreamPlugin(base_plugin.TBPlugin):
    """Serves the runs below TensorBoard's `--logdir`; everything is read when it is asked for."""

    plugin_name = "specstream"

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._logdir: str | None = context.logdir or None
        self._files = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.suffix in TYPES}
        self._readers: dict[Path, RunReader] = {}
        self._reading = Lock()  # TensorBoard asks from several threads

    def get_plugin_apps(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "/runs": self._json(lambda arguments: answers.runs(self._runs())),
            "/run": self._json(lambda arguments: answers.run(self._reader(arguments))),
            "/plan": self._json(lambda arguments: answers.plan(self._reader(arguments), _number(arguments, "plan"))),
            "/round": self._json(lambda arguments: answers.round(self._reader(arguments), _number(arguments, "round"))),
            "/static/*": Request.application(self._static),
        }

    def is_active(self) -> bool:
        """Whether there is a run."""
        return bool(self._runs())

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        # What is on the screen stays when other tabs reload; the page has a button of its own.
        return base_plugin.FrontendMetadata(
            es_module_path="/static/index.js", tab_name="SpecStream", disable_reload=True
        )

    def _runs(self) -> dict[str, Path]:
        return find_runs(self._logdir) if self._logdir else {}

    def _reader(self, arguments: Mapping[str, str]) -> RunReader:
        name, runs = arguments.get("run", ""), self._runs()
        if name not in runs:
            raise KeyError(f"there is no run {name!r} in {self._logdir}; there are: {', '.join(runs) or 'none'}")
        path = runs[name]
        if path not in self._readers or not self._readers[path].is_current():
            self._readers[path] = RunReader(path)
        return self._readers[path]

    def _json(self, answer: Callable[[Mapping[str, str]], Any]) -> Callable[..., Any]:
        """A route that answers in JSON; with 404 and what is wrong where there is nothing, with 400 for bad files."""

        def respond(request: Request) -> Response:
            try:
                with self._reading:
                    content, code = answer(request.args), 200
            except (KeyError, FileNotFoundError) as error:
                content, code = {"error": str(error.args[0] if isinstance(error, KeyError) else error)}, 404
            except ValueError as error:
                content, code = {"error": str(error)}, 400
            text = json.dumps(content, separators=(",", ":"), allow_nan=False)
            response: Response = http_util.Respond(request, text, "application/json", code=code)
            return response

        return Request.application(respond)

    def _static(self, request: Request) -> Response:
        path = self._files.get(request.path.partition("/static/")[2])
        found, kind, code = (path.read_bytes(), TYPES[path.suffix], 200) if path else (b"not found", "text/plain", 404)
        response: Response = http_util.Respond(request, found, kind, code=code)
        return response


def _number(arguments: Mapping[str, str], name: str) -> int:
    try:
        return int(arguments.get(name, ""))
    except ValueError:
        raise ValueError(f"{name}: got {arguments.get(name)!r}; allowed: a whole number") from None
