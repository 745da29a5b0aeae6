"""What tests share: a small project, and a folder of its own for each study."""

import os

# Nothing of the user's own settings decides a test.
os.environ.pop("MLFLOW_TRACKING_URI", None)
