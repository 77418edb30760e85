"""Experiment trackers as log backends, each by the package of its maker.

To add one, subclass `TrackerBackend` and name it in `CLASSES` and in `mvp_engine.log.backends.TRACKERS`.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from mvp_engine.log.backends import Backend, RunInfo, flat

LOGGER = logging.getLogger("mvp_engine")
TRACKER_SECONDS = 60.0  # longest wait for a tracker, at its start and at its end


class TrackerBackend(Backend):
    """An experiment tracker. Only a thread of its own calls the package, so a slow or lost server delays no step.

    Settings go to the function of the package that starts a run. A resumed run continues its run in the tracker.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def open(self, info: RunInfo) -> None:
        """Start or continue the tracker's run."""
        raise NotImplementedError

    def log(self, values: dict[str, float], step: int) -> None:
        self.tracker.log(values, step=step)

    def end(self, failure: str | None) -> None:
        self.tracker.finish()

    def init(self, **options: Any) -> None:
        module = importlib.import_module(self.package)
        self.tracker: Any = module.init(**{**options, **self.settings})

    def start(self, info: RunInfo) -> None:
        self.records = queue.SimpleQueue[tuple[dict[str, float], int] | None]()
        self.failure: str | None = None
        self.error: Exception | None = None
        self.opened = threading.Event()
        name = f"mvp-{self.package}"
        self.thread = threading.Thread(target=self._work, args=(info,), name=name, daemon=True)
        self.thread.start()
        if not self.opened.wait(TRACKER_SECONDS):
            text = (
                "%s has not started after %g s. Training continues; records are sent once it has."
            )
            LOGGER.warning(text, self.package, TRACKER_SECONDS)
        self._raise()

    def metrics(self, record: dict[str, Any]) -> None:
        self.records.put((flat(record), record["step"]))
        self._raise()

    def close(self, failure: str | None) -> None:
        self.failure = failure
        self.records.put(None)
        self.thread.join(TRACKER_SECONDS)
        if self.thread.is_alive():
            text = "%s has not ended after %g s, and misses records; they are in the run folder."
            LOGGER.warning(text, self.package, TRACKER_SECONDS)
        self._raise()

    def _work(self, info: RunInfo) -> None:
        is_open = self._try(self.open, info)
        self.opened.set()
        if is_open:
            for record in iter(self.records.get, None):
                self._try(self.log, *record)
            self._try(self.end, self.failure)

    def _try(self, function: Callable[..., None], *values: Any) -> bool:
        try:
            function(*values)
            return True
        except SystemExit as error:
            self.error = RuntimeError(f"{self.package} called sys.exit({error})")
        except Exception as error:  # noqa: BLE001 - the hub reports it
            self.error = error
        return False

    def _raise(self) -> None:
        """Raise the thread's last error, for the hub to report."""
        error = self.error
        self.error = None
        if error is not None:
            raise error


class WandbBackend(TrackerBackend):
    package = "wandb"

    def open(self, info: RunInfo) -> None:
        where: Any = {"project": info.project, "id": info.run.id, "dir": str(info.run.dir)}
        self.init(**where, resume="allow", config=info.config)

    def end(self, failure: str | None) -> None:
        self.tracker.finish(exit_code=1 if failure else 0)


class TrackioBackend(TrackerBackend):
    package = "trackio"

    def open(self, info: RunInfo) -> None:
        options: Any = {"name": info.run.id, "resume": "allow", "config": info.config}
        self.init(project=info.project, **options)


class SwanLabBackend(TrackerBackend):
    """`mode: local` or `offline` writes to the run folder; such runs are not continued, but started again."""

    package = "swanlab"

    def open(self, info: RunInfo) -> None:
        options: Any = {"project": info.project, "name": info.run.id}
        options |= {"config": info.config, "log_dir": str(info.run.dir / "swanlab")}
        if self.settings.get("mode", "online") == "online":
            options |= {"id": tracker_id(info), "resume": "allow"}
        self.init(**options)

    def end(self, failure: str | None) -> None:
        self.tracker.finish(*(["crashed", failure] if failure else []))


class MlflowBackend(TrackerBackend):
    """Its client, not its global run: a process may train several runs. Records wait while the server is away."""

    package = "mlflow"

    def __init__(
        self, tracking_uri: str | None = None, experiment: str | None = None, **tags: Any
    ) -> None:
        super().__init__(**tags)
        self.tracking_uri = tracking_uri  # default: MLFLOW_TRACKING_URI, or MLflow's own
        self.experiment = experiment  # default: run_name
        self.pending: list[Any] = []

    def open(self, info: RunInfo) -> None:
        import mlflow

        self.entities = mlflow.entities
        self.tracker = mlflow.MlflowClient(self.tracking_uri)
        name = self.experiment or info.project
        found = self.tracker.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.tracker.create_experiment(name)
        tag = f"tags.`mvp_engine.run` = '{info.run.id}'"
        if runs := self.tracker.search_runs([experiment], tag, max_results=1):
            self.run_id = runs[0].info.run_id
            self.tracker.update_run(self.run_id, status="RUNNING")
        else:
            tags = {"mvp_engine.run": info.run.id, **self.settings}
            if commit := info.run.info.get("git"):
                tags["mlflow.source.git.commit"] = commit
            created = self.tracker.create_run(experiment, run_name=info.run.id, tags=tags)
            self.run_id = created.info.run_id
            self._log_params(info.config)
        self.tracker.log_dict(self.run_id, info.config, "config.yaml")  # also of a resumed run

    def _log_params(self, config: dict[str, Any]) -> None:
        """Parameters of a run cannot change: they are those of its start. A request takes 100."""
        params = [
            self.entities.Param(key, text if len(text := str(value)) <= 500 else f"{text[:497]}...")
            for key, value in dotted(config).items()
        ]
        for start in range(0, len(params), 100):
            self.tracker.log_batch(self.run_id, params=params[start : start + 100])

    def log(self, values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self.pending += [self.entities.Metric(key, values[key], now, step) for key in values]
        self._send()

    def _send(self) -> None:
        from mlflow.exceptions import MlflowException

        try:
            while self.pending:  # a request takes 1000
                self.tracker.log_batch(self.run_id, metrics=self.pending[:1000])
                del self.pending[:1000]
        except MlflowException as error:
            raise ConnectionError(str(error)) from error

    def end(self, failure: str | None) -> None:
        self._send()
        self.tracker.set_terminated(self.run_id, "FAILED" if failure else "FINISHED")


class CometBackend(TrackerBackend):
    """Logs what the engine passes: the hooks that record other libraries are off. `online: false` writes a file."""

    package = "comet_ml"

    def open(self, info: RunInfo) -> None:
        import comet_ml

        options = dict(self.settings)
        where = {"project_name": info.project, "experiment_key": tracker_id(info)}
        names = inspect.signature(comet_ml.start).parameters
        for name in where:
            where[name] = options.pop(name, where[name])
        start = {name: options.pop(name) for name in list(options) if name in names}
        own: Any = {"name": info.run.id, "offline_directory": str(info.run.dir / "comet")}
        own |= {"log_code": False, "auto_metric_logging": False, "auto_param_logging": False}
        own |= {"auto_output_logging": False, "parse_args": False}
        config = comet_ml.ExperimentConfig(**{**own, **options})
        self.tracker = comet_ml.start(
            **{"mode": "get_or_create", **where, **start}, experiment_config=config
        )
        self.tracker.log_parameters(dotted(info.config))

    def log(self, values: dict[str, float], step: int) -> None:
        self.tracker.log_metrics(values, step=step)

    def end(self, failure: str | None) -> None:
        if failure:
            self.tracker.log_other("failure", failure)
        self.tracker.end()


class ClearMLBackend(TrackerBackend):
    """Logs what the engine passes: the hooks that record other libraries are off. `offline: true` writes a file."""

    package = "clearml"

    def open(self, info: RunInfo) -> None:
        from clearml import Task

        options: Any = {"project_name": info.project, "task_name": info.run.id}
        options |= {"auto_connect_arg_parser": False, "auto_connect_frameworks": False}
        options |= {"auto_connect_streams": False, **self.settings}
        is_offline = options.pop("offline", None)
        if is_offline is not None:
            Task.set_offline(is_offline)
        old = None
        if info.start_step and not is_offline:
            name = {key: options[key] for key in ("project_name", "task_name")}
            old = Task.get_task(**name)
        # 0: steps are those of the engine, without an offset of the tracker.
        options |= {"reuse_last_task_id": old.id if old else False}
        options |= {"continue_last_task": 0} if old else {}
        self.tracker = Task.init(**options)
        self.tracker.connect_configuration(info.config, name="config")

    def log(self, values: dict[str, float], step: int) -> None:
        logger = self.tracker.get_logger()
        for name, value in values.items():
            title, _, series = name.partition("/")
            logger.report_scalar(title, series, value, step)

    def end(self, failure: str | None) -> None:
        if failure:
            self.tracker.mark_failed(status_message=failure)
        self.tracker.close()


def tracker_id(info: RunInfo) -> str:
    """The id of a run for trackers that take 32 letters and digits, the same when it is resumed."""
    return hashlib.sha256(f"{info.project}/{info.run.id}".encode()).hexdigest()[:32]


def dotted(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config with one key per value, as on the command line: `optim.lr`."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        is_section = isinstance(value, dict) and value
        values |= dotted(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return values


CLASSES: dict[str, type[TrackerBackend]] = {
    "wandb": WandbBackend,
    "trackio": TrackioBackend,
    "mlflow": MlflowBackend,
    "swanlab": SwanLabBackend,
    "comet": CometBackend,
    "clearml": ClearMLBackend,
}
