"""What is read of the config.yaml that a study's folder holds."""

from pathlib import Path

import yaml
from builders import options_of

from bstune.study.folder_config import options_of_folder, text_of_options
from bstune.study.given import recipe_of


def test_the_plain_arguments_of_the_trainer_are_read_and_no_object_is_named():
    values = yaml.safe_load(text_of_options(options_of("workload=digits")))
    callback = {"class_path": "project.callbacks.Mine", "init_args": {}}
    values["workload"]["trainer"] = {
        "gradient_clip_val": 1.0,
        "gradient_clip_algorithm": "value",
        "log_every_n_steps": 20,
        "callbacks": [callback],
        "strategy": "project.Strategy",
    }
    values["trainer"] = {"deterministic": True, "plugins": {"_target_": "project.Plugin"}}
    options = options_of_folder(values, Path("config.yaml"))
    plain = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value", "log_every_n_steps": 20}
    assert options.workload.trainer == {**plain, "strategy": "project.Strategy"}
    plain |= {"deterministic": True, "benchmark": False}
    assert options.trainer.keys() == {"deterministic", "benchmark"}
    # A fit of the winner has what the study's trials had, and builds nothing by a name.
    recipe = recipe_of(lambda trial: None, ([], []), options)
    assert recipe.trainer_arguments == plain
