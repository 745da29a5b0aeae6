"""A study's runs in MLflow: its own, and one for each trial, in two experiments.

Runs that were sent are found by searching the server for the study's id. So the next run of a
command sends those that are missing. One process at a time may send a study's runs: the caller
holds the study's lock.

A trial's run counts as whole once it has ended. If its sender died before that, it is deleted and
sent again. A stopped trial that is continued goes on in its run. Its metrics have times that follow
from the records: sent twice, they are there once. The number of the new part is written last of
all, as a part that the run names counts as sent.

Metrics are append-only. So the results of a continued study go to a new run of the study, and the
old one is deleted.

A request that is answered late is sent again, and may be carried out twice. A run that was written
twice, or not to its end, is deleted when the study is opened and when it is finished.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import quote

import optuna
from mlflow import MlflowClient
from mlflow.entities import Experiment, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.tracking import SEARCH_MAX_RESULTS_THRESHOLD

from bstune.core.records import TrialResult
from bstune.report.answer import answer
from bstune.report.block import console_rows
from bstune.result import StudyResult
from bstune.study.prepared import PreparedStudy
from bstune.study.storage.attributes import STUDY_ID
from bstune.study.storage.trials import results
from bstune.system.files import is_own
from bstune.system.git import git_commit
from bstune.tracking import colours, content, saved_view
from bstune.tracking.address import database_path, opening_lines, tracking_uri
from bstune.tracking.client import FilteringClient
from bstune.tracking.content import KIND
from bstune.tracking.database import make_database
from bstune.tracking.exchange import Exchanges

STUDY_TAG = "bstune.study_id"
PARENT = "mlflow.parentRunId"
# A tag of a trial's run: its number, then those of the parts that continued it.
TRIAL_NUMBERS = "bstune.trials"
# A tag of a study's run: some of its results may be there, or still come.
RESULTS_BEGUN = "bstune.results_begun"
# A tag of a study's run: how many trials its results are of. It is set once all results are there.
RESULT_TRIALS = "bstune.result_trials"
# A tag of a study's run: the name of the winner's checkpoint among its files.
CHECKPOINT = "bstune.checkpoint"
KIND_OF_EXPERIMENT = {"mlflow.experimentKind": "custom_model_development"}
# A tag of a run or an experiment: its description.
NOTE = "mlflow.note.content"
# A colour is chosen by the newest other studies: this many times as many as there are colours.
PALETTES_LOOKED_AT = 5
_log = logging.getLogger(__name__)


def open_tracking(prepared: PreparedStudy, study: optuna.Study) -> "Tracking":
    """Open a study in MLflow, send the trials that MLflow lacks, and give its tracking."""
    tracking = Tracking(prepared, study.user_attrs[STUDY_ID])
    for result in results(study):
        tracking.send_trial(result)
    return tracking


class Tracking:
    """A study's runs in MLflow.

    Nothing here raises because of MLflow: after a failure, nothing more is sent.
    """

    name = "MLflow"
    """The tracker's name in lines that are printed."""
    _client: MlflowClient
    _experiments: Mapping[str, str]
    """The ids of the two experiments, by the kind of their runs: ``study`` or ``trial``."""
    _parent: Run
    """The study's run. The trials' runs are its children."""

    def __init__(self, prepared: PreparedStudy, study_id: str) -> None:
        """Find the runs of the study with this uuid that were sent before, and make its own run."""
        options = prepared.options
        self._prepared = prepared
        self._backend = prepared.backend
        self._metric = prepared.protocol.target.metric
        self._settings = options.mlflow
        self._uri = tracking_uri(options.mlflow)
        self._commit = git_commit()
        self._tags = {
            STUDY_TAG: study_id,
            "bstune.study": options.study,
            "bstune.workload": options.workload.name,
        }
        # The page of MLflow's UI with the studies.
        self._page = ""
        # The trials that were to be sent, by number.
        self._results: dict[int, TrialResult] = {}
        # For each trial that MLflow has whole, by number: its run's id, and its start in
        # milliseconds.
        self._sent_runs: dict[int, tuple[str, int]] = {}
        self._exchanges = Exchanges(options.mlflow)
        self._exchanges.run("open the study", self._open)

    @property
    def sent(self) -> set[int]:
        """Numbers of the trials that MLflow has whole."""
        return set(self._sent_runs)

    @property
    def opening_lines(self) -> tuple[str, ...]:
        """Lines that say how to open the page of the studies: a command, if any, and an address."""
        return opening_lines(self._uri, self._page)

    def send_trial(self, result: TrialResult) -> None:
        """Send one trial whole, unless MLflow has it.

        Values that the trial lacks, such as steps to a target that it missed, are left out.
        """
        self._results[result.number] = result
        if not self._exchanges.failed and result.number not in self._sent_runs:
            work = partial(self._write_trial, result, round(1000 * time.time()))
            self._exchanges.run(f"send trial {result.number}", work, self._settings.seconds)

    def finish_study(self, result: StudyResult, artifacts: Sequence[Path]) -> None:
        """Send a completed study's results to its run, and end that run.

        Results are not sent again if the run has those of as many trials.

        Args:
            result: the study's result.
            artifacts: files to send. The run's note shows the first one with the suffix png.
        """
        if self._exchanges.failed:
            return
        if self._parent.data.tags.get(RESULT_TRIALS) != str(len(self.sent)):
            self._exchanges.run("send the results", partial(self._write_results, result, artifacts))
        # The tag names the checkpoint that was sent.
        if not self._exchanges.failed and CHECKPOINT not in self._parent.data.tags:
            send = partial(self._write_checkpoint, result)
            self._exchanges.run("send the winner's checkpoint", send)

    def _open(self) -> None:
        """Find the experiments and the study's run, or make them, and find the trials sent before.

        Runs that a dead process left unfinished are deleted.
        """
        path = database_path(self._uri)
        if path is not None:
            make_database(path)
        self._client = FilteringClient(self._uri)
        self._open_experiments()
        # The study's run is the newest one with all its results. A newer one with half of them was
        # left by a process that died.
        parent = max(
            self._runs("study"),
            key=lambda run: (RESULT_TRIALS in run.data.tags, run.info.start_time),
            default=None,
        )
        if parent is None:
            parent = self._create_parent(colours.next_colour(self._other_colours()))
        self._parent = parent
        self._describe_parent(self._parent)
        # A trial's run that has ended was sent whole: its end is sent last. Of several runs of one
        # trial, which a repeated request leaves, the oldest counts.
        for child in self._runs("trial"):
            if child.info.status in ("FINISHED", "FAILED"):
                for number in child.data.tags[TRIAL_NUMBERS].split():
                    self._sent_runs.setdefault(
                        int(number), (child.info.run_id, child.info.start_time)
                    )
        self._delete_strays()
        # Another run of the study may be left, with trials' runs below it. They move to this one
        # before it goes.
        self._make_only_parent(self._parent.info.run_id)

    def _open_experiments(self) -> None:
        """Find or make the two experiments, and give each its description and its saved view."""
        name = self._settings.experiment
        studies = _experiment(self._client, self._uri, name)
        trials = _experiment(self._client, self._uri, f"{name}-trials")
        self._experiments = {"study": studies.experiment_id, "trial": trials.experiment_id}
        links = saved_view.links(studies.experiment_id, trials.experiment_id)
        tags = KIND_OF_EXPERIMENT | {NOTE: links}
        # MLflow counts milliseconds.
        now = round(1000 * time.time())
        studies_view = {saved_view.TAG: saved_view.studies_view(now)}
        trials_view = {saved_view.TAG: saved_view.trials_view(now)}
        _add_tags(self._client, studies, tags | studies_view)
        _add_tags(self._client, trials, tags | trials_view)
        self._page = saved_view.page(studies.experiment_id, "CHART")

    def _runs(self, kind: str) -> list[Run]:
        """Give the study's runs of a kind, ``study`` or ``trial``, the oldest first.

        Deleted ones are left out. MLflow gives 50,000 at most.
        """
        runs = self._client.search_runs(
            [self._experiments[kind]],
            f"tags.`{STUDY_TAG}` = '{self._tags[STUDY_TAG]}' and tags.`{KIND}` = '{kind}'",
            max_results=SEARCH_MAX_RESULTS_THRESHOLD,
            order_by=["start_time"],
        )
        return list(runs)

    def _other_studies(self) -> list[Run]:
        """Give the runs of the newest other studies, the newest first.

        This study's colour is chosen by theirs. Older ones would only slow the request.
        """
        runs = self._client.search_runs(
            [self._experiments["study"]],
            f"tags.`{STUDY_TAG}` != '{self._tags[STUDY_TAG]}' and tags.`{KIND}` = 'study'",
            max_results=PALETTES_LOOKED_AT * len(colours.PALETTE),
            order_by=["start_time DESC"],
        )
        return list(runs)

    def _other_colours(self) -> list[str]:
        """Give the colours of other studies' runs, the newest first. A run without has ``""``."""
        return [run.data.tags.get(colours.COLOUR_TAG, "") for run in self._other_studies()]

    def _take_free_colour(self, parent: Run) -> None:
        """Change the colour of the study's run, if a study that began just before has the same."""
        # Of two runs that start in the same millisecond the ids decide, the same for both studies.
        own_start = (parent.info.start_time, parent.info.run_id)
        older_colours = list[str | None]()
        for run in self._other_studies():
            if (run.info.start_time, run.info.run_id) < own_start:
                older_colours.append(run.data.tags.get(colours.COLOUR_TAG))
        # The newest come first. A colour returns after as many studies as the palette has colours,
        # so that it need only differ from those of the studies since.
        near_colours = older_colours[: len(colours.PALETTE) - 1]
        if parent.data.tags.get(colours.COLOUR_TAG) in near_colours:
            free = colours.next_colour(self._other_colours())
            self._client.set_tag(parent.info.run_id, colours.COLOUR_TAG, free)

    def _create_parent(self, colour: str) -> Run:
        """Make a run of the study, in this colour."""
        backend = self._backend
        tags = self._run_tags("study", backend.device, backend.versions)
        tags["bstune.metric"] = self._metric
        tags[colours.COLOUR_TAG] = colour
        if self._commit:
            tags["mlflow.source.git.commit"] = self._commit
        name = content.study_name(self._prepared)
        run: Run = self._client.create_run(self._experiments["study"], tags=tags, run_name=name)
        return run

    def _describe_parent(self, parent: Run) -> None:
        """Send the parameters and the data set that the study's run lacks.

        MLflow does not let parameters change, so those that the run has stay.
        """
        missing = list[Param]()
        for name, value in content.study_params(self._prepared, self._commit).items():
            if name not in parent.data.params:
                missing.append(Param(name, value))
        self._client.log_batch(parent.info.run_id, params=missing)
        if parent.inputs is None or not parent.inputs.dataset_inputs:
            self._client.log_inputs(parent.info.run_id, [content.data_set(self._prepared)])

    def _make_only_parent(self, parent_id: str) -> None:
        """Make all trials' runs children of this run of the study, then delete its other runs."""
        for child in self._runs("trial"):
            if child.data.tags[PARENT] != parent_id:
                self._client.set_tag(child.info.run_id, PARENT, parent_id)
        for run in self._runs("study"):
            if run.info.run_id != parent_id:
                self._client.delete_run(run.info.run_id)

    def _delete_strays(self) -> None:
        """Delete the trials' runs that were not sent to their end, or that were sent twice.

        A process that died or a request that was repeated has left them.
        """
        whole = {run_id for run_id, _ in self._sent_runs.values()}
        for child in self._runs("trial"):
            if child.info.run_id not in whole:
                self._client.delete_run(child.info.run_id)

    def _write_trial(self, result: TrialResult, now: int) -> None:
        """Send a trial in a run of its own, or in the run of the parts that it continues.

        ``now``: the moment at which the trial ended, in milliseconds.
        """
        chain = self._chain(result)
        if len(chain) > 1:
            self._continue_run(chain)
            return
        tags = self._run_tags("trial", result.device, result.versions) | self._trial_tags(result)
        tags[TRIAL_NUMBERS] = str(result.number)
        tags[PARENT] = self._parent.info.run_id
        start_milliseconds = now - round(1000 * result.wall_seconds)
        run_name = content.trial_name(result)
        run = self._client.create_run(
            self._experiments["trial"], start_milliseconds, tags, run_name
        )
        run_id = run.info.run_id
        values = {name: getattr(result, name) for name in content.TRIAL_PARAMS}
        values |= result.hyperparameters
        params = list[Param]()
        for name, value in values.items():
            if value is not None:
                params.append(Param(content.allowed_key(name), str(value)))
        metrics = content.metrics(content.trial_values(chain, self._metric), now)
        # The client itself splits what is past the limits of one request: 1000 metrics, 100
        # parameters.
        self._client.log_batch(run_id, metrics, params)
        status = "FINISHED"
        if result.status == "failed":
            status = "FAILED"
        # The end is sent last, because a run that has ended counts as sent.
        self._client.set_terminated(run_id, status, now)
        self._sent_runs[result.number] = run_id, start_milliseconds

    def _chain(self, result: TrialResult) -> list[TrialResult]:
        """Give the parts of a trial that share one run: those that it continues, and itself last.

        A part that failed has a run of its own, and so stands alone.
        """
        chain = [result]
        if result.status == "failed":
            return chain
        number = result.resumed_from
        # An earlier part that MLflow does not have is in no run that this one could continue.
        while number is not None and number in self._sent_runs:
            chain.insert(0, self._results[number])
            number = chain[0].resumed_from
        return chain

    def _continue_run(self, chain: Sequence[TrialResult]) -> None:
        """Send the last part of a trial to the run that has all other parts of ``chain``."""
        result = chain[-1]
        run_id, start_milliseconds = self._sent_runs[chain[-2].number]
        # The time follows from the records, not from the clock: sent twice, metrics are the same.
        end = start_milliseconds + round(1000 * sum(trial.wall_seconds for trial in chain))
        tags = self._trial_tags(result) | {"mlflow.runName": content.trial_name(result)}
        run_tags = [RunTag(name, value) for name, value in tags.items()]
        metrics = content.metrics(content.trial_values(chain, self._metric), end)
        self._client.log_batch(run_id, metrics, tags=run_tags)
        self._client.set_terminated(run_id, "FINISHED", end)
        # The numbers are sent last, because a part that the run names counts as sent.
        self._client.set_tag(run_id, TRIAL_NUMBERS, " ".join(str(trial.number) for trial in chain))
        self._sent_runs[result.number] = run_id, start_milliseconds

    def _write_results(self, result: StudyResult, artifacts: Sequence[Path]) -> None:
        """Send the results to the study's run, or to a new one if the run has results already."""
        client = self._client
        # Results that are in the run may be of fewer trials. An attempt that broke off may have
        # sent a part of them, and its requests may still arrive. So a new run takes its place.
        has_results = bool(self._parent.data.metrics) or RESULTS_BEGUN in self._parent.data.tags
        parent = self._parent
        if has_results:
            # The new run has the same colour, unless a user has deleted that in the UI.
            colour = parent.data.tags.get(colours.COLOUR_TAG)
            parent = self._create_parent(colour or colours.next_colour(self._other_colours()))
        else:
            self._take_free_colour(parent)
        run_id = parent.info.run_id
        client.set_tag(run_id, RESULTS_BEGUN, "true")
        self._describe_parent(parent)
        now = round(1000 * time.time())
        client.log_batch(run_id, content.metrics(content.study_values(result), now))
        figure: str | None = None
        for path in artifacts:
            client.log_artifact(run_id, str(path))
            if figure is None and path.suffix == ".png":
                figure = path.name
        where = quote(f"tags.`{STUDY_TAG}` = '{self._tags[STUDY_TAG]}'")
        trials = f"{saved_view.runs_page(self._experiments['trial'])}&searchFilter={where}"
        text = "\n".join(console_rows(answer(result)))
        client.set_tag(run_id, NOTE, content.study_note(text, run_id, figure, trials, self._page))
        client.set_terminated(run_id, "FINISHED")
        # Once it has this tag, it is the study's run and the others go.
        client.set_tag(run_id, RESULT_TRIALS, str(len(self.sent)))
        self._delete_strays()
        self._make_only_parent(run_id)
        self._parent = client.get_run(run_id)

    def _write_checkpoint(self, result: StudyResult) -> None:
        """Send the winner's checkpoint, if this machine has it.

        If not, best.yaml, which is sent in any case, tells how to train the winner again.
        """
        winner = result.winner
        if winner is None:
            return
        checkpoint = self._prepared.files.checkpoint(winner.number)
        # A file that the study itself has not written under this name is not sent.
        if is_own(checkpoint):
            run_id = self._parent.info.run_id
            self._client.log_artifact(run_id, str(checkpoint))
            self._client.set_tag(run_id, CHECKPOINT, checkpoint.name)

    def _run_tags(self, kind: str, device: str, versions: Mapping[str, str]) -> dict[str, str]:
        """Give the tags of a run of a kind, ``study`` or ``trial``. ``versions``: by package."""
        tags = dict(self._tags)
        tags[KIND] = kind
        tags["bstune.device"] = device
        tags["mlflow.source.name"] = "bstune"
        for package, version in versions.items():
            tags[content.allowed_key(f"bstune.version.{package}")] = version
        return tags

    def _trial_tags(self, result: TrialResult) -> dict[str, str]:
        """Give the tags that a trial's run gets from its last part."""
        tags: dict[str, str] = {"bstune.status": result.status}
        if result.resumed_from is not None:
            tags["bstune.resumed_from"] = str(result.resumed_from)
        if result.message:
            tags["bstune.message"] = content.shortened(result.message, content.TAG_LENGTH)
        return tags


def _experiment(client: MlflowClient, uri: str, name: str) -> Experiment:
    """Find the experiment of this name, or make it. ``uri``: MLflow's."""
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return experiment
    # MLflow itself would put the artifacts of a SQLite database below the working directory of the
    # command that makes the experiment. They lie beside the database.
    path = database_path(uri)
    location: str | None = None
    if path is not None:
        location = str(path.parent / "mlruns" / quote(name, safe=" "))
    try:
        return client.get_experiment(client.create_experiment(name, location))
    except MlflowException:
        # Another process has just made it, or this one has, if the request was repeated.
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise
        return experiment


def _add_tags(client: MlflowClient, experiment: Experiment, tags: Mapping[str, str]) -> None:
    """Give an experiment the tags that it lacks. Those that it has stay, as people change them."""
    for key, value in tags.items():
        if key not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, key, value)
