"""A study's runs in MLflow: its own, in an experiment of studies, and one a trial, in another.

What was sent is found by searching the server for the study's id, so the next run of a command
sends what is missing. A trial's run counts as whole once it has ended; one whose sender died before
that is deleted and sent again. A stopped trial that is continued goes on in its run: its metrics
have the times that follow from the records, so that sending them twice is sending them once, and
the run names the trial last of all. Metrics are append-only, so the results of a continued study go
to a new run, and the old one is deleted. One process at a time may send a study's runs: the caller
holds the study's lock.

A request that is answered late is sent again, and may have been done twice: what was written twice,
or not to its end, is deleted when the study is opened and when it is finished.
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
from bstune.study.prepare import PreparedStudy
from bstune.study.storage.attributes import STUDY_ID
from bstune.study.storage.trials import results
from bstune.system.files import is_own
from bstune.system.git import git_commit
from bstune.tracking import colours, content, saved_view
from bstune.tracking.address import database_path, opening, tracking_uri
from bstune.tracking.client import FilteringClient
from bstune.tracking.content import KIND
from bstune.tracking.database import make_database
from bstune.tracking.exchange import Exchanges

STUDY_TAG = "bstune.study_id"
PARENT = "mlflow.parentRunId"
# On a trial's run: its number, then those of the trials that continued it.
TRIAL_NUMBERS = "bstune.trials"
# On a study's run: some of its results may be there, or still come.
RESULTS_BEGUN = "bstune.results_begun"
# On a study's run: how many trials the results in it are of; set once they are all there.
RESULT_TRIALS = "bstune.result_trials"
# On a study's run: the winner's checkpoint, an artifact of this name.
CHECKPOINT = "bstune.checkpoint"
KIND_OF_EXPERIMENT = {"mlflow.experimentKind": "custom_model_development"}
# Of a run or an experiment: its description.
NOTE = "mlflow.note.content"
# Of other studies the colours of so many times the palette are looked at, the newest ones.
PALETTES_LOOKED_AT = 5
_log = logging.getLogger(__name__)


def open_tracking(prepared: PreparedStudy, study: optuna.Study) -> "Tracking":
    """Open MLflow and send the trials that it lacks."""
    tracking = Tracking(prepared, study.user_attrs[STUDY_ID])
    for result in results(study):
        tracking.send_trial(result)
    return tracking


class Tracking:
    """A study's runs in MLflow.

    Nothing here raises because of MLflow: after a failure, nothing more is sent.
    """

    name = "MLflow"
    """What lines call it, as where it lacks the results."""
    _client: MlflowClient
    _experiments: Mapping[str, str]
    """Their ids, by kind of run."""
    _parent: Run
    """The study's run, whose children are the trials'."""

    def __init__(self, prepared: PreparedStudy, study_id: str) -> None:
        """Find what was sent before of the study with this uuid."""
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
        # Of the trials that MLflow has whole, by number: their run's id and start.
        self._whole: dict[int, tuple[str, int]] = {}
        self._exchanges = Exchanges(options.mlflow, database=database_path(self._uri))
        self._exchanges.run("open the study", self._find)

    @property
    def sent(self) -> set[int]:
        """Numbers of the trials that MLflow has whole."""
        return set(self._whole)

    @property
    def opening(self) -> tuple[str, ...]:
        """What opens the page of the studies: the command that serves it, if any, its address."""
        return opening(self._uri, self._page)

    def send_trial(self, result: TrialResult) -> None:
        """Send one trial whole, unless MLflow has it.

        What a trial short of the target lacks is left out.
        """
        self._results[result.number] = result
        if not self._exchanges.failed and result.number not in self._whole:
            work = partial(self._write_trial, result, round(1000 * time.time()))
            self._exchanges.run(f"send trial {result.number}", work, self._settings.seconds)

    def finish_study(self, found: StudyResult, artifacts: Sequence[Path]) -> None:
        """Send a completed study's results to its run, and end that run.

        Nothing is sent if it has those of as many trials.

        Args:
            found: the results.
            artifacts: files; the first one with the suffix png is shown in the run's note.
        """
        if self._exchanges.failed:
            return
        if self._parent.data.tags.get(RESULT_TRIALS) != str(len(self.sent)):
            self._exchanges.run("send the results", partial(self._write_results, found, artifacts))
        if not self._exchanges.failed and CHECKPOINT not in self._parent.data.tags:
            send = partial(self._write_checkpoint, found)
            self._exchanges.run("send the winner's checkpoint", send)

    def _find(self) -> None:
        """Find or create experiments and the study's run, and repair what a dead process left."""
        path = database_path(self._uri)
        if path is not None:
            make_database(path)
        self._client = FilteringClient(self._uri)
        name = self._settings.experiment
        studies = _experiment(self._client, self._uri, name)
        trials = _experiment(self._client, self._uri, f"{name}-trials")
        self._experiments = {"study": studies.experiment_id, "trial": trials.experiment_id}
        links = saved_view.links(studies.experiment_id, trials.experiment_id)
        tags = KIND_OF_EXPERIMENT | {NOTE: links}
        now = round(1000 * time.time())
        studies_view = {saved_view.TAG: saved_view.studies_view(now)}
        trials_view = {saved_view.TAG: saved_view.trials_view(now)}
        _add_tags(self._client, studies, tags | studies_view)
        _add_tags(self._client, trials, tags | trials_view)
        self._page = saved_view.page(studies.experiment_id, "CHART")
        # The newest with all its results: a newer one with half of them is what a process that died
        # left.
        parent = max(
            self._runs("study"),
            key=lambda run: (RESULT_TRIALS in run.data.tags, run.info.start_time),
            default=None,
        )
        if parent is None:
            parent = self._create_parent(colours.next_colour(self._other_colours()))
        self._parent = parent
        self._describe_parent(self._parent)
        for child in self._runs("trial"):
            if child.info.status in ("FINISHED", "FAILED"):
                for number in child.data.tags[TRIAL_NUMBERS].split():
                    self._whole.setdefault(int(number), (child.info.run_id, child.info.start_time))
        self._delete_strays()
        self._make_only_parent(self._parent.info.run_id)

    def _runs(self, kind: str) -> list[Run]:
        """Give the study's runs of a kind that were not deleted, oldest first, 50,000 at most."""
        runs = self._client.search_runs(
            [self._experiments[kind]],
            f"tags.`{STUDY_TAG}` = '{self._tags[STUDY_TAG]}' and tags.`{KIND}` = '{kind}'",
            max_results=SEARCH_MAX_RESULTS_THRESHOLD,
            order_by=["start_time"],
        )
        return list(runs)

    def _other_studies(self) -> list[Run]:
        """Give the runs of other studies, the newest first, as many as colours may depend on."""
        runs = self._client.search_runs(
            [self._experiments["study"]],
            f"tags.`{STUDY_TAG}` != '{self._tags[STUDY_TAG]}' and tags.`{KIND}` = 'study'",
            max_results=PALETTES_LOOKED_AT * len(colours.PALETTE),
            order_by=["start_time DESC"],
        )
        return list(runs)

    def _other_colours(self) -> list[str]:
        return [run.data.tags.get(colours.COLOUR_TAG, "") for run in self._other_studies()]

    def _part_colours(self, parent: Run) -> None:
        """Take another colour, if a study that began at the same moment has taken the same."""
        place = (parent.info.start_time, parent.info.run_id)
        older_colours = list[str | None]()
        for run in self._other_studies():
            if (run.info.start_time, run.info.run_id) < place:
                older_colours.append(run.data.tags.get(colours.COLOUR_TAG))
        # Beyond these the colours repeat.
        near_colours = older_colours[: len(colours.PALETTE) - 1]
        if parent.data.tags.get(colours.COLOUR_TAG) in near_colours:
            free = colours.next_colour(self._other_colours())
            self._client.set_tag(parent.info.run_id, colours.COLOUR_TAG, free)

    def _create_parent(self, colour: str) -> Run:
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
        """Send the parameters and the data set as far as the study's run lacks them.

        What it has cannot be changed.
        """
        missing = list[Param]()
        for name, value in content.study_params(self._prepared, self._commit).items():
            if name not in parent.data.params:
                missing.append(Param(name, value))
        self._client.log_batch(parent.info.run_id, params=missing)
        if parent.inputs is None or not parent.inputs.dataset_inputs:
            self._client.log_inputs(parent.info.run_id, [content.data_set(self._prepared)])

    def _make_only_parent(self, parent_id: str) -> None:
        """Move all the study's trials to this parent, then delete its other ones."""
        for child in self._runs("trial"):
            if child.data.tags[PARENT] != parent_id:
                self._client.set_tag(child.info.run_id, PARENT, parent_id)
        for run in self._runs("study"):
            if run.info.run_id != parent_id:
                self._client.delete_run(run.info.run_id)

    def _delete_strays(self) -> None:
        """Delete the trials' runs that are not whole: of a dead process, or a repeated request."""
        whole = {run_id for run_id, _ in self._whole.values()}
        for child in self._runs("trial"):
            if child.info.run_id not in whole:
                self._client.delete_run(child.info.run_id)

    def _write_trial(self, result: TrialResult, now: int) -> None:
        """Send a trial in a run of its own, or in that of the trials that it continues.

        ``now``: in milliseconds, when the trial ended.
        """
        chain = self._chain(result)
        if len(chain) > 1:
            self._continue_run(chain)
            return
        tags = self._run_tags("trial", result.device, result.versions) | self._trial_tags(result)
        tags[TRIAL_NUMBERS] = str(result.number)
        tags[PARENT] = self._parent.info.run_id
        start = now - round(1000 * result.wall_seconds)
        name = content.trial_name(result)
        run_id = self._client.create_run(self._experiments["trial"], start, tags, name).info.run_id
        values = {name: getattr(result, name) for name in content.TRIAL_PARAMS}
        values |= result.hyperparameters
        params = list[Param]()
        for name, value in values.items():
            if value is not None:
                params.append(Param(content.key(name), str(value)))
        metrics = content.metrics(content.trial_values(chain, self._metric), now)
        # The client itself splits what is past the limits of one request: 1000 metrics, 100
        # parameters.
        self._client.log_batch(run_id, metrics, params)
        status = "FINISHED"
        if result.status == "failed":
            status = "FAILED"
        # Last, because a run that has ended counts as sent.
        self._client.set_terminated(run_id, status, now)
        self._whole[result.number] = run_id, start

    def _chain(self, result: TrialResult) -> list[TrialResult]:
        """Give the trials whose run this one goes on in, itself last.

        One that failed has a run of its own.
        """
        chain = [result]
        if result.status == "failed":
            return chain
        number = result.resumed_from
        while number is not None and number in self._whole:
            chain.insert(0, self._results[number])
            number = chain[0].resumed_from
        return chain

    def _continue_run(self, chain: Sequence[TrialResult]) -> None:
        """Go on with the run of the trials that the last one of ``chain`` continues."""
        result = chain[-1]
        run_id, start = self._whole[chain[-2].number]
        # From the records alone, not the clock: what is sent twice is then the same.
        end = start + round(1000 * sum(trial.wall_seconds for trial in chain))
        tags = self._trial_tags(result) | {"mlflow.runName": content.trial_name(result)}
        run_tags = [RunTag(name, value) for name, value in tags.items()]
        metrics = content.metrics(content.trial_values(chain, self._metric), end)
        self._client.log_batch(run_id, metrics, tags=run_tags)
        self._client.set_terminated(run_id, "FINISHED", end)
        # Last, because a trial that the run names counts as sent.
        self._client.set_tag(run_id, TRIAL_NUMBERS, " ".join(str(trial.number) for trial in chain))
        self._whole[result.number] = run_id, start

    def _write_results(self, found: StudyResult, artifacts: Sequence[Path]) -> None:
        """Send the results to the study's run, or to a new one where that has some already."""
        client = self._client
        # Results of fewer trials, or half sent, perhaps still on their way.
        has_results = bool(self._parent.data.metrics) or RESULTS_BEGUN in self._parent.data.tags
        parent = self._parent
        if has_results:
            # The same colour as before; the tag may have been deleted in the UI.
            colour = parent.data.tags.get(colours.COLOUR_TAG)
            parent = self._create_parent(colour or colours.next_colour(self._other_colours()))
        else:
            self._part_colours(parent)
        run_id = parent.info.run_id
        client.set_tag(run_id, RESULTS_BEGUN, "true")
        self._describe_parent(parent)
        now = round(1000 * time.time())
        client.log_batch(run_id, content.metrics(content.study_values(found), now))
        figure: str | None = None
        for path in artifacts:
            client.log_artifact(run_id, str(path))
            if figure is None and path.suffix == ".png":
                figure = path.name
        where = quote(f"tags.`{STUDY_TAG}` = '{self._tags[STUDY_TAG]}'")
        trials = f"{saved_view.runs_page(self._experiments['trial'])}&searchFilter={where}"
        text = "\n".join(console_rows(answer(found)))
        client.set_tag(run_id, NOTE, content.note(text, run_id, figure, trials, self._page))
        client.set_terminated(run_id, "FINISHED")
        # From here on it is the parent that stays.
        client.set_tag(run_id, RESULT_TRIALS, str(len(self.sent)))
        self._delete_strays()
        self._make_only_parent(run_id)
        self._parent = client.get_run(run_id)

    def _write_checkpoint(self, found: StudyResult) -> None:
        """Send the winner's checkpoint, where this machine has it.

        Without it best.yaml, which is sent in any case, tells how to train the winner again.
        """
        winner = found.winner
        if winner is None:
            return
        checkpoint = self._prepared.files.checkpoint(winner.number)
        if is_own(checkpoint):
            run_id = self._parent.info.run_id
            self._client.log_artifact(run_id, str(checkpoint))
            self._client.set_tag(run_id, CHECKPOINT, checkpoint.name)

    def _run_tags(self, kind: str, device: str, versions: Mapping[str, str]) -> dict[str, str]:
        tags = dict(self._tags)
        tags[KIND] = kind
        tags["bstune.device"] = device
        tags["mlflow.source.name"] = "bstune"
        for package, version in versions.items():
            tags[content.key(f"bstune.version.{package}")] = version
        return tags

    def _trial_tags(self, result: TrialResult) -> dict[str, str]:
        tags: dict[str, str] = {"bstune.status": result.status}
        if result.resumed_from is not None:
            tags["bstune.resumed_from"] = str(result.resumed_from)
        if result.message:
            tags["bstune.message"] = content.cut(result.message, content.TAG_LENGTH)
        return tags


def _experiment(client: MlflowClient, uri: str, name: str) -> Experiment:
    """Find the experiment of this name, or create it."""
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return experiment
    # Left to MLflow, the artifacts of a database would lie below whatever the working directory is.
    path = database_path(uri)
    location: str | None = None
    if path is not None:
        location = str(path.parent / "mlruns" / quote(name, safe=" "))
    try:
        return client.get_experiment(client.create_experiment(name, location))
    except MlflowException:
        # Another process has just made it, or this one, if the request was repeated.
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise
        return experiment


def _add_tags(client: MlflowClient, experiment: Experiment, tags: Mapping[str, str]) -> None:
    """Give an experiment the tags that it lacks; those that it has stay, as people change them."""
    for key, value in tags.items():
        if key not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, key, value)
