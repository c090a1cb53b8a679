"""What the page's server answers: the page's files, and one function per question."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from verl.errors import DataError, VerlError, suggest
from verl.serving import ApiError, BrowserAccess, Handle, HttpRequest, HttpResponse, Server, secret
from verl.viewer.export import FORMATS, as_file
from verl.viewer.groups import groups_of, steps_of
from verl.viewer.questions import NoSuchThing, Question, Row, error_answer, json_answer
from verl.viewer.run import ViewedRun, setting_rows

PAGE = Path(__file__).parent / "page"
Answering = Callable[[Question], Row | HttpResponse]  # a response: a file, or that nothing has changed
TABLES = {"runs": "runs", "steps": "steps", "config": "rows", "events": "events", "gantt": "spans", "system": "roles"}
"""Questions whose answer is exported as it is -> the list of its rows."""


@dataclass
class Curves:
    """Which curves a question is about; iterating gives the number of a run, the run, and a metric.

    Of several runs one may lack a metric, as a critic's.

    Raises:
        DataError: none of the runs has logged one of them.
    """

    runs: dict[int, ViewedRun]
    names: list[str]
    x: str
    since: float

    def __post_init__(self) -> None:
        logged = list(dict.fromkeys(name for run in self.runs.values() for name in run.log.names))
        for name in self.names:
            if name not in logged:
                raise DataError("no run has logged this metric", key="metric", got=name, fix=suggest(name, logged))

    def __iter__(self) -> Iterator[tuple[int, ViewedRun, str]]:
        for number, run in self.runs.items():
            yield from ((number, run, name) for name in self.names if name in run.log.names)


class Api:
    """The questions about some runs.

    Args:
        runs: in the order in which requests number them.
    """

    def __init__(self, runs: list[ViewedRun]):
        self.runs = runs
        self.questions: Mapping[str, Answering] = {
            "runs": self.list_runs, "metrics": self.metrics, "curves": self.curves, "config": self.config,
            "events": self.events, "steps": self.steps, "groups": self.groups, "samples": self.samples,
            "sample": self.sample, "prompt": self.prompt, "gantt": self.gantt, "system": self.system,
            "export": self.export,
        }  # fmt: skip

    def _run(self, text: str) -> ViewedRun:
        if not text.isdecimal() or len(text) > 6 or int(text) >= len(self.runs):
            raise NoSuchThing("no such run", key="run", got=text, allowed=f"0 to {len(self.runs) - 1}")
        return self.runs[int(text)]

    def list_runs(self, question: Question) -> Row:
        """The runs, their state, and what could not be read of them."""
        question.end()
        return {"runs": [{"run": i, **run.refresh(samples=True).about()} for i, run in enumerate(self.runs)]}

    def metrics(self, question: Question) -> Row:
        """Names of metrics by group."""
        run = self._run(question.text("run", "0"))
        question.end()
        return {"groups": run.refresh().log.groups()}

    def curves(self, question: Question) -> Row | HttpResponse:
        """Metrics over steps, seconds or samples."""
        last, series = question.text("changed"), []
        selection = self._curves(question)
        changed = "-".join(run.changed() for run in selection.runs.values())
        if changed == last:
            return HttpResponse(content=b"", status=204)
        for number, run, name in selection:
            curve = run.log.curve(name, selection.x, selection.since, run.samples_per_step)
            series.append({"run": number, "metric": name, **curve})
        return {"series": series, "changed": changed}

    def _curves(self, question: Question) -> Curves:
        runs = {int(number): self._run(number) for number in dict.fromkeys(question.all("run") or ["0"])}
        names, x = question.all("metric"), question.text("x", "step", ("step", "time", "samples"))
        since = question.number("since", -1.0) or 0.0
        question.end()
        return Curves({number: run.refresh() for number, run in runs.items()}, names, x, since)

    def config(self, question: Question) -> Row:
        """Settings of a run, or those in which two differ."""
        runs = [self._run(number).refresh() for number in [question.text("run", "0"), *question.all("against")]]
        question.end()
        return {"rows": setting_rows(runs)}

    def events(self, question: Question) -> Row | HttpResponse:
        """Checkpoints, validations, restarts, notices."""
        return self._of_run(question, lambda run: {"events": run.events()})

    def steps(self, question: Question) -> Row | HttpResponse:
        """A row per step."""
        return self._of_run(question, lambda run: {"steps": steps_of(run.columns), "indexed": run.indexed()})

    def groups(self, question: Question) -> Row | HttpResponse:
        """A page of the groups of a step."""
        return self._of_run(question, lambda run: groups_of(question, run.index, run.columns), ends=False)

    def samples(self, question: Question) -> Row | HttpResponse:
        """A page of the samples that pass filters."""

        def page(run: ViewedRun) -> Row:
            first, size = question.page()
            matches = run.index.matches(question, run.columns)
            question.end()
            return run.page(matches, first, size)

        return self._of_run(question, page, ends=False)

    def sample(self, question: Question) -> Row | HttpResponse:
        """One sample with its tokens."""
        identity, shows_all = question.text("id"), question.flag("all")
        return self._of_run(question, lambda run: run.sample(identity, shows_all))

    def prompt(self, question: Question) -> Row | HttpResponse:
        """The samples of the same prompt over training."""
        identity, (first, size) = question.text("id"), question.page()
        return self._of_run(question, lambda run: run.same_prompt(identity, first, size))

    def gantt(self, question: Question) -> Row | HttpResponse:
        """Who worked when."""
        return self._of_run(question, lambda run: run.gantt(question), ends=False)

    def system(self, question: Question) -> Row | HttpResponse:
        """Busy and idle seconds."""
        return self._of_run(question, lambda run: run.system())

    def export(self, question: Question) -> HttpResponse:
        """A table as a file."""
        what = question.text("what", "", ("curves", "groups", "samples", "tokens", *TABLES))
        kind = question.text("format", "csv", tuple(FORMATS))
        if what == "curves":
            selection = self._curves(question)
            rows = [
                {"run": run.name, "metric": name, selection.x: place, "step": step, "value": value}
                for _, run, name in selection
                for place, value, step in run.log.points(name, selection.x, selection.since, run.samples_per_step)
            ]
            return as_file(rows, what, kind)
        run = self._run(question.text("run", "0")).refresh(samples=True, complete=True)
        if what in TABLES:
            answer = self.questions[what](question)
            if isinstance(answer, HttpResponse):
                raise DataError("a file has all rows, also if nothing changed", key="changed", fix="Leave it out.")
            rows = answer[TABLES[what]]
            if what == "gantt" and "left_out" in answer:
                raise DataError("too many spans for a file", key=what, got=len(rows) + answer["left_out"],
                                allowed=f"up to {len(rows)}", fix="Choose fewer steps.")  # fmt: skip
        elif what == "groups":
            rows = groups_of(question, run.index, run.columns, True)["rows"]
        else:
            rows = run.exported(question) if what == "samples" else run.tokens(question)
        return as_file(rows, what, kind)

    def _of_run(self, question: Question, make: Callable[[ViewedRun], Row], ends: bool = True) -> Row | HttpResponse:
        """The answer about one run; 204 where nothing changed since the answer that the question names.

        Args:
            ends: all parameters are read; else ``make`` reads more.
        """
        run, last = self._run(question.text("run", "0")), question.text("changed")
        if ends:
            question.end()
        run.refresh(samples=True)
        if last and last == run.changed() and run.is_complete:
            return HttpResponse(content=b"", status=204)
        return {**make(run), "changed": run.changed()}


def page_files(folder: Path = PAGE) -> dict[str, Path]:
    """Name -> file of the page, from a look at its folder when the server starts."""
    return {
        place.relative_to(folder).as_posix(): place
        for place in folder.rglob("*")
        if place.is_file() and not place.is_symlink()
    }


def make_server(runs: list[ViewedRun], token: str) -> Server:
    """The server of some runs, which lets in who knows the token."""
    api, files = Api(runs), page_files()
    # One: requests see the columns of a run one after the other, and the memory of a large answer is held once.
    worker = ThreadPoolExecutor(1, "viewer")

    async def ask(request: HttpRequest) -> HttpResponse:
        name = request.parameters["name"]
        if name not in api.questions:
            raise ApiError(404, f"There is no question {name[:50]!r} here.", "not_found")
        return await asyncio.get_running_loop().run_in_executor(worker, _answered, api.questions[name], request)

    async def index(request: HttpRequest) -> HttpResponse:
        return _file(files, "index.html")

    async def file(request: HttpRequest) -> HttpResponse:
        return _file(files, request.parameters["name"])

    routes: dict[tuple[str, str], Handle] = {
        ("GET", "/"): index, ("GET", "/page/{name:path}"): file, ("GET", "/api/{name}"): ask
    }  # fmt: skip
    access = BrowserAccess("verl_viewer")
    return Server(routes, lambda shown: "viewer" if secret.same(shown, token) else None, browsers=access)


def _file(files: Mapping[str, Path], name: str) -> HttpResponse:
    if name not in files:
        raise ApiError(404, f"The page has no file {name[:80]!r}.", "not_found")
    media = mimetypes.guess_type(name)[0] or "application/octet-stream"
    media = "text/javascript" if name.endswith(".js") else media  # the system's table may say otherwise
    media += "; charset=utf-8" if media.startswith("text/") else ""
    return HttpResponse(content=files[name].read_bytes(), media=media, headers={"cache-control": "no-cache"})


def _answered(function: Answering, request: HttpRequest) -> HttpResponse:
    try:
        answer = function(Question(request.query))
    except VerlError as error:
        return error_answer(error)
    return answer if isinstance(answer, HttpResponse) else json_answer(answer)
